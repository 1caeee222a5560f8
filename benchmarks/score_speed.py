"""Score a whole results repository, against the official summarizer on the same tree.

    python benchmarks/score_speed.py --logs ../shared/logs [--runs 1800] [--workers 2] [--official] [--large 300]

The tree is made by copying published logs (LOGS/ROUND/ORG/{systems,results}) to as many submitters as it takes; every
third log gets per-step events up to `--megabytes`, as the logs of large systems have. The official
`python -m mlperf_logging.result_summarizer` takes one round at a time, with --generate_private_ids since it refuses
descriptions without a private_id. It also runs the compliance checker and the convergence checker on each directory;
ours runs its own rules, the convergence test and the breakdown of time. Both must come to the same scores.

`--large MB` reads one log of that size instead and prints the memory that it took.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from timetrial.results.many import score_all
from timetrial.results.read import read
from timetrial.results.records import Result

STEP = (
    ':::MLLOG {"namespace": "", "time_ms": %d, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": '
    '{"train_step_time": %.15f, "reduced_train_loss": %.15f}, "metadata": {"file": "llm/callbacks.py", '
    '"lineno": 233, "step": %d, "samples_count": %d}}\n'
)


def steps(start_ms: int, stop_ms: int, size: int) -> str:
    """Events of training steps, evenly between two moments, `size` bytes of them."""
    count = size // len(STEP % (start_ms, 0.5, 0.5, 10_000, 10_000))
    each = (stop_ms - start_ms) / (count + 1)
    return "".join(STEP % (start_ms + i * each, each / 1e3, 8 / (i + 8), i, i * 32) for i in range(1, count + 1))


def padded(text: str, size: int) -> str:
    """The log with step events behind its run_start."""
    lines = text.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"run_start"' in line)
    start = json.loads(lines[at].partition(":::MLLOG ")[2])["time_ms"]
    stops = [json.loads(line.partition(":::MLLOG ")[2])["time_ms"] for line in lines if '"run_stop"' in line]
    lines.insert(at + 1, steps(start, stops[0] if stops else start + 60_000, size))
    return "".join(lines)


def make(logs: Path, root: Path, runs: int, size: int) -> int:
    """The tree; returns the number of logs."""
    made = copy = 0
    while made < runs:
        for organization in sorted(logs.glob("v*/*")):
            target = root / organization.relative_to(logs).parent / f"{organization.name}-{copy}"
            shutil.copytree(organization, target)
            for log in sorted(target.rglob("result_*.txt")):
                if made % 3 == 0:
                    log.write_text(padded(log.read_text(), size))
                made += 1
            if made >= runs:
                break
        copy += 1
    return made


def cpu_s() -> float:
    """Processor seconds of this process and of those that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def ours(root: Path, workers: int) -> tuple[float, float, list[Result]]:
    """(seconds, processor seconds, results)."""
    before, started = cpu_s(), time.perf_counter()
    shown = [0.0]

    def progress(done: int, total: int, path: Path) -> None:
        if time.perf_counter() - shown[0] > 2:
            shown[0] = time.perf_counter()
            print(f"  {done} of {total} logs", file=sys.stderr)

    results = list(score_all([root], workers, progress))
    return time.perf_counter() - started, cpu_s() - before, results


