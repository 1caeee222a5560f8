"""`timetrial predict --system local` against `timetrial train` on this machine: step time, memory, bytes sent.

    python benchmarks/predict_local.py [--system FILE.toml] [--rounds 2] [--steps 8] [--only WORD] [--quiet S]
                                       [--keep DIR] [--out FILE.json]

Calibrates (or takes the system file of an earlier calibration), then trains every case as the command line does, a
few steps each, in rounds over all cases, and prints what was measured beside what was predicted. A case's step time
is the median over all rounds, the first two steps of each run left out. Memory is the most that a rank had
resident before its last step (VmHWM), the interpreter with torch counted in. Bytes are those of every collective of
one step of each rank, recorded in an engine of the same configuration, and must be equal.

Others at work make steps longer than they are. The cores that they used during a case are printed with it, and
"own" is the step time without what the kernel counts as waiting for a core (of the thread that waited most; what a
rank waits for another one that waits is still in it). With --quiet each run waits so many seconds for others to be
done. The exit code is 1 where bytes differ, or where the
goals are missed: step time within 10 % in the median and 25 % at worst, memory within 5 % at worst.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timetrial.config import RunConfig, load
from timetrial.predict.calibrate import _busy_s, calibrate, load_of_others
from timetrial.predict.collectives import step_collectives
from timetrial.predict.local import local_memory, predict_local
from timetrial.predict.trace import trace_layers
from timetrial.systems import system as systems

FIRST = 2  # steps of a run that are left out: memory is touched, connections are made
TIMEOUT_S = 120.0


@dataclass
class Case:
    """One kind of run."""

    name: str
    dim: int
    layers: int
    seq_len: int
    mbs: int
    gbs: int
    plan: str = ""
    ranks: int = 1
    lanes: int = 1
    adapters: bool = False
    steps: list[float] = field(default_factory=list)
    """Seconds, all rounds."""
    own: list[float] = field(default_factory=list)
    """The same without the time in which a rank waited for a core."""
    memory: list[int] = field(default_factory=list)
    """Bytes of the rank that had most, by round."""
    others: list[float] = field(default_factory=list)
    """Cores that others used, by round."""
    config: RunConfig | None = None

    def words(self, out: Path, steps: int) -> list[str]:
        """The command line."""
        ffn = {128: 448, 192: 640, 256: 896, 384: 1280, 512: 1792}[self.dim]
        heads = max(2, self.dim // 64)
        sets = {
            "model.dim": self.dim, "model.n_layers": self.layers, "model.n_heads": heads,
            "model.n_kv_heads": heads // 2, "model.ffn_dim": ffn, "data.seq_len": self.seq_len,
            "evaluation.every_samples": 1_000_000, "evaluation.samples": 2, "checkpoint_every": 0,
        }  # fmt: skip
        workload = "llama31_8b"
        if self.adapters:
            workload, sets["init.kind"], sets["data.source"] = "llama2_70b_lora", "random", "sotu"
        if self.ranks == 1:
            sets["lanes"] = self.lanes
        plan = ",".join(text for text in (f"mbs={self.mbs},gbs={self.gbs}", self.plan) if text)
        words = [sys.executable, "-m", "timetrial", "train", workload, "--out", str(out), "--plan", plan]
        words += ["--threads", str(self.lanes), "--nproc", str(self.ranks), "--max-steps", str(steps)]
        return words + [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]


CASES = [
    Case("small", 128, 4, 128, 8, 8),
    Case("deep", 192, 8, 128, 4, 4),
    Case("wide", 512, 2, 256, 2, 2),
    Case("long", 256, 4, 512, 2, 2),
    Case("accumulating", 256, 2, 256, 2, 8),
    Case("bf16", 384, 4, 256, 2, 2, "precision=bf16"),
    Case("selective", 256, 6, 256, 4, 4, "recompute=selective"),
    Case("full", 384, 4, 256, 4, 4, "recompute=full"),
    Case("adapters", 256, 6, 256, 4, 4, adapters=True),
    Case("zero 1", 256, 4, 256, 4, 8, "dp=2,zero=1", ranks=2),
    Case("zero 3", 384, 4, 256, 4, 8, "dp=2,zero=3", ranks=2),
    Case("zero 3, m=2", 256, 4, 256, 2, 8, "dp=2,zero=3", ranks=2),
    Case("tp", 512, 3, 256, 4, 4, "tp=2", ranks=2),
    Case("cp", 256, 4, 512, 4, 4, "cp=2", ranks=2),
    Case("pp", 256, 6, 256, 2, 8, "pp=2", ranks=2),
    Case("two lanes", 256, 4, 256, 4, 4, lanes=2),
    Case("two lanes, wide", 512, 2, 256, 4, 4, lanes=2),
]


def train(case: Case, folder: Path, steps: int) -> None:
    """Run a case once and take down what it took."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    busy, own, began = _busy_s(), children_s(), time.monotonic()
    with (folder / "output.txt").open("w") as file:
        process = subprocess.Popen(case.words(out, steps), stdout=file, stderr=subprocess.STDOUT)
        most, window = 0, Window()
        while process.poll() is None:
            made, pids = lines(out / "metrics.jsonl"), ranks_of(process.pid, case.ranks)
            if made < steps:
                most = max([most, *map(resident_bytes, pids)])
            if made >= FIRST:
                window.look(pids, last=made >= steps)
            time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"{case.name} failed:\n{(folder / 'output.txt').read_text()[-2000:]}")
    seconds = time.monotonic() - began
    case.others.append(max(0.0, (_busy_s() - busy - (children_s() - own)) / seconds))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    case.steps += [row["step_time_s"] for row in rows[FIRST:]]
    case.own += [row["step_time_s"] * (1 - window.waiting) for row in rows[FIRST:]]
    case.memory.append(most)
    case.config = load(json.loads((out / "config.json").read_text()))


