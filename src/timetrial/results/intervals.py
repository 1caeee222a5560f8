"""Where the time between run_start and run_stop went, from intervals as logs really have them.

Training intervals are blocks, or epochs in logs without blocks; they may be nested, interleaved between ranks, left
open or overlapped by an evaluation. Every millisecond of the clock belongs to exactly one part: evaluation where one is
open, else training where an interval is open, else gap. So the parts add up and none is negative.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from timetrial.results.records import LogEvent

Interval = tuple[int, int]
"""(start, end), milliseconds of Unix time, start <= end."""

TRAINING = ("block", "epoch")
"""Which intervals are training: the first kind that the log has."""


@dataclass(frozen=True)
class Parts:
    """The clock's milliseconds by what they were spent on; None where the log does not tell."""

    init_ms: int | None
    """First init_start to run_start."""
    total_ms: int | None
    """run_start to run_stop, by the official summarizer's choice among several."""
    train_ms: int | None
    """An interval of training open and no evaluation; None where the log has no such intervals."""
    eval_ms: int | None
    """An evaluation open; None where the log has none."""
    gap_ms: int | None
    """Neither; None where the log has no intervals of training to tell it from."""
    eval_off_ms: int
    """Evaluation before run_start or after run_stop."""
    overlap_ms: int
    """Part of `eval_ms` during which an interval of training began and ran."""
    kind: str
    """`block`, `epoch` or empty: what the training intervals are."""
    training: tuple[Interval, ...]
    """Training intervals, evaluation in them included, within the clock."""


def parts(events: Sequence[LogEvent]) -> Parts:
    """Split the time of one run. `events` in file order."""
    start, stop = clock(events)
    init = min((event.time_ms for event in events if event.key == "init_start"), default=None)
    init_ms = start - init if start is not None and init is not None and init <= start else None
    kind = next((k for k in TRAINING if any(event.key == f"{k}_start" for event in events)), "")
    evaluations = union(pairs(events, "eval", ("eval_accuracy", "block_start", "epoch_start"), stop))
    training = union(pairs(events, kind, ("eval_start",), stop)) if kind else []
    if start is None or stop is None or stop < start:
        return Parts(init_ms, None, None, None, None, 0, 0, kind, ())
    on_clock, trained = clip(evaluations, start, stop), clip(training, start, stop)
    total, eval_ms = stop - start, length(on_clock)
    train_ms = length(trained) - length(intersection(trained, on_clock))
    has_eval = any(event.key == "eval_start" for event in events)
    return Parts(
        init_ms=init_ms,
        total_ms=total,
        train_ms=train_ms if kind else None,
        eval_ms=eval_ms if has_eval else None,
        gap_ms=total - eval_ms - train_ms if kind else None,
        eval_off_ms=length(evaluations) - eval_ms,
        overlap_ms=length(intersection(_begun_in(trained, on_clock), on_clock)),
        kind=kind,
        training=tuple(trained),
    )


def clock(events: Iterable[LogEvent]) -> tuple[int | None, int | None]:
    """(run_start, run_stop) as mlperf-logging's summarizer takes them: it reads on until it has seen both."""
    start: int | None = None
    stop: int | None = None
    for event in events:
        if event.key == "run_start":
            start = event.time_ms
        elif event.key == "run_stop":
            stop = event.time_ms
        if start is not None and stop is not None:
            break
    return start, stop


def pairs(events: Iterable[LogEvent], kind: str, closers: Collection[str], stop: int | None) -> list[Interval]:
    """Intervals of `kind`: each stop closes the latest open start.

    A start that is never closed ends at the next start or closer, at the latest at `stop`; one that ends before it
    began (a clock that runs backwards) is left out, and so is a stop without a start.
    """
    opened: list[tuple[int, int | None]] = []  # (start, where an end that was not logged would be)
    bounded = 0  # how many of them have such an end already
    found: list[Interval] = []
    begin, end = f"{kind}_start", f"{kind}_stop"
    for event in events:
        if event.key == end:
            if opened:
                found.append((opened.pop()[0], event.time_ms))
                bounded = min(bounded, len(opened))
        elif event.key == begin or event.key in closers:
            opened[bounded:] = [(first, event.time_ms) for first, _ in opened[bounded:]]
            bounded = len(opened)
            if event.key == begin:
                opened.append((event.time_ms, None))
    for first, last in opened:
        last = stop if last is None else last
        if last is not None:
            found.append((first, last))
    return [(first, last) for first, last in found if first <= last]


def _begun_in(training: Sequence[Interval], evaluations: Sequence[Interval]) -> list[Interval]:
    """Training intervals that began while an evaluation was open; both without overlaps, sorted."""
    starts = [start for start, _ in evaluations]
    found: list[Interval] = []
    for begin, end in training:
        at = bisect.bisect_left(starts, begin) - 1
        if at >= 0 and begin < evaluations[at][1]:
            found.append((begin, end))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, sorted."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """What of `intervals` lies within start to end."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Time that is in both; each sorted and without overlaps."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if low < high:
            found.append((low, high))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> int:
    """Milliseconds altogether; of intervals without overlaps."""
    return sum(end - start for start, end in intervals)
