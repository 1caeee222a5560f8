"""Scores as a terminal shows them: one result with its whole story, many as a table and what fails."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from timetrial.report import text as numbers
from timetrial.report.score_record import (
    MARKS,
    Breakdown,
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
    summed,
    sums,
    typical,
    verdict,
)
from timetrial.report.score_record import Group as Found
from timetrial.results.records import Result

WIDTH = 110
"""Columns of prose where no terminal says how many there are."""
BAR = 36
STYLES = {
    **{"fail": "bold red", "warn": "yellow", "note": "dim", "allowed": "dim"},
    **{"good": "bold green", "open": "bold yellow", "bad": "bold red"},
}
MOST_FAILS = 5
"""Failures of one result among many that are told."""
MOST_WARNS = 12
"""Warning rules that are summed up below a table."""
MOST_WORDS = 100
"""Characters there of what was found, and of what is asked."""
MOST_OFFICIAL = 40
"""Lines of the official checker that are told."""
MOST_ROWS = 40
"""Runs that are listed."""


def console(file: TextIO | None = None) -> Console:
    """Where it is printed: as wide as the terminal; without one, tables are as wide as they need."""
    file = file or sys.stdout
    if isinstance(file, io.TextIOWrapper):  # marks and bars, where the locale has none
        file.reconfigure(errors="replace")
    made = _Console(file=file, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = WIDTH
    return made


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process with exit code 1, which here says that a result does not stand."""
        raise BrokenPipeError


def show(results: Sequence[Result], whole: bool | None = None, explain: bool = True, to: Console | None = None) -> None:
    """Print results; `whole` tells all of each, by default where there is one. `explain`: where the time went."""
    to = to or console()
    whole = len(results) == 1 if whole is None else whole
    if len(results) > 1:
        wide(to, overview(results))
    for result in results:
        if whole:
            said: RenderableType = story(result, explain)
        elif verdict(result)[0] == "bad":
            said = failures(result)
        else:
            continue
        put(to, Group(Text(), said) if len(results) > 1 else said)
    if len(results) > 1:
        put(to, Group(Text(), *_closing(results)))


def put(to: Console, said: RenderableType) -> None:
    """Print, without blanks at the ends of lines where a program may read it."""
    if to.is_terminal:
        to.print(said)
        return
    with to.capture() as captured:
        to.print(said)
    to.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def wide(to: Console, table: Table) -> None:
    """A table on one line a row where no terminal limits it."""
    narrow = to.width
    if not to.is_terminal:
        to.width = 10_000
        to.width = to.measure(table).maximum
    put(to, table)
    to.width = narrow


def _closing(results: Sequence[Result]) -> Iterable[RenderableType]:
    """How many stand, and which warnings there are."""
    warned: dict[str, list[Found]] = {}
    for result in results:
        first: dict[str, Found] = {}
        for group in groups(result):
            if group.level == "warn":
                first.setdefault(group.rule, group)
        for rule, group in first.items():
            warned.setdefault(rule, []).append(group)
    yield Text(sums(results) + ".")
    if warned:
        yield Text("Warnings, which a reviewer would ask about (score one result alone to read them whole):")
        table = _table()
        table.show_header = False
        for rule, said in sorted(warned.items(), key=lambda item: -len(item[1]))[:MOST_WARNS]:
            words = ("such as: " if len(said) > 1 else "") + summed(said[0], MOST_WORDS)
            table.add_row(Text(rule, "yellow"), f"{len(said)} {'result' if len(said) == 1 else 'results'}", Text(words))
        yield Padding(table, (0, 0, 0, 2))


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def overview(results: Sequence[Result]) -> Table:
    """One row a result."""
    table = _table()
    for name in ("round", "organization", "system", "benchmark"):
        table.add_column(name, overflow="fold")
    table.add_column("score, min", justify="right", no_wrap=True)
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for result in results:
        kind, words = verdict(result)
        warned = sum(group.level == "warn" for group in groups(result))
        cell = Text(f"{MARKS[kind]} {words}", STYLES[kind])
        if warned and kind != "bad":
            cell.append(f", {warned} {'warning' if warned == 1 else 'warnings'}", "yellow")
        names = (result.round, result.organization, result.system, result.benchmark or result.path.name)
        cells = [Text(shown(name) or numbers.NONE) for name in names]
        table.add_row(*cells, _minutes(result.score_min), str(len(result.runs)), cell)
    return table


def _minutes(value: float | None) -> str:
    return numbers.NONE if value is None else f"{value:,.4f}"


def story(result: Result, explain: bool = True) -> Group:
    """All of one result."""
    parts: list[RenderableType] = [*_head(result)]
    found = groups(result)
    if found:
        parts += [Text(), Text("Findings", "bold"), *(finding(group) for group in found)]
    else:
        parts += [Text(), Text("Findings: none. Nothing speaks against it.")]
    parts += _official(result)
    if result.runs:
        parts += [Text(), Text("Runs", "bold"), Padding(_runs(result), (0, 0, 0, 2))]
    if explain:
        parts += _time(result)
    return Group(*parts)


