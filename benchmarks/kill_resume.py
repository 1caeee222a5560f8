"""kill -9 at random moments, then --resume, until the run ends; compared bit for bit with an undisturbed run.

    python benchmarks/kill_resume.py [--kills 50] [--ranks 1] [--plan PLAN] [--hang-every N] [--timeout S]
                                     [--steps 400] [--seed 0] [--keep DIR]

Trains the llama31_8b mini preset with its dimensions shrunk, a checkpoint every five steps. Four kills
of five fall at a random moment of the training, the fifth at one of the start, restore included. With
several ranks every second kill takes one rank alone, the others take all at once, the launcher too; with
--hang-every N each Nth stops one rank (SIGSTOP) instead. A rank that was taken alone must be named, and
the job must end by itself. When a run ends before all kills are spent, another is started. Compared at
its end: step, loss, gradient norm and learning rate of every step, samples and value of every evaluation,
the events of the result log, and the hash of the last checkpoint's tensors. Exit code 1 when anything
differs or a resume fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMALL = {
    "model.dim": 64, "model.n_layers": 2, "model.n_heads": 2, "model.n_kv_heads": 2, "model.ffn_dim": 128,
    "data.seq_len": 64, "plan.mbs": 2, "plan.gbs": 4, "evaluation.every_samples": 64, "evaluation.samples": 8,
    "evaluation.target": 0.01, "checkpoint_every": 5,
}  # fmt: skip
START_S = 300.0  # a start that takes longer than this without a step is left to go on
SLACK_S = 60.0  # a job must end so long after its timeout, or after the kill, on a machine that others use
ACTIVE_S = 2.0  # kills of the training fall within this time of its first new step


def command(out: Path, options: argparse.Namespace, resume: bool) -> list[str]:
    words = [sys.executable, "-m", "timetrial", "train", "llama31_8b", "--out", str(out), "--threads", "1"]
    words += ["--nproc", str(options.ranks), "--timeout", str(options.timeout)]
    words += ["--plan", options.plan] if options.plan and not resume else []
    if resume:
        return [*words, "--resume"]
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    return [*words, "--preset", "mini", "--max-steps", str(options.steps), *sets]


class Run:
    """One start of the trainer, with its output in a file."""

    def __init__(self, out: Path, options: argparse.Namespace) -> None:
        self.out = out
        self.resumed = (out / "config.json").exists()
        if not self.resumed and out.exists():  # killed before there was a run
            shutil.rmtree(out)
        self.leftovers = leftovers(out)
        self.lines = lines(out / "metrics.jsonl")
        self.output = out.with_name(out.name + ".output")
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command(out, options, self.resumed), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait_for_a_step(self) -> float:
        """Returns when the run has made a step, or has ended; seconds that took."""
        began = time.perf_counter()
        before = size(self.out / "metrics.jsonl")
        while not self.ended() and time.perf_counter() - began < START_S:
            now = size(self.out / "metrics.jsonl")
            if now > before:
                break
            before = min(before, now)  # cut back on resume
            time.sleep(0.005)
        return time.perf_counter() - began

    def kill(self) -> tuple[str, str]:
        """SIGKILL to all processes; what was done, and how that went."""
        family = descendants(self.process.pid)
        for pid in [*family, self.process.pid]:
            send(pid, signal.SIGKILL)
        self.process.wait()
        gone(family)
        return "all killed", ""

    def take_one(self, draw: random.Random, hang: bool, timeout_s: float) -> tuple[str, str]:
        """SIGKILL or SIGSTOP to one rank, after which the job must end by itself and name it; as `kill`."""
        family = descendants(self.process.pid)
        ranks = {rank: pid for pid in family if (rank := rank_of(pid, self.process.pid)) is not None}
        if not ranks:
            return self.kill()
        rank = draw.choice(sorted(ranks))
        began = time.perf_counter()
        send(ranks[rank], signal.SIGSTOP if hang else signal.SIGKILL)
        limit_s = (timeout_s if hang else 0.0) + SLACK_S
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the job did not end within {limit_s:g} s after rank {rank} was taken") from None
        gone(family)
        took = f"ended after {time.perf_counter() - began:.1f} s"
        said = [line for line in self.output.read_text(errors="replace").splitlines() if line.startswith("error: ")]
        if code == 0:  # it had all but ended
            return "one rank taken too late", f"rank {rank}"
        expected = f"rank {rank} " + ("" if hang else "was killed by signal 9")
        if len(said) != 1 or expected not in said[0]:
            raise SystemExit(f"rank {rank} was {'stopped' if hang else 'killed'}, and the job said: {said}")
        return f"one rank {'stopped' if hang else 'killed'}", f"{took}: {said[0].removeprefix('error: ')}"

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-2000:]


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
        os.kill(pid, number)


def gone(family: list[int]) -> None:
    """Returns when none of these processes is left."""
    while any(alive(pid) for pid in family):
        time.sleep(0.005)


def rank_of(pid: int, launcher: int) -> int | None:
    """The rank of a process that `launcher` started; None for other processes."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None  # it has ended
    found = [value for name, _, value in (v.partition(b"=") for v in variables) if name == b"RANK"]
    return int(found[0]) if found and parent == launcher else None


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(root: int) -> list[int]:
    """Processes below `root`; ranks are children of the command."""
    children = collections.defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children[int((entry / "stat").read_text().rpartition(")")[2].split()[1])].append(int(entry.name))
            except OSError:
                continue  # it has ended
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children[parent]]
        found += level
    return found