def official(root: Path, place: Path) -> tuple[float, float, dict[str, list[float]]]:
    """(seconds, processor seconds, benchmark -> its scores)."""
    took, before, scores = 0.0, cpu_s(), defaultdict(list)
    for round_ in sorted(root.iterdir()):
        command = [sys.executable, "-m", "mlperf_logging.result_summarizer", f"{round_}/{{*}}", "training"]
        command += [round_.name.removeprefix("v") + ".0", "--generate_private_ids", "--csv", f"{round_.name}.csv"]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=place, capture_output=True, text=True)
        took += time.perf_counter() - started
        table = place / f"{round_.name}.json"
        if done.returncode or not table.exists():
            print(f"official summarizer on {round_.name}: rc {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
            continue
        for row in json.loads(table.read_text()):
            for name, value in row.items():
                if isinstance(value, float) and ":" not in name:
                    scores[f"{round_.name} {name}"].append(value)
                elif isinstance(value, float) and name.endswith(":time_to_train"):
                    scores[f"{round_.name} {name.partition(':')[0]}"].append(value)
    return took, cpu_s() - before, scores


def alike(one: list[float], other: list[float]) -> bool:
    """Equal to the ten digits that the official table has."""
    pairs = zip(sorted(one), sorted(other), strict=False)
    return len(one) == len(other) and all(abs(a - b) <= 1e-9 * max(1.0, a) for a, b in pairs)


def peak_mib(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / 1024


def large(megabytes: int) -> None:
    """Read one log of so many megabytes."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "result_0.txt"
        head = STEP.replace("tracked_stats", "run_start").replace("POINT_IN_TIME", "INTERVAL_START")
        with log.open("w") as file:
            file.write(head % (1_760_000_000_000, 0, 0, 0, 0))
            for i in range(megabytes):
                file.write(steps(1_760_000_000_000 + i * 60_000, 1_760_000_060_000 + i * 60_000, 1_000_000))
        before, started = peak_mib(resource.RUSAGE_SELF), time.perf_counter()
        got = read(log)
        took = time.perf_counter() - started
        print(
            f"{got.bytes / 1e6:,.0f} MB, {got.lines:,} lines in {took:.1f} s ({got.bytes / 1e6 / took:.0f} MB/s); "
            f"{len(got.events):,} events and {len(got.step_times):,} step times kept; "
            f"peak {peak_mib(resource.RUSAGE_SELF):.0f} MiB, {before:.0f} before"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, help="published logs, ROUND/ORG/{systems,results}")
    parser.add_argument("--runs", type=int, default=1800)
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--official", action="store_true")
    parser.add_argument("--large", type=int, default=0)
    options = parser.parse_args()
    if options.large:
        large(options.large)
        return
    if options.logs is None:
        parser.error("--logs is needed")
    with tempfile.TemporaryDirectory() as directory:
        root, place = Path(directory) / "tree", Path(directory) / "out"
        place.mkdir()
        count = make(options.logs, root, options.runs, round(options.megabytes * 1e6))
        size = sum(log.stat().st_size for log in root.rglob("result_*.txt"))
        over = sum(log.stat().st_size > 1e6 for log in root.rglob("result_*.txt"))
        print(f"{count:,} logs, {size / 1e6:,.0f} MB, {over} over a megabyte; {os.cpu_count()} cores")
        took, used, results = ours(root, options.workers)
        scored = sum(result.score_min is not None for result in results)
        rate = f"{count / took:,.0f} logs/s, {size / 1e6 / took:.0f} MB/s"
        print(f"timetrial, {options.workers} workers: {took:.1f} s ({rate}); {scored} of {len(results)} results scored")
        here, workers = peak_mib(resource.RUSAGE_SELF), peak_mib(resource.RUSAGE_CHILDREN)
        print(f"  {used:.1f} processor seconds, load {os.getloadavg()[0]:.1f}")
        print(f"  peak memory: {here:.0f} MiB here, {workers:.0f} MiB in a worker")
        if options.official:
            theirs, theirs_used, scores = official(root, place)
            print(
                f"official summarizer: {theirs:.1f} s ({count / theirs:,.0f} logs/s); {theirs / took:.1f} times as long"
            )
            print(f"  {theirs_used:.1f} processor seconds, {theirs_used / used:.1f} times ours")
            mine: dict[str, list[float]] = defaultdict(list)
            for result in results:
                if result.score_min is not None:
                    mine[f"{result.round} {result.benchmark}"].append(result.score_min)
            same = {name for name in mine if alike(mine[name], scores.get(name, []))}
            print(f"  scores equal for {len(same)} of {len(mine)} benchmarks; different: {sorted(set(mine) - same)}")


if __name__ == "__main__":
    main()