def _head(result: Result) -> list[RenderableType]:
    kind, words = verdict(result)
    name = " ".join(filter(None, (result.benchmark, result.system))) or result.path.name
    head: list[RenderableType] = [Text(shown(name), "bold"), Text("  " + ", ".join(about(result)))]
    head.append(Text(f"  {shown(str(result.path))}", "dim"))
    line = Text("  ")
    line.append(f"{MARKS[kind]} {words}", STYLES[kind])
    if result.score_min is not None:
        line.append(f"   {result.score_min:,.4f} min", "bold")
    head.append(line)
    how = how_scored(result)
    return [*head, Padding(Text(how), (0, 0, 0, 4))] if how else head


def finding(group: Found) -> RenderableType:
    """One finding: what was found, what is asked, where the rule stands, what to change."""
    style = STYLES[group.level]
    head = Text()
    head.append(f"{group.level.upper() if group.level == 'fail' else group.level:<8}", style)
    head.append(shown(group.rule), "bold" if group.level == "fail" else "")
    where = shown(group.where_words())
    if where:
        head.append(f"   {where}", "dim")
    if group.level == "allowed":
        head.append("   one run may miss the target", "dim")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(style="dim", no_wrap=True, width=7)
    table.add_column(overflow="fold")
    rows = [("found", group.found_words), ("asked", group.asked), ("change", group.change), ("rule", group.source)]
    for label, words in rows:
        if words:
            table.add_row(label, Text(shown(words), "dim" if label == "rule" else ""))
    return Padding(Group(head, Padding(table, (0, 0, 0, 8))), (0, 0, 0, 2))


def failures(result: Result) -> Group:
    """What fails of one result among many."""
    kind, words = verdict(result)
    head = Text()
    head.append(f"{MARKS[kind]} ", STYLES[kind])
    head.append(
        shown(" ".join(filter(None, (result.round, result.organization, result.system, result.benchmark)))), "bold"
    )
    head.append(f" {words}", STYLES[kind])
    head.append(f"\n  {shown(str(result.path))}", "dim")
    found = [group for group in groups(result) if group.level == "fail"]
    parts: list[RenderableType] = [head, *(finding(group) for group in found[:MOST_FAILS])]
    if len(found) > MOST_FAILS:
        parts.append(Text(f"  and {len(found) - MOST_FAILS} more: timetrial score {shown(str(result.path))}", "dim"))
    if result.verdict == "mini" and not found:
        parts.append(Text("  the target was not reached: train on"))
    return Group(*parts)


def _official(result: Result) -> Iterable[RenderableType]:
    ours, quoted = official(result)
    if not ours:
        return
    yield from (Text(), Text(f"Official checker ({checker(result)})", "bold"))
    yield from (Padding(Text(line), (0, 0, 0, 2)) for line in ours)
    if quoted:
        yield Text("  Word for word:")
    for line in quoted[:MOST_OFFICIAL]:
        yield Padding(Text(shown(line)), (0, 0, 0, 4))
    if len(quoted) > MOST_OFFICIAL:
        yield Text(f"    and {len(quoted) - MOST_OFFICIAL} more lines, which --json and --html have", "dim")


def _runs(result: Result) -> Table:
    table = _table()
    unit = result.convergence.unit.replace("_", " ") if result.convergence else "samples"
    table.add_column("log", overflow="fold")
    for name in ("minutes", unit, "last evaluation", "seed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for run in result.runs[:MOST_ROWS]:
        cells = [
            shown(run.path.name),
            _minutes(run.time_min),
            samples(run.samples),
            numbers.NONE if run.quality is None else f"{run.quality:.6g}",
            numbers.NONE if run.seed is None else str(run.seed),
            mark(run),
        ]
        table.add_row(*cells, style="" if run.converged and not run.dropped else "dim")
    if len(result.runs) > MOST_ROWS:
        table.add_row(f"and {len(result.runs) - MOST_ROWS} more")
    return table


def _time(result: Result) -> Iterable[RenderableType]:
    counted = scoring(result)
    parts = breakdown(counted or [run for run in result.runs if run.time is not None])
    time, margin = explanation(result)
    run = typical(result)
    if parts is not None:
        of = f", mean of {parts.runs} runs" if parts.runs > 1 else ""
        yield from (Text(), Text(f"Where the time went{of}", "bold"), Padding(_bars(parts), (0, 0, 0, 2)))
        for line in doubts(result):
            yield Padding(Text(shown(line), "yellow"), (0, 0, 0, 2))
    if time and run is not None:
        name = "" if len(result.runs) == 1 else f" ({shown(run.path.name)}, the median run)"
        yield from (Text(), Text(f"How it ran{name}", "bold"))
        for line in time:
            yield Padding(Text(shown(line)), (0, 0, 0, 2))
    if margin:
        yield from (Text(), Text("Convergence and margin", "bold"))
        for line in margin:
            yield Padding(Text(shown(line)), (0, 0, 0, 2))


def _bars(parts: Breakdown) -> Table:
    table = _table()
    table.show_header = False
    most = max((seconds for _, seconds in parts.parts), default=0.0) or 1.0
    for words, seconds in parts.parts:
        bar = "\u2588" * round(BAR * seconds / most) or "\u258f"
        share = numbers.percent(seconds / parts.total_s).replace(numbers.NBSP, " ")
        table.add_row(words, f"{bar:<{BAR}}", numbers.duration(seconds).replace(numbers.NBSP, " "), share)
    return table
