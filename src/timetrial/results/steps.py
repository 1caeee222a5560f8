"""Step times of one run: from logged steps, else block means, else the logged throughput, else the blocks' length.

The order is that of the table of published results (`lookup.py`): its `step_time_s` is the median of logged
`train_step_time` without the first 3, else the mean that a log gives of each block, else batch size over logged
throughput.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from timetrial.results.intervals import Parts, length
from timetrial.results.records import LogEvent, RunLog

FIRST = 3
"""Steps left out of the median: they compile, allocate and open connections."""
STEP_KEYS = ("train_step_time", "train_step_timing")
"""Names that logs give the time of a step, seconds (NVIDIA NeMo, Stable Diffusion, Megatron)."""
RATE_HAS_EVAL = frozenset({"bert", "dlrm_dcnv2"})
"""Benchmarks whose logged throughput fits the training time badly: 5 % off (BERT), 12 % off (DLRM)."""
RATE_LOW, RATE_HIGH = 0.8, 1.1
"""A logged throughput counts where steps at that rate take between this share of the training time and of the clock."""
MOST = 100
"""Stragglers kept."""
IN_EPOCHS = frozenset({"retinanet", "ssd", "resnet", "unet3d", "rgat", "gnn", "dlrm_dcnv2", "dlrm", "maskrcnn"})
"""Benchmarks whose progress is logged in epochs, or parts of one (mlperf-logging rcp_checker)."""

EPOCH_SAMPLES = {"dlrm_dcnv2": 4_195_197_692, "retinanet": 1_170_301, "ssd": 1_170_301}
"""Samples of an epoch where logs give batches for samples or nothing: DLRM by mlcommons/training_policies
training_rules.adoc; OpenImages as in published_results.csv (4 epochs are 48,762.5 steps of 96), which fits the batches
an epoch that logs of v5.0 and v5.1 give: 12,191 of 96 and 4,572 of 256."""


@dataclass(frozen=True)
class Steps:
    """Step times of one run, seconds."""

    count: int | None
    """Optimizer steps of the run, by its samples; else those logged."""
    median_s: float | None
    p10_s: float | None
    """Only of logged steps, as p90; the first 3 left out."""
    p90_s: float | None
    slow_first_s: float | None
    """What the first 3 steps took beyond the median each; of block means: what the first block did."""
    stragglers: tuple[tuple[int, float], ...]
    """(step, from 1; seconds) of the steps over twice the median behind the first 3; the 100 slowest, in order."""
    stragglers_count: int
    """All of them."""
    source: str


def step_times(log: RunLog, benchmark: str, parts: Parts, gbs: int | None) -> Steps:
    """What `log` tells of its steps; `parts` are those of the same log."""
    count = trained_steps(log, benchmark, gbs)
    logged, means, rates = _tracked(log, parts)
    if logged:
        return _of_logged(logged, count)
    blocks = _blocks(log, parts, gbs)
    total = None if parts.total_ms is None else parts.total_ms / 1e3
    train = None if parts.train_ms is None else parts.train_ms / 1e3
    if means:
        return _plain(count, statistics.median(means), blocks, "block means that the log gives")
    if rates and gbs:
        step = gbs / statistics.median(rates)
        if count and train and total and not RATE_LOW * train <= count * step <= RATE_HIGH * total:
            return _of_time(
                count, train, blocks, "training time over steps (the logged throughput does not fit the clock)"
            )
        within = "; evaluation may be in it" if benchmark in RATE_HAS_EVAL or len(rates) == 1 else ""
        return _plain(count, step, blocks, f"batch size over logged throughput{within}")
    return _of_time(count, train, blocks, "training time over steps")


def _of_time(count: int | None, train: float | None, blocks: list[tuple[float, int]], source: str) -> Steps:
    if count and train:
        return _plain(count, train / count, blocks, source)
    why = "none: the log has no step times" + ("" if count else ", and does not tell its steps")
    return Steps(count, None, None, None, None, (), 0, why)


def _plain(count: int | None, median: float, blocks: list[tuple[float, int]], source: str) -> Steps:
    slow = None
    if len(blocks) > 1:  # the first against the rest, which are the same work
        rest = sum(seconds for seconds, _ in blocks[1:]) / sum(steps for _, steps in blocks[1:])
        slow = blocks[0][0] - blocks[0][1] * rest
    return Steps(count, median, None, None, slow, (), 0, source)


def _of_logged(times: array[float], count: int | None) -> Steps:
    seconds = np.frombuffer(times)
    rest = np.sort(seconds[FIRST:] if len(times) > FIRST else seconds)
    median = float(np.median(rest))
    late = np.flatnonzero(seconds > 2 * median)
    late = late[late >= FIRST]
    slowest = np.sort(late[np.argsort(-seconds[late], kind="stable")[:MOST]])
    return Steps(
        count=count if count is not None else len(times),
        median_s=median,
        p10_s=float(rest[int(len(rest) * 0.1)]),
        p90_s=float(rest[int(len(rest) * 0.9)]),
        slow_first_s=sum(times[:FIRST]) - median * FIRST if len(times) > FIRST else None,
        stragglers=tuple((int(i) + 1, float(seconds[i])) for i in slowest),
        stragglers_count=len(late),
        source="logged steps",
    )


def _tracked(log: RunLog, parts: Parts) -> tuple[array[float], array[float], array[float]]:
    """(step times, block means of them, throughputs) of the log.

    Some logs give the mean of a block under the same name, at its end: it comes sooner behind the last step than it
    says it took, or alone after a block much longer than itself, or behind the block.
    """
    logged, means, rates = array("d"), array("d"), array("d")
    begun: int | None = None
    block: list[tuple[int, float]] = []  # (time, seconds) of this block
    for event in log.events:
        if parts.kind and event.key in (f"{parts.kind}_start", f"{parts.kind}_stop"):
            _sort_out(block, begun, logged, means)
            block = []
            begun = event.time_ms if event.key.endswith("_start") else None
        elif event.key == "tracked_stats" and isinstance(event.value, Mapping):
            for seconds in filter(None, (positive(event.value.get(name)) for name in STEP_KEYS)):
                if parts.kind and begun is None:
                    means.append(seconds)
                else:
                    block.append((event.time_ms, seconds))
            rate = positive(event.value.get("throughput"))
            if rate is not None:
                rates.append(rate)
    _sort_out(block, begun, logged, means)
    logged.extend(seconds for seconds in log.step_times if seconds > 0)
    return logged, means, rates


def _sort_out(block: list[tuple[int, float]], begun: int | None, logged: array[float], means: array[float]) -> None:
    """Put the times of one block where they belong; `begun` is its start."""
    if block and begun is not None:
        time, seconds = block[-1]
        apart = (time - (block[-2][0] if len(block) > 1 else begun)) / 1e3
        if (apart < 0.5 * seconds) if len(block) > 1 else (apart > 2 * seconds):
            means.append(seconds)
            block = block[:-1]
    logged.extend(seconds for _, seconds in block)


def _blocks(log: RunLog, parts: Parts, gbs: int | None) -> list[tuple[float, int]]:
    """(seconds, steps) of each training block but the last, where the samples at the blocks' starts grow."""
    if not gbs or parts.kind != "block":
        return []
    starts = [event for event in log.events if event.key == "block_start"]
    begins = [begin for begin, _ in parts.training]
    found: list[tuple[float, int]] = []
    for event, following in itertools.pairwise(starts):
        here, there = event.metadata.get("samples_count"), following.metadata.get("samples_count")
        if type(here) is not int or type(there) is not int or there <= here:
            return []
        low, high = (bisect.bisect_left(begins, moment) for moment in (event.time_ms, following.time_ms))
        found.append((length(parts.training[low:high]) / 1e3, (there - here) // gbs))
    return [(seconds, steps) for seconds, steps in found if seconds > 0 and steps > 0]


def trained_steps(log: RunLog, benchmark: str, gbs: int | None) -> int | None:
    """Optimizer steps until run_stop, by its samples, epochs or steps; None where the log has none of these."""
    samples = _samples(log, benchmark)
    if samples is not None and gbs:
        return math.ceil(samples / gbs - 1e-6)
    stop = log.last("run_stop")
    step = positive(stop.metadata.get("step_num")) if stop else None
    return int(step) if step else None


def _samples(log: RunLog, benchmark: str) -> float | None:
    """Samples until run_stop: what it says itself, else the last evaluation that is not later."""
    stop = log.last("run_stop")
    if stop is None:
        return None
    size = EPOCH_SAMPLES.get(benchmark) or positive((log.last("train_samples") or stop).value)
    for event in (stop, *(event for event in reversed(log.events) if event.key == "eval_accuracy")):
        samples = positive(event.metadata.get("samples_count"))
        if samples is not None:
            return samples
        epochs = positive(event.metadata.get("epoch_num"))
        if epochs is not None and benchmark in IN_EPOCHS:
            return epochs * size if size and epochs < 1000 else None
        if epochs is not None and benchmark == "bert":
            return epochs  # mlperf-logging counts samples under this name for BERT
        if event.key == "eval_accuracy":
            return None
    return None


def positive(value: Any) -> float | None:
    """A number above zero, as logs write them; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    number = float(value) if abs(value) < 1e300 else math.inf
    return number if 0 < number < math.inf else None


def count_of(event: LogEvent | None) -> int | None:
    """The whole number above zero that an event carries, else None."""
    number = positive(event.value) if event else None
    return int(number) if number is not None and number == int(number) else None
