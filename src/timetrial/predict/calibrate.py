"""Measure this machine into a system file: `timetrial calibrate`, then `timetrial predict --system local`.

    local.toml   the system: cores as accelerators, peaks as measured
    local.json   points (`systems/points.py`, `systems/eager.py`): products by shape, attention, every operator bound by
                 memory, the optimizer, gloo's collectives, what other processes at work cost, what the host costs

What is timed are the operators of this package's own layers, in the order in which training runs them, so that
caches and strides are those of training (`calibrate_layers.py`); several ranks measure what several ranks do
(`calibrate_ranks.py`). What Python, autograd and the wrappers of each axis cost is what tiny steps take beyond the
prediction of their kernels.

What one thread does is timed by what it computes, so that others at work on the machine slow a calibration down but
hardly falsify it; messages and lanes are timed by the wall (of lanes' steps the fastest tenth counts). The file says
how far single times scattered, and whether others were at work.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from timetrial.errors import RunFailed, UserError
from timetrial.predict import calibrate_ranks as ranks
from timetrial.predict import calibrate_write as written
from timetrial.predict.calibrate_layers import (
    Clock,
    Samples,
    Size,
    time_attention,
    time_layers,
    time_memory,
    time_optimizer,
    time_products,
)
from timetrial.predict.local import heap_bytes, predict_local
from timetrial.predict.trace import trace_layers
from timetrial.systems import system as systems
from timetrial.train.environment import cores_available
from timetrial.train.process import keep_freed_memory

BUSY = 0.3
"""Others' processes at work, a core, from which a calibration says that the machine is busy."""
RANKS_S = 300.0
"""Seconds that the ranks may take."""
MOST_RANKS = 4


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    layers: tuple[Size, ...]
    products: tuple[tuple[int, int, int], ...]
    """m, n, k."""
    attention: tuple[tuple[int, int, int, int], ...]
    """Batch, heads, tokens, head dimension."""
    memory: tuple[int, ...]
    """Bytes of a tensor."""
    optimizer: tuple[int, ...]
    """Elements."""
    collectives: tuple[int, ...]
    """Bytes of a whole tensor."""
    beside: tuple[Size, ...]
    """Layers that are timed alone and while other ranks work."""
    repeats: int
    steps: int
    """Tiny steps of each layout."""
    patterns: tuple[str, ...] = ("one", "accumulating", "selective", "full")
    """Of memory in one rank."""
    ranks: bool = True
    """Whether several ranks are measured where there are cores for them."""


LONGEST_FLOP = 1.2e10
"""Of one product: about an eighth of a second on a core."""

FULL = Effort(
    layers=(
        ranks.TINY,
        Size(128, 448, 4, 128, 1),
        Size(128, 448, 4, 128, 8),
        Size(128, 448, 4, 512, 4),
        Size(256, 896, 4, 256, 1),
        Size(256, 896, 8, 256, 4),
        Size(256, 896, 4, 512, 4),
        Size(512, 1792, 8, 128, 1),
        Size(512, 1792, 8, 512, 1),
        Size(512, 1792, 8, 512, 2),
        Size(128, 448, 4, 256, 4, "bf16"),
        Size(512, 1792, 8, 256, 2, "bf16"),
        Size(128, 448, 4, 256, 4, adapters=True),
        Size(512, 1792, 8, 256, 2, adapters=True),
    ),
    products=tuple(
        (m, n, k)
        for m in (512, 2048, 8192)
        for n in (128, 512, 2048, 8192)
        for k in (128, 512, 2048, 8192)
        if 2.0 * m * n * k <= LONGEST_FLOP
    ),
    attention=(
        *((b, h, t, d) for t in (64, 128, 256, 512) for b, h in ((1, 4), (4, 8)) for d in (32, 64)),
        (1, 8, 1024, 64),
    ),
    memory=tuple(1 << n for n in range(10, 27, 2)),
    optimizer=(30_000, 300_000, 3_000_000, 30_000_000),
    collectives=(64, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26),
    beside=(Size(128, 448, 4, 256, 4), Size(512, 1792, 8, 256, 2)),
    repeats=2,
    steps=15,
)
"""About a minute on two cores."""


