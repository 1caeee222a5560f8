"""The charts of a run: loss, throughput, step time by phase, learning rate, gradient norm.

Each function gives one chart as SVG (see `svg.py`), or None when the run recorded nothing to draw.
The larger charts are drawn twice, `wide` for a desk and paper and narrow for a phone, since text in
a scaled-down chart cannot be read; the style sheet shows one of the two. Legends are the page's, so
that they wrap and print with it. Nothing that a user wrote is drawn into a chart.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from timetrial.report import svg, text, thin
from timetrial.report.run import PHASES, Run, clock, phase_columns

Array = np.ndarray[Any, np.dtype[np.float64]]

WIDE, NARROW, SMALL = 860, 340, 380
"""Widths of a chart across the page, on a phone, and of one of two side by side, pixels."""
LOG_FROM = 20.0
"""Ratio of the greatest to the least value from which an axis is logarithmic."""
MOST_MARKS = 40
"""Marks, such as of lost steps, above which only some are drawn."""

color = svg.COLOR


def loss(run: Run, wide: bool, title: str) -> str | None:
    """Training loss over samples, evaluations and the target: on one axis where they compare, else on two."""
    shared = run.comparable

    def paint(figure: Figure) -> None:
        if shared:
            ax = _axes(figure, wide)
            _loss_curve(ax, run, wide)
            _quality(ax, run)
            lines = [run.steps.loss, [e.value for e in run.evaluations], [run.target]]
            _scale(ax, np.concatenate([np.asarray(part, dtype=float) for part in lines]))
            _lost_steps(ax, run)
        else:
            above, below = _axes(figure, wide, rows=2)
            _loss_curve(above, run, wide)
            _scale(above, run.steps.loss)
            _lost_steps(above, run)
            _quality(below, run)
            _scale(below, np.array([run.target, *(e.value for e in run.evaluations)]))
            _heading(above, "training loss")
            _heading(below, "quality")
            ax = below
        _samples_axis(ax, run, wide)

    height = (340 if wide else 280) if shared else (460 if wide else 400)
    return svg.draw(paint, WIDE if wide else NARROW, height, f"loss-{'wide' if wide else 'narrow'}", title)


def throughput(run: Run, wide: bool, title: str) -> str | None:
    """Tokens per second over the run's clock, with a tick wherever it stood still to evaluate."""
    if not np.isfinite(run.steps.tokens_per_s).any():
        return None
    seconds = clock(run)

    def paint(figure: Figure) -> None:
        ax = _axes(figure, wide)
        unit, scale = _time_unit(seconds[-1])
        curve = thin.curve(seconds / scale, run.steps.tokens_per_s, 300 if wide else 150)
        _band(ax, curve, "forward")
        at = [e.elapsed_s / scale for e in run.evaluations if math.isfinite(e.elapsed_s)]
        every = max(1, len(at) // MOST_MARKS)
        ax.plot(at[::every], [0.0] * len(at[::every]), "|", color=color["evaluation"], ms=9, mew=2, clip_on=False)
        top = np.nanmax(curve.high)
        ax.set_ylim(0, top * 1.08 if top > 0 else 1)
        ax.set_xlim(0, max([seconds[-1] / scale, *at, 1e-9]))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_locator(MaxNLocator(9 if wide else 4))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text.compact(value)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text.compact(value)))
        ax.set_xlabel(f"{unit} since the start")

    return svg.draw(paint, WIDE if wide else NARROW, 240, f"throughput-{'wide' if wide else 'narrow'}", title)


def breakdown(run: Run, wide: bool, title: str) -> str | None:
    """Step time stacked by phase over samples, as means of neighbouring steps."""
    columns = phase_columns(run)
    if columns is None:
        return None

    def paint(figure: Figure) -> None:
        ax = _axes(figure, wide)
        limit = 120 if wide else 60
        _, last = thin.means(run.steps.samples, limit)
        ends = run.steps.samples[last]
        edges = np.concatenate([[max(0.0, 2 * ends[0] - ends[1]) if len(ends) > 1 else 0.0], ends])
        base = np.zeros(len(ends))
        for name in PHASES:
            means, _ = thin.means(columns[name], limit)
            ax.stairs(base + means, edges, baseline=base, fill=True, color=color[name], lw=0)
            base = base + means
        top = float(base.max())
        ax.set_ylim(0, top * 1.08 if top > 0 else 1)
        ax.yaxis.set_major_locator(MaxNLocator(5))
        unit, scale = _short_unit(top)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * scale:g}{text.NBSP}{unit}"))
        _samples_axis(ax, run, wide)

    return svg.draw(paint, WIDE if wide else NARROW, 260, f"breakdown-{'wide' if wide else 'narrow'}", title)


def learning_rate(run: Run, title: str) -> str | None:
    """Learning rate over samples."""
    return _small(run, run.steps.lr, "lr", title, logarithmic=False)


