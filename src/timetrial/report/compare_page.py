"""A comparison as one page: the results, each one's factors over the base as bars, and what keeps them apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import timetrial
from timetrial.report import pages
from timetrial.report.compare_text import FACTORS, FIGURES, cells, figures, letter, warnings, why_none
from timetrial.report.score_record import UNVERIFIED, shown
from timetrial.results.comparison import Comparison, Pair

COLUMNS = FIGURES
"""Heads of the numbers; on a phone each stands beside its number."""


def write_page(comparison: Comparison, path: str | Path) -> Path:
    """Write the page to `path`, beside it and renamed, and return it. Raises UserError when it cannot be written."""
    return pages.write(page(comparison), Path(path))


def page(comparison: Comparison) -> str:
    """The page as HTML text."""
    base = comparison.sides[comparison.base].result
    count = len(comparison.sides)
    names = {side.result.benchmark for side in comparison.sides}
    told = (
        pages.environment()
        .get_template("compare.html.j2")
        .render(
            style=pages.style("report.css", "score.css", "compare.css"),
            title=shown(
                f"{base.benchmark}: {len(comparison.sides)} results" if len(names) == 1 else "Results compared"
            ),
            columns=COLUMNS,
            base=comparison.base,
            sides=[_side(comparison, index) for index in range(count)],
            pairs=[_pair(comparison, pair) for pair in comparison.pairs],
            warnings=[shown(line) for line in warnings(comparison)],
            notice=UNVERIFIED,
            version=timetrial.__version__,
        )
    )
    return told.encode("utf-8", "replace").decode()


def _side(comparison: Comparison, index: int) -> dict[str, Any]:
    name, round_, organization, system, benchmark, *figures_ = cells(comparison, index, comparison.sides[index])
    return {
        "name": name,
        "who": f"{round_} {organization}",
        "what": f"{benchmark} on {system}",
        "figures": list(zip(COLUMNS, figures_, strict=True)),
    }


def _pair(comparison: Comparison, pair: Pair) -> dict[str, Any]:
    own, base = comparison.sides[pair.own].result, comparison.sides[pair.base].result
    known = [(label.strip(), getattr(pair, name)) for label, name, _ in FACTORS if getattr(pair, name)]
    far = max((abs(math.log(value)) for _, value in known), default=0.0) or 1.0
    bars = [_bar(label, value, max(far, math.log(1.5))) for label, value in known]
    return {
        "heading": f"{letter(pair.own)} over {letter(pair.base)}",
        "words": shown(f"{own.round} {own.system} over {base.round} {base.system}"),
        "bars": bars,
        "rows": [(label, value, shown(words), label.startswith(" ")) for label, value, words in figures(pair)],
        "why": why_none(pair),
    }


def _bar(label: str, value: float, far: float) -> dict[str, Any]:
    """A bar from 1x in the middle: to the right for better, to the left for worse; logarithmic."""
    share = 50 * math.log(value) / far
    return {
        "label": label,
        "value": f"{value:.2f}x",
        "left": 50 + min(0.0, share),
        "width": abs(share),
        "better": value >= 1,
    }
