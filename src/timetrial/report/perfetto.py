"""A predicted step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The Trace Event Format's JSON: one process a pipeline rank (one rank a stage stands for all that do the same), and
threads for computing, communication inside of layers, pipeline messages and data parallelism. Times are
microseconds with three decimals. Passes of the first micro batches hold their layers' kernels, one level below.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timetrial
from timetrial.errors import UserError
from timetrial.predict.schedule import Interval
from timetrial.report import prediction_timeline as timeline
from timetrial.report.prediction_record import Answered, plan_words, words_of

THREADS = ("compute", "communication", "pipeline messages", "data parallel")
MOST_KERNELS = 30_000
"""Slices of kernels above which fewer micro batches show theirs; the first one always does."""
MOST_DETAILED = 2
"""Micro batches that show kernels."""

_KINDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_NAMES = {"send": "send", "gather": "gather parameters", "reduce": "reduce gradients"}
_COLORS = {"F": "thread_state_running", "B": "rail_response", "I": "rail_response", "W": "rail_animation"}
"""Of the format's reserved names."""


SUFFIXES = (".json", ".json.gz")


def write(answered: Answered, path: str | Path) -> Path:
    """Write the trace to `path`, packed where it ends in .gz, and return it.

    Written beside and renamed. Raises UserError for another suffix than .json and .json.gz, and when the file cannot
    be written.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: a trace is a .json or .json.gz file; end its name so")
    content = json.dumps(trace(answered), separators=(",", ":")).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, 6, mtime=0)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def trace(answered: Answered) -> dict[str, Any]:
    """The trace as plain JSON values."""
    p = answered.prediction
    return {
        "traceEvents": [*_events(answered)],
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": f"timetrial {timetrial.__version__}: a prediction, nothing was run",
            "model": p.request.model,
            "system": p.system.name,
            "stack": p.stack.name,
            "plan": plan_words(answered),
            "step_time_s": p.step.seconds,
        },
    }


def _events(answered: Answered) -> Iterator[dict[str, Any]]:
    laid = timeline.lay(answered)
    detail = _Detail(answered)
    slices: list[dict[str, Any]] = []
    for interval in laid.intervals:
        slices.append(_interval(interval))
        if interval.stream == "compute" and interval.micro_batch < detail.micro_batches:
            slices += detail.slices(interval)
    for tail in laid.tails:
        thread = "data parallel" if tail.part == "dp" else "compute"
        slices += [
            _slice(rank, thread, words_of(tail.part), "after the pipeline", tail.start, tail.end)
            for rank in range(laid.ranks)
        ]
    used = {(s["pid"], s["tid"]) for s in slices}
    for rank in range(laid.ranks):
        held = [
            f"stage {i}: {len(timeline.kinds(answered, i))} layers" for i in timeline.stages_of_rank(answered, rank)
        ]
        yield _meta(rank, 0, "process_name", {"name": f"pipeline rank {rank}"})
        yield _meta(rank, 0, "process_labels", {"labels": ", ".join(held)})
        yield _meta(rank, 0, "process_sort_index", {"sort_index": rank})
        for tid, thread in enumerate(THREADS, 1):
            if (rank, tid) in used:
                yield _meta(rank, tid, "thread_name", {"name": thread})
                yield _meta(rank, tid, "thread_sort_index", {"sort_index": tid})
    yield from slices


class _Detail:
    """Kernels of passes, each kind of stage laid once."""

    def __init__(self, answered: Answered) -> None:
        self.answered = answered
        self.price = timeline.pricing(answered)
        self.known: dict[tuple[tuple[str, ...], str], tuple[timeline.Piece, ...]] = {}
        layers, stages = answered.prediction.layers, range(len(answered.prediction.step.stages))
        one = sum(len(layers[kind].kernels) for i in stages for kind in timeline.kinds(answered, i))
        self.micro_batches = max(1, min(MOST_DETAILED, MOST_KERNELS // max(1, one)))

    def slices(self, interval: Interval) -> Iterator[dict[str, Any]]:
        """The kernels of one pass, within it."""
        key = (timeline.kinds(self.answered, interval.stage), interval.kind)
        if key not in self.known:
            self.known[key] = timeline.passes(self.answered, *key, self.price)
        length = interval.end - interval.start
        for piece in self.known[key]:
            start, end = interval.start + piece.start * length, interval.start + piece.end * length
            if _ns(end) > _ns(start):
                name, kernel = timeline.label(piece.kernel), piece.kernel
                about = {"layer": piece.layer, "phase": kernel.phase, **timeline.arguments(kernel)}
                yield _slice(interval.rank, piece.stream, name, words_of(kernel.part), start, end, about)


def _interval(i: Interval) -> dict[str, Any]:
    about: dict[str, Any] = {"stage": i.stage}
    if i.micro_batch >= 0:
        about["micro batch"] = i.micro_batch
    if i.stream == "compute":
        kind = _KINDS[i.kind]
        found = _slice(i.rank, "compute", f"{kind} {i.micro_batch}", kind, i.start, i.end, about)
        return found | {"cname": _COLORS[i.kind]}
    thread = "pipeline messages" if i.stream == "send" else "data parallel"
    return _slice(i.rank, thread, _NAMES.get(i.kind, i.kind), i.stream, i.start, i.end, about)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(
    rank: int,
    thread: str,
    name: str,
    category: str,
    start: float,
    end: float,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A complete event; ends are rounded alike, so that what touches in seconds touches in the file."""
    first, last = _ns(start), _ns(end)
    found = {
        "ph": "X",
        "pid": rank,
        "tid": THREADS.index(thread) + 1,
        "ts": first / 1000,
        "dur": (last - first) / 1000,
        "name": name,
        "cat": category,
    }
    return found | {"args": about} if about else found


def _meta(rank: int, tid: int, name: str, about: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": tid, "name": name, "args": about}
