"""The charts of validated runs: errors over accelerators, and errors of groups in lanes.

Each is drawn twice, wide for a desk and narrow for a phone. An error beyond the axis stands at its end, and its words,
where the pointer rests, tell how large it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from timetrial.predict.sure import Validated
from timetrial.report.prediction_svg import Drawing
from timetrial.report.text import MINUS

WIDE, NARROW = 860, 340
BANDS = (0.05, 0.12)
"""Errors at which lines are drawn."""
COLORS = ("target", "open")
"""Of these lines."""
LEAST, MOST = 0.2, 0.6
"""Ends of the axis of errors: as far as the errors go, within these."""
GOLDEN = 0.618034
"""Steps of which spread points evenly, however many there are."""
DISK, RING = "loss", "evaluation"


class Lane(NamedTuple):
    """One group of runs."""

    label: str
    words: str
    """Its errors in words."""
    runs: Sequence[Validated]


def limit(runs: Sequence[Validated]) -> float:
    """The end of the axis of errors, a tenth or more."""
    most = max((abs(e) for v in runs for e in (v.error, v.fitted_error)), default=0.0)
    return min(MOST, max(LEAST, math.ceil(10 * most * 1.02) / 10))


def scatter(runs: Sequence[Validated], wide: bool, title: str, hollow: bool) -> str:
    """Errors over the number of accelerators, which is logarithmic to base 2."""
    left, right, top, bottom = (52, WIDE - 60, 10, 350) if wide else (42, NARROW - 44, 10, 330)
    pen = Drawing(WIDE if wide else NARROW, bottom + 46, title)
    end = limit(runs)
    powers = [math.log2(v.accelerators) for v in runs]
    low, high = min(powers) - 0.5, max(powers) + 0.5

    def x(power: float) -> float:
        return left + (power - low) / (high - low) * (right - left)

    def y(error: float) -> float:
        return top + (1 - (max(-end, min(end, error)) + end) / (2 * end)) * (bottom - top)

    for tick in _ticks(end):
        pen.line([(left, y(tick)), (right, y(tick))], "muted" if tick == 0 else "grid")
        pen.text(left - 8, y(tick) + 4, _percent(tick), "end")
    for size, color in zip(BANDS, COLORS, strict=True):
        for edge in (size, -size):
            pen.line([(left, y(edge)), (right, y(edge))], color, 1.2, dashed=True)
            pen.text(right + 6, y(edge) + 4, _percent(edge), color=color)
    whole = range(math.ceil(low), math.floor(high) + 1)
    for power in list(whole)[:: math.ceil(len(whole) / (14 if wide else 6)) or 1]:
        pen.line([(x(power), bottom), (x(power), bottom + 4)], "muted")
        pen.text(x(power), bottom + 18, f"{2**power:,}", "middle")
    pen.text((left + right) / 2, bottom + 40, "accelerators", "middle")
    room = min(0.42 * (right - left) / (high - low), 16.0)
    for kind in ("fitted", "without") if hollow else ("without",):
        seen: dict[int, int] = {}
        for v in runs:
            n = seen[v.accelerators] = seen.get(v.accelerators, -1) + 1
            aside = (n * GOLDEN % 1) * room
            error = v.fitted_error if kind == "fitted" else v.error
            at = x(math.log2(v.accelerators)) + (aside if kind == "fitted" else -aside)
            _dot(pen, at, y(error), v, kind == "fitted", wide)
    return pen.svg()


def strips(lanes: Sequence[Lane], wide: bool, title: str, hollow: bool) -> str:
    """A lane a group, disks above rings, with its errors in words: beside it, or above it where that is narrow."""
    left, right = (210, WIDE - 300) if wide else (14, NARROW - 14)
    top, pitch, head = (40, 34, 8) if wide else (40, 68, 40)
    bottom = top + pitch * len(lanes)
    pen = Drawing(WIDE if wide else NARROW, bottom + 46, title)
    end = limit([v for lane in lanes for v in lane.runs])

    def x(error: float) -> float:
        return left + (max(-end, min(end, error)) + end) / (2 * end) * (right - left)

    for tick in _ticks(end, 0.2 if end > 0.4 or not wide else 0.1):
        pen.line([(x(tick), top), (x(tick), bottom)], "muted" if tick == 0 else "grid")
        pen.text(x(tick), bottom + 18, _percent(tick, ""), "middle")
    pen.text((left + right) / 2, bottom + 40, "error, %", "middle")
    for row, (size, color) in enumerate(zip(BANDS, COLORS, strict=True)):
        for edge in (size, -size):
            pen.line([(x(edge), top - 4 - 16 * row), (x(edge), bottom)], color, 1.2, dashed=True)
            pen.text(x(edge), top - 8 - 16 * row, _percent(edge, ""), "middle", color)
    for i, lane in enumerate(lanes):
        at = top + i * pitch
        if wide:
            pen.text(left - 12, at + 21, lane.label, "end", "ink")
            pen.text(right + 12, at + 21, lane.words)
        else:
            pen.rect(0, at + 1, NARROW, 34, "surface")
            pen.text(left, at + 15, lane.label, color="ink")
            pen.text(left, at + 31, lane.words)
        for kind in ("fitted", "without") if hollow else ("without",):
            for n, v in enumerate(lane.runs):
                error = v.fitted_error if kind == "fitted" else v.error
                aside = (n * GOLDEN % 1) * 7
                middle = at + head + (13 if kind == "fitted" else 0 if hollow else 6) + aside
                _dot(pen, x(error), middle, v, kind == "fitted", wide)
    return pen.svg()


def _dot(pen: Drawing, x: float, y: float, v: Validated, fitted: bool, wide: bool) -> None:
    """A disk or a ring; disks have words for a pointer, which a narrow screen has not."""
    if fitted:
        pen.dot(x, y, 2.6, RING, hollow=True)
        return
    where = f"{v.model} on {v.accelerators:,} {v.system}, {v.precision}, {v.mapping} ({v.source})"
    pen.dot(x, y, 3.4, DISK, f"{_percent(round(v.error, 3))}: {where}" if wide else "")


def _ticks(end: float, step: float = 0.1) -> list[float]:
    if end > 0.4:
        step = max(step, 0.2)
    n = int(end / step + 1e-9)
    return [round(i * step, 6) for i in range(-n, n + 1)]


def _percent(error: float, unit: str = "\u00a0%") -> str:
    return f"{100 * error:+.4g}{unit}".replace("-", MINUS) if error else f"0{unit}"