def calibrate(
    out: Path | None = None,
    effort: Effort = FULL,
    *,
    say: Callable[[str], None] = print,
    clock: Clock = time.thread_time,
) -> Path:
    """Measure this machine; the path of the system file, `local.toml`, with `local.json` beside it.

    They lie in the directory `out`, by default where `--system local` looks for them; earlier ones are replaced once
    all is measured. Takes one thread of the calling process, and other processes for ranks. Raises UserError where
    the directory cannot be written, RunFailed where ranks fail.
    """
    folder = systems.local_path().parent if out is None else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be made: {error.strerror}") from None
    began, cores = time.monotonic(), cores_available()
    others = load_of_others()
    if others > BUSY * cores:
        say(f"others are at work here ({others:.1f} of {cores} cores): the figures will be theirs too")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            content = _measure(effort, cores, say, clock, Path(scratch))
            content["notes"] |= {
                "seconds": round(time.monotonic() - began, 1),
                "others_at_work": [round(others, 2), round(load_of_others(), 2)],
            }
            _settle_memory(content)
            _settle_hosts(content, effort, cores, Path(scratch), say, clock)
        return written.write(folder, content, cores)
    finally:
        torch.set_num_threads(threads)


def load_of_others(seconds: float = 0.3) -> float:
    """Cores that other processes use: what /proc/stat counts as busy in `seconds`, without this process."""
    before, own = _busy_s(), time.process_time()
    time.sleep(seconds)
    return max(0.0, (_busy_s() - before - (time.process_time() - own)) / seconds)


def _busy_s() -> float:
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system = (int(x) for x in fields[:3])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _measure(effort: Effort, cores: int, say: Callable[[str], None], clock: Clock, scratch: Path) -> dict[str, Any]:
    """The content of the file of points, host costs but for "one" and "lanes" as raw steps."""
    samples, ring = Samples(), Samples()
    for size in effort.layers:
        say(f"layers of {size.dim} x {size.mbs * size.seq_len} tokens")
        time_layers(size, effort.repeats, samples, clock)
    say(f"{len(effort.products)} products")
    time_products(list(effort.products), effort.repeats + 1, samples, clock)
    say("attention")
    time_attention(list(effort.attention), effort.repeats + 1, samples, ring, clock)
    say("memory, optimizer")
    memory = time_memory(list(effort.memory), effort.repeats + 3, clock)
    optimizer = time_optimizer(list(effort.optimizer), effort.repeats + 3, clock)
    content = written.points(samples, ring, memory, optimizer)
    content["memory_marks"] = {pattern: _memory_marks(pattern) for pattern in effort.patterns}
    content["notes"]["run_bytes"] = _run_bytes(scratch)
    content["steps"] = {layout: _steps(layout, effort, clock) for layout in ranks.ALONE[: 3 + (cores > 1)]}
    if cores < 2 or not effort.ranks:
        return content
    for count in (2, 4):
        if count <= min(cores, MOST_RANKS):
            say(f"{count} ranks: collectives, kernels beside others'" + ", tiny steps" * (count == 2))
            job = ranks.Job(count, effort.beside, effort.repeats, effort.steps, effort.collectives, layouts=count == 2)
            found = _on_ranks(job, scratch)
            content["beside"][str(count)] = found["beside"]
            if found["memory_marks"]:
                content["memory_marks"]["several"] = found["memory_marks"]
            content["steps"] |= found.get("steps", {})
            for kind, rows in found["collectives"].items():
                content["collectives"].setdefault(kind, {})[str(count)] = rows
    return content


def _steps(layout: str, effort: Effort, clock: Clock) -> list[float]:
    # lanes are threads of their own: their time is the wall's
    own, steps = (time.perf_counter, 3 * effort.steps) if layout == "lanes" else (clock, effort.steps)
    return [ranks.step_s(ranks.tiny(layout, n), steps, own) for n in ranks.LAYERS]


def _memory_marks(pattern: str) -> list[int]:
    """Of one rank: see `calibrate_ranks.memory_marks`."""
    words = [sys.executable, "-m", "timetrial.predict.calibrate_ranks", "memory", pattern]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunFailed(f"a rank could not be started: {done.stderr.strip().splitlines()[-1]}")
    marks: list[int] = json.loads(done.stdout)
    return marks


def _run_bytes(scratch: Path) -> int:
    """The most bytes that `timetrial train` has had after some small steps: command line, readers and files too."""
    out, shape = scratch / "run", ranks.SMALL_RUN
    sets = {
        "model.dim": shape.dim, "model.n_layers": ranks.SMALL_LAYERS, "model.n_heads": shape.heads,
        "model.n_kv_heads": shape.heads // 2, "model.ffn_dim": shape.ffn_dim, "data.seq_len": shape.seq_len,
        "evaluation.every_samples": 1_000_000, "evaluation.samples": 2, "checkpoint_every": 0,
    }  # fmt: skip
    words = [sys.executable, "-m", "timetrial", "train", "llama31_8b", "--out", str(out), "--threads", "1"]
    words += ["--plan", f"mbs={shape.mbs},gbs={shape.mbs},precision=fp32"]
    words += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + RANKS_S
    with (scratch / "run.txt").open("w") as said:
        process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= ranks.RUN_STEPS:
                return ranks.resident_bytes(process.pid)
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    lines = (scratch / "run.txt").read_text(encoding="utf-8").strip().splitlines()
    raise RunFailed(f"a run to calibrate by did not start: {lines[-1] if lines else 'without a word'}")


