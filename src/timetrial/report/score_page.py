"""Scores as one page: each result's score, runs, time, verdicts and findings; an overview where there are several.

As the other pages: nothing is asked of the network, there is no script, and a policy forbids both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timetrial
from timetrial.report import pages, text
from timetrial.report.score_record import (
    MARKS,
    UNVERIFIED,
    about,
    breakdown,
    checker,
    doubts,
    explanation,
    groups,
    how_scored,
    mark,
    official,
    samples,
    scoring,
    shown,
    sums,
    typical,
    verdict,
)
from timetrial.results.records import Result, Run

COLORS = {"training": "forward", "evaluation": "data", "neither": "checkpoint", "not told": "other"}
"""Part of the time -> variable of the style sheet."""
MOST_RUNS = 60
"""Runs that are drawn; unet3d has 40."""
SPAN = 0.3
"""Of the overview's dots: how far from the mean the ends of the scale lie at most, as a share of it."""
MOST_KEYS = 120
"""Keys of the log that are listed."""


@dataclass(frozen=True)
class Dot:
    """One run in a drawing; places in percent of the width."""

    label: str
    at: float | None
    """None for a run without a time."""
    shape: str
    """full: counts; hollow: left out; cross: did not converge."""
    value: str
    why: str


@dataclass(frozen=True)
class Dots:
    """The runs of a result over their minutes."""

    dots: tuple[Dot, ...]
    mean: float | None
    """Place of the olympic mean, percent."""
    ticks: tuple[tuple[float, str], ...]
    """(place, label)."""
    words: str


def write_page(results: Sequence[Result], path: str | Path) -> Path:
    """Write the page to `path`, beside it and renamed, and return it. Raises UserError when it cannot be written."""
    return pages.write(page(results), Path(path))


def page(results: Sequence[Result]) -> str:
    """The page as HTML text."""
    environment = pages.environment()
    environment.filters.update(count=text.count, duration=text.duration, percent=text.percent, shown=shown)
    made = [_result(result, index) for index, result in enumerate(results)]
    span = _span(results)
    for view, result in zip(made, results, strict=True):
        view["strip"] = _strip(result, span)
    told = environment.get_template("score.html.j2").render(
        style=pages.style("report.css", "score.css"),
        title=_title(results),
        results=made,
        sums=sums(results).partition(": ")[2],
        span=text.percent(span),
        notice=UNVERIFIED,
        version=timetrial.__version__,
    )
    return told.encode("utf-8", "replace").decode()


def _title(results: Sequence[Result]) -> str:
    if len(results) != 1:
        return f"{len(results)} results"
    return _name(results[0])


def _name(result: Result) -> str:
    return shown(" on ".join(filter(None, (result.benchmark, result.system))) or result.path.name)


def _result(result: Result, index: int) -> dict[str, Any]:
    kind, words = verdict(result)
    time, margin = explanation(result)
    run = typical(result)
    found = groups(result)
    ours, quoted = official(result)
    return {
        "id": f"r{index}",
        "name": _name(result),
        "round": result.round or text.NONE,
        "organization": shown(result.organization) or text.NONE,
        "system": shown(result.system) or text.NONE,
        "benchmark": shown(result.benchmark or result.path.name),
        "score": text.NONE if result.score_min is None else f"{result.score_min:,.4f}",
        "facts": about(result),
        "path": shown(str(result.path)),
        "kind": kind,
        "mark": MARKS[kind],
        "words": words,
        "how": how_scored(result),
        "headline": _headline(result),
        "dots": _dots(result),
        "bars": _bars(result),
        "time": [shown(line) for line in time],
        "of": "" if run is None or len(result.runs) == 1 else shown(run.path.name),
        "margin": [shown(line) for line in margin],
        "findings": [
            {
                "level": group.level,
                "rule": shown(group.rule),
                "where": shown(group.where_words(4)),
                "rows": [
                    (label, shown(words))
                    for label, words in (
                        ("found", group.found_words),
                        ("asked", group.asked),
                        ("change", group.change),
                        ("rule", group.source),
                    )
                    if words
                ],
            }
            for group in found
        ],
        "fails": sum(group.level == "fail" for group in found),
        "warns": sum(group.level == "warn" for group in found),
        "official": ours,
        "quoted": [shown(line) for line in quoted],
        "checker": checker(result),
        "doubts": [shown(line) for line in doubts(result)],
        "keys": _keys(run),
        "runs": len(result.runs),
        "unit": result.convergence.unit.replace("_", " ") if result.convergence else "samples",
        "table": [
            {
                "log": shown(r.path.name),
                "minutes": text.NONE if r.time_min is None else f"{r.time_min:,.4f}",
                "samples": samples(r.samples),
                "quality": text.NONE if r.quality is None else f"{r.quality:.6g}",
                "seed": text.NONE if r.seed is None else str(r.seed),
                "why": mark(r),
            }
            for r in result.runs
        ],
    }


def _keys(run: Run | None) -> list[tuple[str, str]]:
    keys = sorted(run.keys.items()) if run is not None else []
    return [(shown(key), shown(str(value))[:80]) for key, value in keys[:MOST_KEYS]]


