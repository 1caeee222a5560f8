"""Validated runs as one page: errors by machine size, system, model, precision and stack, and the farthest-off runs.

An error is predicted / published - 1: under constants fitted without the run's own system (disks), and under those
fitted to all (rings). As all pages here, it asks nothing of the network, has no script and forbids both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timetrial
from timetrial.errors import UserError
from timetrial.predict import fit, refit
from timetrial.predict.sure import Validated
from timetrial.report import pages, text
from timetrial.report import residual_charts as charts

WITHIN = charts.BANDS
"""Shares of runs within these errors are told."""
FARTHEST = 15
"""Configurations in the list of the farthest-off runs."""
BY = {
    "accelerators": "number of accelerators",
    "system": "system",
    "model": "model",
    "precision": "precision",
    "stack": "software stack",
}
"""Group of `refit.GROUPS` -> words, in the order of the page."""


@dataclass(frozen=True)
class Chart:
    """One chart with its sentence, as the template shows it."""

    id: str
    heading: str
    wide: str
    narrow: str
    words: str


def write_page(runs: Sequence[Validated], path: str | Path) -> Path:
    """Write the page of `runs` to `path`, beside it and renamed, and return it.

    Raises UserError where there are no runs, and where it cannot be written.
    """
    return pages.write(page(runs), Path(path))


def page(runs: Sequence[Validated]) -> str:
    """The page as HTML text. Raises UserError where there are no runs."""
    if not runs:
        raise UserError("nothing was validated: run `timetrial validate --fit DIR` with rows that can be predicted")
    environment = pages.environment()
    environment.filters.update(count=text.count, duration=text.duration, signed=signed, size=unsigned)
    return environment.get_template("residuals.html.j2").render(
        style=pages.style("report.css", "prediction.css"),
        same=one_kind(runs),
        runs=len(runs),
        configurations=len(refit.distinct(runs)),
        systems=len({v.system for v in runs}),
        headline=_headline(runs),
        charts=_charts(runs),
        table=rows(runs),
        farthest=farthest(runs),
        version=timetrial.__version__,
    )


def one_kind(runs: Sequence[Validated]) -> bool:
    """Whether no constants were fitted without a run's system, so that both errors are the same."""
    return all(v.error == v.fitted_error for v in runs)


def groups(runs: Sequence[Validated], name: str) -> dict[str, list[Validated]]:
    """Label -> runs, of one of `refit.GROUPS`: sizes by size, everything else by name."""
    key = refit.GROUPS[name]
    first: dict[str, list[Validated]] = {}
    for v in sorted(runs, key=lambda v: v.accelerators) if name == "accelerators" else runs:
        first.setdefault(key(v), []).append(v)
    return first if name == "accelerators" else dict(sorted(first.items()))


def rows(runs: Sequence[Validated]) -> list[dict[str, Any]]:
    """The table's rows: all runs, one a configuration, and each group with its heading."""
    found = [_row("all runs", runs), _row("one a configuration", refit.distinct(runs))]
    for name, words in BY.items():
        found.append({"heading": f"by {words}"})
        found += [_row(label, own) for label, own in groups(runs, name).items()]
    return found


def _row(label: str, runs: Sequence[Validated]) -> dict[str, Any]:
    return {
        "label": label,
        "n": len(runs),
        "errors": [fit.summary([v.error for v in runs]), fit.summary([v.fitted_error for v in runs])],
    }


def farthest(runs: Sequence[Validated]) -> list[Validated]:
    """The configurations that are farthest off without their system, the farthest first."""
    return sorted(refit.distinct(runs), key=lambda v: -abs(v.error))[:FARTHEST]


def words_of(runs: Sequence[Validated]) -> str:
    """Median and 90th percentile in words."""
    found = fit.summary([v.error for v in runs])
    return f"median {unsigned(found['median'])}, 90th percentile {unsigned(found['p90'])}"


def signed(share: float) -> str:
    """An error: +4.5 %."""
    return f"{share:+.1%}".replace("%", f"{text.NBSP}%").replace("-", text.MINUS)


def unsigned(share: float) -> str:
    """The size of an error: 4.5 %."""
    return f"{share:.1%}".replace("%", f"{text.NBSP}%")


def _headline(runs: Sequence[Validated]) -> list[dict[str, str]]:
    once = refit.distinct(runs)
    all_, single = (fit.summary([v.error for v in found]) for found in (runs, once))
    figures = [
        ("Median error", unsigned(all_["median"]), f"{unsigned(single['median'])} with one run a configuration"),
        ("90th percentile", unsigned(all_["p90"]), f"{unsigned(single['p90'])} with one run a configuration"),
    ]
    for limit in WITHIN:
        inside = sum(abs(v.error) <= limit for v in runs)
        figures.append((f"Within \u00b1{100 * limit:g}{text.NBSP}%", f"{inside} of {len(runs)}", "runs"))
    return [{"label": label, "value": value, "detail": detail} for label, value, detail in figures]


def _charts(runs: Sequence[Validated]) -> list[Chart]:
    hollow = not one_kind(runs)
    found = []
    for name, words in BY.items():
        parts = groups(runs, name)
        if name == "accelerators":
            title = "Errors over the number of accelerators"
            drawn = [charts.scatter(runs, wide, title, hollow) for wide in (True, False)]
            told = "; ".join(f"{label}: {words_of(own)} ({_runs(own)})" for label, own in parts.items())
            told = told[0].upper() + told[1:]
        else:
            title = f"Errors by {words}"
            lanes = [charts.Lane(label, f"{words_of(own)} ({_runs(own)})", own) for label, own in parts.items()]
            drawn = [charts.strips(lanes, wide, title, hollow) for wide in (True, False)]
            told = f"All runs: {words_of(runs)}"
        found.append(Chart(f"by-{name}", f"By {words}", drawn[0], drawn[1], f"{told}."))
    return found


def _runs(runs: Sequence[Validated]) -> str:
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
