"""One run from its log: did it converge, how long did it take, after how many samples.

Which run_start and run_stop count is what the official summarizer takes (mlperf-logging 4.1.68 result_summarizer.py:
141-155): it goes down the log, keeps the last run_start and the last run_stop so far, and stops as soon as it has
both. In a log that has each once that is plain; where several ranks write, it is the last run_start before the first
run_stop. Samples to converge are what the official convergence checker takes (rcp_checker.py:83-149): the last
evaluation before the last run_stop; for stable_diffusion the first that has FID <= 90 and CLIP >= 0.15.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING, Any

from timetrial.results.records import Finding, Level, LogEvent, Run, RunLog

if TYPE_CHECKING:
    from timetrial.results.tree import Entry

SUMMARIZER = "mlperf-logging 4.1.68 result_summarizer.py:141-155"
CHECKER = "mlperf-logging 4.1.68 rcp_checker.py:83-149"
COUNTED_BY_SAMPLES = frozenset(
    (
        *("llama2_70b_lora", "flux1", "llama31_405b", "llama31_8b", "gpt_oss_20b", "deepseekv3_671b"),
        *("qwen35_397b_grpo", "dlrmv4"),
    )
)
"""Their evaluations say samples_count; all others but stable_diffusion say epoch_num (rcp_checker.py:109-126)."""
TARGETS = {"FID": (-math.inf, 90.0), "CLIP": (0.15, math.inf)}
"""Of stable_diffusion (rcp_checker.py:139)."""
EVALUATIONS = ("eval_accuracy", "eval_error")
MANY = frozenset(("eval_accuracy", "eval_error", "tracked_stats", "cache_clear", "seed", "status"))
"""Points that a log may have several of."""


def run_of(log: RunLog, entry: Entry | None = None) -> Run:
    """What the run came to. Never raises; what is wrong with the log stands in the findings and the status."""
    findings = [*log.findings]
    broken = any(finding.level == "fail" for finding in findings)
    keys = _keys(log, findings)
    benchmark = keys.get("submission_benchmark")
    benchmark = benchmark[:80] if isinstance(benchmark, str) else ""
    start, stop = _start_stop(log, findings)
    status = _status(log, start, stop, findings)
    time_min = (stop.time_ms - start.time_ms) / 60 / 1000 if start and stop else None
    if time_min is not None and time_min <= 0:
        lines = f"run_stop in line {stop.line if stop else 0} is {-time_min * 60:.3f} s before run_start"
        _add(findings, "fail", "clock", lines, "a run_stop after its run_start", "check the clock", log, stop)
        time_min, status = None, "clock ran backwards"
    samples, quality = _convergence(log, benchmark, findings)
    seeds, seeds_odd = _seeds(log)
    if broken and status == "success":
        status = "log is broken"
    return Run(
        path=log.path,
        converged=status == "success" and not broken,
        status=status,
        time_min=time_min,
        samples=samples if _last_status(log) == "success" else None,
        quality=quality,
        gbs=whole(keys.get("global_batch_size")),
        seed=seeds[0][2] if seeds else None,
        findings=tuple(findings),
        keys=keys,
        benchmark=benchmark,
        start_ms=start.time_ms if start else None,
        stop_ms=stop.time_ms if stop else None,
        eval_every=_eval_every(log, benchmark),
        broken=broken,
        seeds=seeds,
        seeds_odd=seeds_odd,
    )


def number(value: Any) -> float | None:
    """A finite number, or None for anything else (and for true and false)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        exact = float(value)
    except OverflowError:
        return None
    return exact if math.isfinite(exact) else None


def whole(value: Any) -> int | None:
    """A whole number, 256 or 256.0, or None."""
    exact = number(value)
    return int(value) if exact is not None and exact == int(exact) else None


def _seeds(log: RunLog) -> tuple[tuple[tuple[str, str, int], ...], str]:
    """(file, line, seed) of each seed, as the official seed checker takes them (seed_checker.py:62-79), and what is
    wrong with the first that it can make nothing of."""
    seeds, odd = [], ""
    for event in log.all("seed"):
        lacking = [name for name in ("file", "lineno") if name not in event.metadata]
        try:
            seed = int(event.value)
        except (TypeError, ValueError, OverflowError):
            odd = odd or f"seed {str(event.value)[:40]!r} is no whole number"
            continue
        if lacking:
            odd = odd or f"seed {seed} without {' and '.join(lacking)} in its metadata"
        seeds.append((str(event.metadata.get("file")), str(event.metadata.get("lineno")), seed))
    return tuple(seeds), odd


def _start_stop(log: RunLog, findings: list[Finding]) -> tuple[LogEvent | None, LogEvent | None]:
    start: LogEvent | None = None
    stop: LogEvent | None = None
    for event in log.events:
        if event.key == "run_start":
            start = event
        elif event.key == "run_stop":
            stop = event
        else:
            continue
        if start and stop:
            break
    for taken, key in ((start, "run_start"), (stop, "run_stop")):
        count = sum(event.key == key for event in log.events) if taken else 0
        if taken and count > 1:
            found = f"{key} {count} times; taken is line {taken.line}, as the official summarizer does"
            _add(findings, "warn", "several", found, f"one {key}", "let the first rank alone log it", log, taken)
    if start and stop and stop.line < start.line:
        asked, change = "run_start before run_stop", "check how the log was put together"
        _add(findings, "fail", "order", f"run_stop in line {stop.line} before run_start", asked, change, log, start)
    return start, stop