def _headline(result: Result) -> list[dict[str, str]]:
    """The figures at the top; those that are not known are left out."""
    runs = scoring(result)
    figures = []

    def add(label: str, value: str, detail: str) -> None:
        figures.append({"label": label, "value": value, "detail": detail})

    score = text.NONE if result.score_min is None else f"{result.score_min:,.4f}{text.NBSP}min"
    add("Score", score, how_scored(result) or "none: see the findings")
    missed = sum(not run.converged for run in result.runs)
    add("Runs", f"{len(result.runs)}", f"{len(runs)} in the mean, {missed} did not converge")
    if (tested := result.convergence) is not None and tested.samples_mean is not None:
        words = {True: "passes the convergence test", False: "fails the convergence test", None: "no reference"}
        unit = tested.unit.capitalize().replace("_", " ")
        add(f"{unit} to converge", samples(tested.samples_mean), words[tested.passed])
        if tested.evals_to_fastest is not None:
            side = "slower" if tested.evals_to_fastest >= 0 else "faster"
            add("Evaluations of margin", f"{abs(tested.evals_to_fastest):.1f}", f"{side} than the fastest allowed")
    if (run := typical(result)) is not None and (time := run.time) is not None:
        if time.step_s is not None:
            steps = f"{time.step_kind} of {time.steps:,} steps" if time.steps else time.step_kind
            add("Step time", text.duration(time.step_s), steps)
        if time.samples_per_s is not None:
            add("Throughput", text.significant(time.samples_per_s, 4), "samples/s while training")
        if time.tflops_per_accelerator is not None:
            mfu = f"MFU {text.percent(time.mfu)}" if time.mfu is not None else "no MFU"
            add("Model TFLOP/s each", text.count(time.tflops_per_accelerator), f"{mfu}, see below for its basis")
    if result.energy is not None:
        kwh = text.significant(result.energy.joules / 3.6e6)
        add("Energy", f"{kwh}{text.NBSP}kWh", f"{text.count(result.energy.average_w)} W on average")
    return figures


def _dots(result: Result) -> Dots | None:
    """The runs on one scale of minutes."""
    runs = result.runs[:MOST_RUNS]
    times = [run.time_min for run in runs if run.time_min is not None]
    if not times:
        return None
    low, high = min(times), max(times)
    room = (high - low) * 0.08 or low * 0.05 or 1.0
    low, high = low - room, high + room

    def place(minutes: float) -> float:
        return 100 * (minutes - low) / (high - low)

    unscaled = result.unscaled_min
    counted = scoring(result)
    words = f"{len(times)} runs, {min(times):,.4f} to {max(times):,.4f} minutes; {len(counted)} count"
    return Dots(
        dots=tuple(_dot(run, None if run.time_min is None else place(run.time_min)) for run in runs),
        mean=place(unscaled) if unscaled is not None and len(times) > 1 else None,
        ticks=tuple((place(value), label) for value, label in _ticks(low, high)),
        words=words,
    )


def _dot(run: Run, at: float | None) -> Dot:
    shape = "cross" if not run.converged else "hollow" if run.dropped else "full"
    value = text.NONE if run.time_min is None else f"{run.time_min:,.4f}"
    return Dot(shown(run.path.name), at, shape, value, mark(run))


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Three or four round numbers within."""
    raw = (high - low) / 4
    power = 10.0 ** int(f"{raw:e}".partition("e")[2])
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= raw)
    digits = max(0, -int(f"{step:e}".partition("e")[2]))
    first = int(low // step) + 1
    return [(i * step, f"{i * step:,.{digits}f}") for i in range(first, int(high // step) + 1)]


def _span(results: Sequence[Result]) -> float:
    """How far runs lie from their result's mean at most, as a share of it; no more than SPAN."""
    far = [
        abs(run.time_min / result.unscaled_min - 1)
        for result in results
        if result.unscaled_min
        for run in result.runs
        if run.time_min is not None
    ]
    return min(SPAN, max(0.01, 1.05 * max(far, default=0.0)))


def _strip(result: Result, span: float) -> list[Dot]:
    """The runs relative to their mean, for one row of the overview; what lies beyond the scale stands at its end."""
    if not result.unscaled_min:
        return []
    dots = []
    for run in result.runs[:MOST_RUNS]:
        if run.time_min is not None:
            share = run.time_min / result.unscaled_min - 1
            dots.append(_dot(run, 50 + 50 * max(-1.0, min(1.0, share / span))))
    return sorted(dots, key=lambda dot: dot.shape != "full")  # rings are painted over disks


def _bars(result: Result) -> dict[str, Any] | None:
    """Where the time of each run went, all on one scale, and the mean of those that count."""
    parts = [(run, breakdown([run])) for run in result.runs[:MOST_RUNS]]
    known = [(run, made) for run, made in parts if made is not None]
    if not known:
        return None
    most = max(made.total_s for _, made in known)
    mean = breakdown(scoring(result)) or known[0][1]
    names = [name for name in COLORS if any(name == part for _, made in known for part, _ in made.parts)]
    return {
        "rows": [
            {
                "label": shown(run.path.name),
                "share": made.total_s / most,
                "total": made.total_s,
                "dim": bool(mark(run)),
                "words": ", ".join(f"{name} {text.duration(seconds)}" for name, seconds in made.parts),
                "parts": [(COLORS[name], seconds / made.total_s) for name, seconds in made.parts if seconds > 0],
            }
            for run, made in known
        ],
        "legend": [
            (COLORS[name], name, seconds, seconds / mean.total_s) for name, seconds in mean.parts if name in names
        ],
        "mean": f"mean of the {mean.runs} runs that count" if mean.runs > 1 else "",
    }