class Window:
    """How long threads were ready to run and had no core, by the kernel's count, from the first look to the last."""

    def __init__(self) -> None:
        self.began: tuple[float, dict[tuple[int, int], int]] | None = None
        self.waiting = 0.0
        """Share of the time; of the thread that waited most."""
        self.closed = False

    def look(self, pids: list[int], last: bool) -> None:
        if self.closed:
            return
        now = time.monotonic(), delays_ns(pids)
        if self.began is None:
            self.began = now
        waits = [ns - self.began[1].get(thread, ns) for thread, ns in now[1].items()]
        if waits and now[0] > self.began[0]:
            self.waiting = min(0.95, max(waits) / 1e9 / (now[0] - self.began[0]))
        self.closed = last


def delays_ns(pids: list[int]) -> dict[tuple[int, int], int]:
    """(process, thread) -> nanoseconds that it has waited for a core."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                found[pid, int(thread.name)] = int((thread / "schedstat").read_text().split()[1])
    return found


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ranks_of(pid: int, ranks: int) -> list[int]:
    """The processes that train: the command itself, or its children where it only starts ranks."""
    if ranks == 1:
        return [pid]
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def resident_bytes(pid: int) -> int:
    """The most that a process has had in memory so far."""
    with contextlib.suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


# ---- bytes ---------------------------------------------------------------------------------------


def record(folder: Path, rank: int) -> None:
    """One rank of all configurations in `folder`: what it sends in a step beside what is predicted of it."""
    import torch
    import torch.distributed as dist

    from timetrial.optim import adamw
    from timetrial.parallel import parallelize
    from timetrial.parallel.engine import NoTimer
    from timetrial.parallel.record import Recorder
    from timetrial.predict.calibrate_ranks import batches_of
    from timetrial.train.build import InitialValues, empty_model
    from timetrial.train.step import Step

    torch.set_num_threads(1)
    configs = {path.stem: load(json.loads(path.read_text())) for path in sorted(folder.glob("*.config"))}
    predicted = {
        name: step_collectives(trace_layers(config, "cpu"), config, rank, "cpu") for name, config in configs.items()
    }
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=TIMEOUT_S)
    )
    told = {}
    for name, config in configs.items():
        engine = parallelize.build(config, empty_model(config), InitialValues(config, None))
        step = Step(engine, adamw.build(engine.parameters_named(), config.optim, fused=True), 1.0)
        batches = batches_of(config)
        step(batches, 1e-4, NoTimer())  # the first makes connections
        with Recorder() as recorder:
            step(batches, 1e-4, NoTimer())
        calls = Counter((call.kind, call.ranks, call.bytes) for call in recorder.calls)
        expected = Counter((call.kind, call.ranks, call.bytes) for call in predicted[name])
        wrong = [f"{key}: {calls[key]} recorded, {expected[key]} predicted" for key in calls | expected
                 if calls[key] != expected[key]]  # fmt: skip
        told[name] = {
            "calls": sum(calls.values()),
            "recorded_bytes": sum(size * n for (_, _, size), n in calls.items()),
            "predicted_bytes": sum(size * n for (_, _, size), n in expected.items()),
            "wrong": wrong,
        }
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def compare_bytes(cases: list[Case], folder: Path) -> dict[str, dict[str, Any]]:
    """Of every case of two ranks: calls and bytes of rank 0, and what differs on any rank."""
    from timetrial.config import dumps

    several = [case for case in cases if case.ranks > 1 and case.config is not None]
    if not several:
        return {}
    folder.mkdir()
    for case in several:
        assert case.config is not None
        (folder / f"{case.name}.config").write_text(dumps(case.config))
    words = [sys.executable, __file__, "--record", str(folder), "--rank"]
    ranks = [subprocess.Popen([*words, str(rank)], stderr=(folder / f"{rank}.err").open("w")) for rank in (0, 1)]
    for rank, process in enumerate(ranks):
        if process.wait():
            raise SystemExit(f"recording failed on rank {rank}:\n{(folder / f'{rank}.err').read_text()[-2000:]}")
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {name: told[0][name] | {"wrong": told[0][name]["wrong"] + told[1][name]["wrong"]} for name in told[0]}


# ---- the table -----------------------------------------------------------------------------------


def row(case: Case, path: Path, sent: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What was measured and predicted of a case."""
    assert case.config is not None
    system = systems.load(path)
    step, _ = predict_local(case.config, system, trace_layers)
    memory = local_memory(case.config, system, trace_layers).peak.total
    measured = statistics.median(case.steps)
    own = statistics.median(case.own)
    had = max(case.memory)
    return {
        "case": case.name,
        "shape": f"{case.dim} x {case.layers}, {case.mbs} of {case.gbs} x {case.seq_len}"
        + f" {case.plan}" * bool(case.plan),
        "measured_s": measured,
        "own_s": own,
        "predicted_s": step.seconds,
        "error": step.seconds / measured - 1,
        "own_error": step.seconds / own - 1,
        "memory_bytes": had,
        "predicted_memory_bytes": memory,
        "memory_error": memory / had - 1,
        "others_cores": statistics.mean(case.others),
        "parts": dict(step.parts),
        "steps_s": case.steps,
        **({"sent": sent[case.name]} if case.name in sent else {}),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'case':16} {'dim x layers, mbs of gbs x seq':46} {'measured':>9} {'own':>9} {'predicted':>9}"
    head += (
        f" {'error':>7} {'of own':>7} {'memory':>8} {'predicted':>9} {'error':>7} {'others':>6}  bytes sent in a step"
    )
    text = [head]
    for r in rows:
        sent = r.get("sent")
        told = f"{sent['recorded_bytes']:,} in {sent['calls']} calls" if sent else ""
        told += (": equal" if not sent["wrong"] else f": {sent['wrong'][0]}") if sent else ""
        text.append(
            f"{r['case']:16} {r['shape']:46} {r['measured_s'] * 1e3:6.1f} ms {r['own_s'] * 1e3:6.1f} ms"
            f" {r['predicted_s'] * 1e3:6.1f} ms {r['error']:+7.1%} {r['own_error']:+7.1%}"
            f" {r['memory_bytes'] / 2**20:4.0f} MiB"
            f" {r['predicted_memory_bytes'] / 2**20:5.0f} MiB {r['memory_error']:+7.1%} {r['others_cores']:6.2f}"
            f"  {told}"
        )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", type=Path, help="system file of a calibration; calibrates where it is left out")
    parser.add_argument("--keep", type=Path, help="directory for the calibration, which stays there")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a run")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds to wait before each run for others to end")
    parser.add_argument("--out", type=Path, help="file for all figures")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.record, options.rank)
        return
    began = time.monotonic()
    cases = [case for case in CASES if options.only in case.name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        print(f"others use {load_of_others(1.0):.2f} of {os.cpu_count()} cores; nice {os.nice(0)}", flush=True)
        path = options.system or calibrate(
            options.keep or folder / "system", say=lambda text: print(f"  {text}", flush=True)
        )
        print(f"{time.monotonic() - began:.0f} s for the calibration", flush=True)
        for n in range(options.rounds):
            for case in cases:
                wait_until = time.monotonic() + options.quiet
                while time.monotonic() < wait_until and load_of_others() > 0.2:
                    pass
                train(case, folder, options.steps)
            print(f"round {n + 1}: {time.monotonic() - began:.0f} s", flush=True)
        sent = compare_bytes(cases, folder / "bytes")
        rows = [row(case, path, sent) for case in cases]
    print(table(rows))
    errors, own = (sorted(abs(r[key]) for r in rows) for key in ("error", "own_error"))
    memory = sorted(abs(r["memory_error"]) for r in rows)
    unequal = [r["case"] for r in rows if r.get("sent", {}).get("wrong")]
    print(f"step time: {statistics.median(errors):.1%} in the median, {errors[-1]:.1%} at worst, {len(rows)} cases")
    print(f"without waiting for a core: {statistics.median(own):.1%} in the median, {own[-1]:.1%} at worst")
    print(f"memory: {statistics.median(memory):.1%} in the median, {memory[-1]:.1%} at worst")
    print(f"bytes: {'equal in all cases of two ranks' if not unequal else f'different in {unequal}'}")
    print(f"{time.monotonic() - began:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    if unequal or statistics.median(errors) > 0.10 or errors[-1] > 0.25 or memory[-1] > 0.05:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