def _last_status(log: RunLog) -> str:
    last = log.last("run_stop")
    status = last.metadata.get("status") if last else None
    return status if isinstance(status, str) else ""


def _status(log: RunLog, start: LogEvent | None, stop: LogEvent | None, findings: list[Finding]) -> str:
    """The status of the run, with a finding where it is not success."""
    if not log.events:
        return "unreadable"
    for event, key in ((start, "run_start"), (stop, "run_stop")):
        if event is None:
            found = f"no {key}"
            _add(findings, "fail", key, found, f"one {key}", "the run did not end, or the log is not whole", log, None)
            return found
    said = {str(event.metadata.get("status"))[:40] for event in log.all("run_stop")}
    if len(said) > 1:
        asked, change = "one status", "let the first rank alone log run_stop"
        _add(findings, "fail", "status", f"run_stop says {' and '.join(sorted(said))}", asked, change, log, stop)
        return "aborted"
    status = _last_status(log)
    if status != "success":
        shown = status[:40] if status else "no status"
        _add(
            findings,
            "warn",
            "not_converged",
            f"run_stop says {shown}",
            "success",
            "the run did not converge",
            log,
            stop,
        )
    return status if status in ("success", "aborted") else "no status"


def _keys(log: RunLog, findings: list[Finding]) -> dict[str, Any]:
    """Point events by key; several different values are a finding."""
    keys: dict[str, Any] = {}
    differing: dict[str, LogEvent] = {}
    for event in log.events:
        if event.kind != "point" or event.key in MANY or isinstance(event.value, (dict, list)):
            continue
        if event.key in keys and keys[event.key] != event.value:
            differing[event.key] = event
        keys[event.key] = event.value
    for key, event in differing.items():
        if key.startswith(("submission_", "opt_")) or key in ("global_batch_size", "train_samples", "eval_samples"):
            found = f"{key} has several values; the last is {str(event.value)[:40]!r}"
            _add(findings, "fail", "values", found, "one value", "log it once", log, event)
    return keys


def position(event: LogEvent, benchmark: str) -> float | None:
    """Where in training an evaluation stands, in the unit that the benchmark's convergence is counted in."""
    if benchmark in COUNTED_BY_SAMPLES or benchmark == "stable_diffusion":
        return number(event.metadata.get("samples_count"))
    epoch = number(event.metadata.get("epoch_num"))
    if epoch is None:  # mini presets and benchmarks of later rounds
        return None if benchmark in CHECKED_BY_EPOCHS else number(event.metadata.get("samples_count"))
    return round(epoch, 3)


CHECKED_BY_EPOCHS = frozenset(
    (
        *("bert", "dlrm_dcnv2", "gpt3", "maskrcnn", "resnet", "ssd", "retinanet", "unet3d", "rnnt", "gnn", "rgat"),
        *("minigo", "dlrm"),
    )
)
"""Benchmarks for which the official checker reads epoch_num alone."""


def _convergence(log: RunLog, benchmark: str, findings: list[Finding]) -> tuple[float | None, float | None]:
    """(position, value) of the evaluation that ended the run; None where there is none."""
    last = log.last("run_stop")
    evaluations = [event for event in log.events if event.key in EVALUATIONS and (not last or event.line <= last.line)]
    if not evaluations:
        return None, None
    if benchmark == "stable_diffusion":
        return _diffusion(log, evaluations, findings)
    final = evaluations[-1]
    samples = position(final, benchmark)
    if samples is None:
        wanted = "samples_count" if benchmark in COUNTED_BY_SAMPLES else "epoch_num"
        found = f"{final.key} without {wanted}"
        _add(findings, "fail", "evaluation", found, wanted, "log it in the metadata", log, final, CHECKER)
    return samples, number(final.value)


def _diffusion(log: RunLog, evaluations: list[LogEvent], findings: list[Finding]) -> tuple[float | None, float | None]:
    """The first position at which both FID and CLIP are good, and its FID; evaluations are logged in any order."""
    values: dict[float, dict[str, float]] = {}
    for event in evaluations:
        where, metric, value = position(event, "stable_diffusion"), event.metadata.get("metric"), number(event.value)
        if where is None or not isinstance(metric, str) or value is None:
            found = "an evaluation without samples_count, metric or value"
            _add(findings, "fail", "evaluation", found, "all three", "log them", log, event, CHECKER)
            return None, None
        values.setdefault(where, {})[metric] = value
    passing = []
    for where, metrics in values.items():
        missing = [name for name in TARGETS if name not in metrics]
        if missing:
            found = f"no {' and '.join(missing)} after {where:.12g} samples"
            _add(findings, "fail", "evaluation", found, "FID and CLIP", "log both", log, evaluations[-1], CHECKER)
            return None, None
        if all(low <= metrics[name] <= high for name, (low, high) in TARGETS.items()):
            passing.append(where)
    if passing:
        return min(passing), values[min(passing)]["FID"]
    return None, values[max(values)]["FID"]


def _eval_every(log: RunLog, benchmark: str) -> float | None:
    places = (position(event, benchmark) for event in log.events if event.key in EVALUATIONS)
    ordered = sorted({place for place in places if place is not None})
    steps = [b - a for a, b in itertools.pairwise(ordered)]
    return round(statistics.median(steps), 9) if steps else None


def _add(
    findings: list[Finding],
    level: Level,
    rule: str,
    found: str,
    asked: str,
    change: str,
    log: RunLog,
    event: LogEvent | None,
    source: str = SUMMARIZER,
) -> None:
    line = event.line if event else None
    findings.append(Finding(level, f"run.{rule}", found, asked, source, change, log.path, line))
