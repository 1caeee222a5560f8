"""Scores and comparisons for programs: JSON and CSV. Fields: docs/score.md."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from timetrial.report.score_record import breakdown, explanation, groups, how_scored, scoring, shown, verdict
from timetrial.results.comparison import Comparison
from timetrial.results.records import Result


def record(result: Result, explained: bool = True) -> dict[str, Any]:
    """One result as JSON has it: the fields of `records.Result`, and what follows from them.

    `score_words` how the score was made, `verdict_words`, `stands` (true, false, or null for one that could not be
    read), `explanation` sentences (where `explained`) and `breakdown_s` mean seconds a run.
    """
    made: dict[str, Any] = plain(dataclasses.asdict(result))
    made["score_words"] = how_scored(result)
    made["verdict_words"] = verdict(result)[1]
    made["stands"] = {"stands": True, "fails": False}.get(result.verdict)
    parts = breakdown(scoring(result))
    made["breakdown_s"] = None if parts is None else plain(dataclasses.asdict(parts))
    if explained:
        made["explanation"] = [plain(line) for lines in explanation(result) for line in lines]
    return made


def as_json(results: Sequence[Result], explained: bool = True) -> str:
    """A list of results; numbers that are none (NaN, infinite) are null."""
    return json.dumps([record(result, explained) for result in results], indent=1, allow_nan=False)


def plain(value: Any) -> Any:
    """The same of what JSON knows: paths are text, tuples lists, numbers that are none null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, dict):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value).encode("utf-8", "replace").decode()


COLUMNS: dict[str, Callable[[Result], Any]] = {
    "round": lambda r: r.round,
    "division": lambda r: r.division,
    "organization": lambda r: r.organization,
    "system": lambda r: r.system,
    "accelerator": lambda r: r.accelerator,
    "accelerators": lambda r: r.accelerators,
    "nodes": lambda r: r.nodes,
    "benchmark": lambda r: r.benchmark,
    "gbs": lambda r: r.gbs,
    "score_min": lambda r: r.score_min,
    "unscaled_min": lambda r: r.unscaled_min,
    "scaling_factor": lambda r: r.convergence.scaling_factor if r.convergence else None,
    "verdict": lambda r: r.verdict,
    "fails": lambda r: sum(group.level == "fail" for group in groups(r)),
    "warns": lambda r: sum(group.level == "warn" for group in groups(r)),
    "first_fail": lambda r: next((f"{g.rule}: {g.found_words}" for g in groups(r) if g.level == "fail"), ""),
    "official": lambda r: r.official[0] if r.official else "",
    "runs": lambda r: len(r.runs),
    "not_converged": lambda r: sum(not run.converged for run in r.runs),
    "run_min": lambda r: min((run.time_min for run in r.runs if run.time_min is not None), default=None),
    "run_max": lambda r: max((run.time_min for run in r.runs if run.time_min is not None), default=None),
    "samples": lambda r: r.convergence.samples_mean if r.convergence else None,
    "samples_unit": lambda r: r.convergence.unit if r.convergence else "",
    "reference_samples": lambda r: r.convergence.reference_mean if r.convergence else None,
    "fastest_allowed_samples": lambda r: r.convergence.reference_min if r.convergence else None,
    "evals_to_fastest": lambda r: r.convergence.evals_to_fastest if r.convergence else None,
    "train_s": lambda r: _part(r, "train_s"),
    "eval_s": lambda r: _part(r, "eval_s"),
    "gap_s": lambda r: _part(r, "gap_s"),
    "step_s": lambda r: _time(r, "step_s"),
    "samples_per_s": lambda r: _time(r, "samples_per_s"),
    "tflops_per_accelerator": lambda r: _time(r, "tflops_per_accelerator"),
    "mfu": lambda r: _time(r, "mfu"),
    "energy_j": lambda r: r.energy.joules if r.energy else None,
    "average_w": lambda r: r.energy.average_w if r.energy else None,
    "path": lambda r: r.path,
}
"""Column -> its value; rates and times are means over the runs that the score is made of."""


def as_csv(results: Sequence[Result]) -> str:
    """One row a result; a cell is empty where a figure is not known."""
    rows = [[_cell(get(result)) for get in COLUMNS.values()] for result in results]
    return _table([*COLUMNS], rows)


def _part(result: Result, name: str) -> float | None:
    parts = breakdown(scoring(result))
    return None if parts is None else getattr(parts, name)


def _time(result: Result, name: str) -> float | None:
    values = [getattr(run.time, name) for run in scoring(result) if run.time is not None]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(scoring(result)) else None


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.10g}"
    return shown(value) if isinstance(value, str | Path) and (value := str(value)) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return written.getvalue()


def comparison_json(comparison: Comparison) -> str:
    """{base, sides, pairs, warnings}: each side with its result without single runs' findings."""
    sides = []
    for side in comparison.sides:
        made = plain(dataclasses.asdict(dataclasses.replace(side, result=dataclasses.replace(side.result, runs=()))))
        made["result"]["runs"] = [
            {"path": str(run.path), "time_min": run.time_min, "dropped": run.dropped} for run in side.result.runs
        ]
        sides.append(made)
    pairs = [plain(dataclasses.asdict(pair)) for pair in comparison.pairs]
    told = {"base": comparison.base, "sides": sides, "pairs": pairs, "warnings": plain(comparison.warnings)}
    return json.dumps(plain(told), indent=1, allow_nan=False)


PAIR = (
    *("speedup", "per_accelerator", "efficiency", "throughput", "convergence", "other", "equal_batch_min"),
    *("equal_batch_speedup", "equal_batch_per_accelerator", "equal_batch_efficiency", "equal_samples_per_accelerator"),
    "energy",
)
"""Figures of a pair that the CSV has, as `compare.Pair` names them."""


def comparison_csv(comparison: Comparison) -> str:
    """One row a side, the base first among equals: its figures, and its factors over the base."""
    factors = {pair.own: pair for pair in comparison.pairs}
    head = ["round", "organization", "system", "benchmark", "accelerator", "accelerators", "gbs", "score_min"]
    rows = []
    for index, side in enumerate(comparison.sides):
        figures = [getattr(side.result, name) for name in head]
        pair = factors.get(index)
        figures += [side.accelerator_min, side.rate, side.eval_share, side.result.verdict, index == comparison.base]
        figures += [getattr(pair, name) if pair else None for name in PAIR]
        figures.append("; ".join((*side.warnings, *(pair.warnings if pair else ()))))
        rows.append([_cell(figure) for figure in figures])
    more = ["accelerator_minutes", "samples_per_s_per_accelerator", "eval_share", "verdict", "base"]
    return _table([*head, *more, *PAIR, "warnings"], rows)