def gradient_norm(run: Run, title: str) -> str | None:
    """Gradient norm over samples, before clipping, with the norm at which it is clipped."""
    clip = run.config["optim"].get("clip_norm")
    return _small(run, run.steps.grad_norm, "grad-norm", title, clip if isinstance(clip, int | float) else None)


# ---- parts of charts -----------------------------------------------------------------------------


def _axes(figure: Figure, wide: bool, rows: int = 1) -> Any:
    """Axes with margins in pixels, so that charts above one another line up."""
    width, height = figure.get_size_inches() * svg.POINTS_PER_INCH
    left, right, bottom, top = (58, 16, 44, 10) if wide else (52, 12, 44, 10)
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - (top + 14 * (rows - 1)) / height, hspace=0.22
    )
    return figure.subplots(rows, 1, sharex=True)


def _heading(ax: Axes, words: str) -> None:
    ax.annotate(words, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", color=color["muted"])


def _loss_curve(ax: Axes, run: Run, wide: bool) -> None:
    _band(ax, thin.curve(run.steps.samples, run.steps.loss, 400 if wide else 200), "loss")


def _band(ax: Axes, curve: thin.Curve, role: str) -> None:
    if curve.thinned:
        ax.fill_between(curve.x, curve.low, curve.high, color=color[role], alpha=0.22, lw=0)
    few = np.isfinite(curve.mean).sum() < 3  # a line needs two points to be seen
    ax.plot(curve.x, curve.mean, color=color[role], lw=1.6, marker="o" if few else "", ms=5, clip_on=not few)


def _quality(ax: Axes, run: Run) -> None:
    ax.axhline(run.target, color=color["target"], lw=1.6, ls=(0, (5, 3)))
    ax.annotate(  # above the start of the line, where the curve is still far away
        f"target {run.target:g}",
        (0, run.target),
        (4, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=color["target"],
    )
    every = max(1, len(run.evaluations) // 200)
    kept = [*run.evaluations[::every], *run.evaluations[-1:]]
    ax.plot(
        [e.samples for e in kept],
        [e.value if math.isfinite(e.value) else math.nan for e in kept],
        color=color["evaluation"],
        lw=1.4,
        marker="o",
        ms=6 if len(kept) <= MOST_MARKS else 0,
        mec=color["surface"],
        mew=1.2,
        clip_on=False,
        zorder=3,
    )


def _lost_steps(ax: Axes, run: Run) -> None:
    """A cross at the top for each step whose loss was not finite."""
    lost = run.steps.samples[~np.isfinite(run.steps.loss)]
    kept = lost[:: max(1, len(lost) // MOST_MARKS)]
    ax.plot(
        kept,
        [0.97] * len(kept),
        "x",
        transform=ax.get_xaxis_transform(),
        color=color["bad"],
        ms=7,
        mew=2,
        clip_on=False,
    )


def _scale(ax: Axes, values: Array, most: float = LOG_FROM) -> None:
    """A linear axis around the finite values; a logarithmic one when they span a ratio above `most`."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    low, high = float(finite.min()), float(finite.max())
    if low > 0 and high / low > most:
        ax.set_yscale("log")
        ax.set_ylim(low / 1.25, high * 1.25)
        decades = math.log10(high / low)
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=8))
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        room = (high - low) * 0.07 or abs(high) * 0.1 or 1.0
        ax.set_ylim(low - room, high + room)
        ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _tick(value: float) -> str:
    return text.compact(value) if abs(value) >= 1000 else f"{value:.6g}".replace("e-0", "e-")


def _samples_axis(ax: Axes, run: Run, wide: bool) -> None:
    last = float(run.steps.samples[-1])
    ax.set_xlim(0, last if last > 0 else 1)
    ax.xaxis.set_major_locator(MaxNLocator(9 if wide else 4, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text.compact(value)))
    ax.set_xlabel("training samples")


def _small(
    run: Run, values: Array, name: str, title: str, line: float | None = None, logarithmic: bool = True
) -> str | None:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None

    def paint(figure: Figure) -> None:
        ax = _axes(figure, wide=True)
        _band(ax, thin.curve(run.steps.samples, values, 200), "forward")
        near = line is not None and finite.min() / 3 < line < finite.max() * 3
        shown = np.append(finite, line) if near and line is not None else finite
        _scale(ax, shown, most=LOG_FROM if logarithmic else math.inf)
        if near and line is not None:
            ax.axhline(line, color=color["target"], lw=1.4, ls=(0, (5, 3)))
        _samples_axis(ax, run, wide=False)

    return svg.draw(paint, SMALL, 220, name, title)


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _short_unit(seconds: float) -> tuple[str, float]:
    """(unit, units per second) in which a step time reads well."""
    if seconds < 1e-3:
        return "\u00b5s", 1e6
    return ("ms", 1e3) if seconds < 1.0 else ("s", 1.0)
