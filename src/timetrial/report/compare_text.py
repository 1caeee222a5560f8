"""A comparison as a terminal shows it: the results, what the others are over the base, and what keeps them apart."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from timetrial.report import text as numbers
from timetrial.report.score_record import shown
from timetrial.report.score_text import console, put, wide
from timetrial.results.comparison import Comparison, Pair
from timetrial.results.sides import Side
from timetrial.results.sides import name as name_of

FACTORS = (
    ("speed-up", "speedup", "base's score over this one"),
    ("per accelerator", "per_accelerator", "the same of score times accelerators"),
    ("  throughput", "throughput", "samples a second and accelerator"),
    ("  convergence", "convergence", "samples that the scores stand for"),
    ("  other", "other", "evaluation, gaps; the three make per accelerator"),
    ("energy", "energy", "base's over this one"),
)
"""(label, field of Pair, words)."""
NAMES = ("round", "organization", "system", "benchmark")
FIGURES = ("accelerators", "batch size", "score, min", "samples/s each", "evaluation")
"""Columns of a result."""
NOTHING = "nothing to compare"
MOST_NAMED = 6
"""Letters that one warning names."""
EQUAL = (
    ("speed-up", "equal_batch_speedup"),
    ("per accelerator", "equal_batch_per_accelerator"),
    ("efficiency", "equal_batch_efficiency"),
)


def show(comparison: Comparison, to: Console | None = None) -> None:
    """Print a comparison."""
    to = to or console()
    whole = sides(comparison)
    if to.is_terminal and to.measure(whole, options=to.options.update(max_width=10_000)).maximum > to.width:
        put(to, parted(comparison, to.width))
    else:
        wide(to, whole)
    for pair in comparison.pairs:
        put(to, Group(Text(), against(comparison, pair)))
    said = warnings(comparison)
    if said:
        put(to, Group(Text(), Text("To be kept in mind", "bold"), *(_item(line) for line in said)))


def _item(line: str) -> Padding:
    return Padding(Text(f"- {shown(line)}", "yellow"), (0, 0, 0, 2))


def warnings(comparison: Comparison) -> list[str]:
    """All warnings, each once, with the results or pairs that it is about: of single results, then of pairs."""
    single: dict[str, list[str]] = {}
    for index, side in enumerate(comparison.sides):
        for line in side.warnings:
            single.setdefault(line.removeprefix(f"{name_of(side.result)}: "), []).append(letter(index))
    both: dict[str, list[str]] = {}
    for pair in comparison.pairs:
        for line in pair.warnings:
            both.setdefault(line, []).append(letter(pair.own))
    told = [f"{_listed(who, len(comparison.sides))}: {line}" for line, who in single.items()]
    base = letter(comparison.base)
    return told + [f"{_listed(who, len(comparison.pairs))} over {base}: {line}" for line, who in both.items()]


def _listed(letters: Sequence[str], of: int) -> str:
    """B, C and D; the first few and how many more, or `all`, where there are many."""
    if len(letters) > MOST_NAMED:
        if len(letters) == of:
            return f"all {of}"
        return f"{', '.join(letters[:MOST_NAMED])} and {len(letters) - MOST_NAMED} more"
    *first, last = letters
    return f"{', '.join(first)} and {last}" if first else last


def nothing(comparison: Comparison) -> str:
    """Why no result can be compared with the base, in one line; empty where one can."""
    if any(not _without_factors(pair) for pair in comparison.pairs):
        return ""
    why = list(dict.fromkeys(why_none(pair) for pair in comparison.pairs))
    more = f" (and {len(why) - 1} other reasons)" if len(why) > 1 else ""
    return f"nothing to compare: {why[0]}{more}"


def _without_factors(pair: Pair) -> bool:
    return pair.speedup is None and pair.throughput is None


def letter(index: int) -> str:
    """A, B, ... AA: the name of a side in the tables."""
    made = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        made = chr(65 + rest) + made
    return made


def sides(comparison: Comparison) -> Table:
    """One row a result."""
    return _table(comparison, [*NAMES, *FIGURES])


def parted(comparison: Comparison, width: int) -> Group:
    """The same as two tables, names and figures, for where one is too wide."""
    whole = max(len(side.result.system) for side in comparison.sides) <= width // 2
    return Group(_table(comparison, NAMES, whole), Text(), _table(comparison, FIGURES))


def _table(comparison: Comparison, columns: Sequence[str], whole: bool = False) -> Table:
    """`whole`: systems on one line; others of the names are folded."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for column in columns:
        if column in NAMES:
            table.add_column(column, overflow="fold", no_wrap=whole and column == "system")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for index, side in enumerate(comparison.sides):
        head, *rest = cells(comparison, index, side)
        row = dict(zip((*NAMES, *FIGURES), rest, strict=True))
        told = (row[column] for column in columns)
        table.add_row(head, *told, style="bold" if index == comparison.base else "")
    return table


def cells(comparison: Comparison, index: int, side: Side) -> list[str]:
    """The figures of a side, as text."""
    r = side.result
    names = [shown(name) or numbers.NONE for name in (r.round, r.organization, r.system, r.benchmark)]
    return [
        letter(index) + (" (base)" if index == comparison.base else ""),
        *names,
        numbers.NONE if r.accelerators is None else f"{r.accelerators:,}",
        numbers.NONE if r.gbs is None else f"{r.gbs:,}",
        numbers.NONE if r.score_min is None else f"{r.score_min:,.4f}",
        numbers.NONE if side.rate is None else numbers.significant(side.rate, 4),
        numbers.NONE if side.eval_share is None else numbers.percent(side.eval_share).replace(numbers.NBSP, " "),
    ]


def against(comparison: Comparison, pair: Pair) -> Group:
    """One result over the base."""
    head = Text(f"{letter(pair.own)} over {letter(pair.base)}", "bold")
    if _without_factors(pair):
        return Group(head, Text(f"  nothing to compare: {why_none(pair)}"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for label, value, words in figures(pair):
        table.add_row(label, value, words)
    return Group(head, Padding(table, (0, 0, 0, 2)))


def why_none(pair: Pair) -> str:
    """Why a pair has no factors."""
    told = next((line for line in pair.warnings if NOTHING in line), "")
    return shown(told.removesuffix(f": {NOTHING}")) or "no score on one side"


def figures(pair: Pair) -> Sequence[tuple[str, str, str]]:
    """(label, value, words) of what is known of a pair."""
    rows = [
        (label, f"{getattr(pair, name):.3f}x", words)
        for label, name, words in FACTORS
        if getattr(pair, name) is not None
    ]
    if pair.efficiency is not None:
        rows.append(("efficiency", f"{100 * pair.efficiency:.1f} %", "strong scaling: (t n) of the base over (t n)"))
    if pair.equal_batch_per_accelerator is not None and pair.equal_batch_per_accelerator != pair.per_accelerator:
        rows.append(("at equal batch size", "", pair.equal_batch_basis))
        for label, name in EQUAL:
            value = getattr(pair, name)
            if value is not None:
                shown_ = f"{100 * value:.1f} %" if label == "efficiency" else f"{value:.3f}x"
                rows.append((f"  {label}", shown_, ""))
    if pair.equal_samples_per_accelerator is not None and pair.convergence not in (None, 1.0):
        value = pair.equal_samples_per_accelerator
        rows.append(("at equal samples", f"{value:.3f}x", "per accelerator, if both scores stood for as many samples"))
    return rows