def _on_ranks(job: ranks.Job, scratch: Path) -> dict[str, Any]:
    """Run `job` on ranks of its own; what rank 0 found."""
    folder = scratch / f"ranks-{job.ranks}"
    folder.mkdir()
    job.write(folder / "job.json")
    words = [sys.executable, "-m", "timetrial.predict.calibrate_ranks", str(folder / "job.json")]
    processes = [
        subprocess.Popen([*words, str(rank)], stdout=subprocess.DEVNULL, stderr=(folder / f"{rank}.err").open("w"))
        for rank in range(job.ranks)
    ]
    deadline = time.monotonic() + RANKS_S
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{job.ranks} ranks were not done within {RANKS_S:g} s; calibrate again") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        said = "".join((folder / f"{rank}.err").read_text() for rank in range(job.ranks)).strip().splitlines()
        raise RunFailed(f"a rank of the calibration failed: {said[-1] if said else 'without a word'}")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def _settle_memory(content: dict[str, Any]) -> None:
    """What an idle rank takes, and what heaps hold beyond what `alive.py` says, from two runs of each kind."""
    content["idle_bytes"], content["reserved"] = {}, {}
    for pattern, marks in content.pop("memory_marks").items():
        used = [heap_bytes(config, trace_layers) for config in ranks.memory_configs(pattern)]
        state, passing = zip(*used, strict=True)
        # marks = idle + state + passing (1 + reserved), of two configurations
        share = (marks[1] - marks[0] - (state[1] - state[0])) / (passing[1] - passing[0]) - 1
        content["notes"].setdefault("heap_beyond", {})[pattern] = round(share, 4)
        share = min(max(share, 0.0), 10.0)
        content["reserved"][pattern] = round(share, 4)
        if pattern in ("one", "several"):
            content["idle_bytes"][pattern] = max(1, round(marks[0] - state[0] - passing[0] * (1 + share)))
    # a run has more beside its model than the processes that were measured by each pattern
    state_bytes, passing_bytes = heap_bytes(ranks.SMALL_RUN.config(ranks.SMALL_LAYERS), trace_layers)
    idle = content["notes"]["run_bytes"] - state_bytes - passing_bytes * (1 + content["reserved"]["one"])
    more = max(0, round(idle - content["idle_bytes"]["one"]))
    content["idle_bytes"] = {pattern: size + more for pattern, size in content["idle_bytes"].items()}


def _settle_hosts(
    content: dict[str, Any], effort: Effort, cores: int, scratch: Path, say: Callable[[str], None], clock: Clock
) -> None:
    """Host costs from tiny steps: what they take beyond the prediction of their kernels.

    The prediction is linear in the cost of an operator and of a step, and two depths give both. Steps of ranks were
    timed without waiting, so that their predictions here have neither messages nor bubbles.
    """
    say("host costs")
    steps: Mapping[str, list[float]] = content.pop("steps")
    content["notes"]["tiny_steps_us"] = {layout: [round(s * 1e6) for s in both] for layout, both in steps.items()}
    still = {
        kind: {n: [[size, 1e-6] for size, _ in rows] for n, rows in by_ranks.items()}
        for kind, by_ranks in content["collectives"].items()
    }

    def predicted_s(layout: str, layers: int, operator_us: float) -> float:
        host = {"one": [operator_us, 0.0]}
        path = written.write(scratch, content | {"collectives": still, "host": host}, cores)
        step, _ = predict_local(ranks.tiny(layout, layers), systems.load(path), trace_layers)
        return step.seconds - step.parts.get("bubble", 0.0) - step.parts.get("pp", 0.0)

    for layout, measured in steps.items():
        bare = [predicted_s(layout, n, 0.0) for n in ranks.LAYERS]
        # seconds for each microsecond that an operator costs
        slope = [(predicted_s(layout, n, 10.0) - p) / 10.0 for n, p in zip(ranks.LAYERS, bare, strict=True)]
        rest = [m - p for m, p in zip(measured, bare, strict=True)]
        operator_us = max(0.0, (rest[1] - rest[0]) / (slope[1] - slope[0]))
        step_us = max(0.0, statistics.mean(r - s * operator_us for r, s in zip(rest, slope, strict=True)) * 1e6)
        content["host"][layout] = [round(operator_us, 3), round(step_us, 1)]