def leftovers(out: Path) -> set[tuple[str, int]]:
    """Checkpoints in writing."""
    found = set()
    for path in (out / "checkpoints").glob(".step-*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # it has just got its name
            found.add((path.name, path.stat().st_ino))
    return found


def where(run: Run) -> str:
    """What the killed run was doing."""
    if leftovers(run.out) - run.leftovers:
        return "while a checkpoint was written"
    return "between checkpoints" if lines(run.out / "metrics.jsonl") != run.lines else "before the first step"


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def trace(out: Path) -> dict[str, Any]:
    """What must be the same in every run: no times."""

    def rows(name: str, keys: tuple[str, ...]) -> list[tuple[Any, ...]]:
        return [tuple(json.loads(line)[key] for key in keys) for line in (out / name).read_text().splitlines()]

    newest = max((out / "checkpoints").glob("step-*"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    log = (line.partition(":::MLLOG ")[2] for line in (out / "result_0.txt").read_text().splitlines())
    events = [json.loads(text) for text in log if text]
    return {
        "steps": rows("metrics.jsonl", ("step", "loss", "grad_norm", "lr", "samples")),
        "evaluations": rows("evaluations.jsonl", ("step", "samples", "value")),
        "log": [(e["key"], e["value"], {k: v for k, v in e["metadata"].items() if k != "lineno"}) for e in events],
        "checkpoint": (newest.name, sorted((n, f["sha256"]) for n, f in files.items() if n.endswith(".distcp"))),
        "status": json.loads((out / "result.json").read_text())["status"],
    }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    out = []
    for part, want in expected.items():
        got = found[part]
        if want != got:
            pairs = zip(want, got, strict=False) if isinstance(want, list) else [(want, got)]
            first = next(((a, b) for a, b in pairs if a != b), (len(want), len(got)))
            out.append(f"{part}: {first[0]} undisturbed, {first[1]} resumed")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--plan", help="layout over the ranks, such as pp=2; data parallel by default")
    parser.add_argument("--hang-every", type=int, default=0, help="stop one rank at each Nth kill; 0: never")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a rank counts as hung")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--keep", type=Path, help="directory for the runs, which stay there")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    draw = random.Random(options.seed)
    began = time.perf_counter()

    plain = Run(root / "undisturbed", options)
    start_s = plain.wait_for_a_step()
    if plain.process.wait() != 0:
        raise SystemExit(f"the undisturbed run failed:\n{plain.tail()}")
    expected = trace(plain.out)
    print(f"undisturbed run: {len(expected['steps'])} steps, {time.perf_counter() - began:.0f} s", flush=True)

    fell: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    runs, wrong = 0, []
    while sum(fell.values()) < options.kills:
        runs += 1
        out = root / f"killed-{runs}"
        while True:
            run = Run(out, options)
            killed = sum(fell.values())
            if killed < options.kills:
                if killed % 5 == 4:
                    time.sleep(draw.uniform(0.0, start_s))
                else:
                    start_s = run.wait_for_a_step()  # the newest: others may use the machine
                    time.sleep(draw.uniform(0.0, ACTIVE_S))
            if killed == options.kills or run.ended():
                code = run.process.wait()
                if code != 0:
                    raise SystemExit(f"after {killed} kills the run ended with exit code {code}:\n{run.tail()}")
                break
            several, every = options.ranks > 1, options.hang_every
            hang = several and every > 0 and killed % every == every - 1
            alone = several and (hang or killed % 2 == 1)
            kind, how = run.take_one(draw, hang, options.timeout) if alone else run.kill()
            place = where(run)
            fell[place] += 1
            kinds[kind] += 1
            recorded = lines(out / "metrics.jsonl")
            print(f"kill {killed + 1:3d}  {place}, {recorded} steps recorded; {kind} {how}", flush=True)
            if "is damaged" in run.output.read_text(errors="replace"):
                wrong.append(f"a resume found a damaged checkpoint after {killed} kills: {run.tail()}")
            if (out / "result.json").exists():  # killed while it wrote its page: there is nothing to go on with
                break
        differ = differences(expected, trace(out))
        wrong += [f"run {runs}: {text}" for text in differ]
        print(f"run {runs} ended, {'EQUAL to' if not differ else 'DIFFERENT from'} the undisturbed one", flush=True)

    total = sum(fell.values())
    plan = f", {options.plan}" if options.plan else ""
    print(f"\n{total} kills in {runs} run(s) of {options.steps} steps on {options.ranks} rank(s){plan}: ", end="")
    print(", ".join(f"{count} {place}" for place, count in fell.most_common()), end="; ")
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    print(f"steps, evaluations, log, last checkpoint: {'bit for bit equal' if not wrong else 'NOT equal'}")
    print(
        f"{time.perf_counter() - began:.0f} s; runs in {root}"
        if options.keep
        else f"{time.perf_counter() - began:.0f} s"
    )
    if not options.keep and not wrong:
        shutil.rmtree(root)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
