"""The commands that score: score, compare. No torch, no network."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from timetrial.errors import UserError

if TYPE_CHECKING:
    from timetrial.results.records import Result

Paths = Annotated[list[str] | None, typer.Argument(help="Logs, run directories, benchmark directories, whole trees.")]
Round = Annotated[str, typer.Option("--round", help="Round whose rules hold, such as v5.0; by default the tree's own.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable: fields in docs/score.md.")]
Csv = Annotated[bool, typer.Option("--csv", help="A table for programs, one row a result.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page there.")]
Workers = Annotated[int | None, typer.Option("--workers", help="Processes; by default one a core, eight at most.")]

MOST_WORKERS = 8
"""Processes unless told otherwise; reading is bound by the disk soon."""


def add_to(app: typer.Typer) -> None:
    """Make these commands part of `app`."""
    app.command()(score)
    app.command()(compare)


def score(
    paths: Paths = None,
    round_: Round = "",
    as_json: Json = False,
    as_csv: Csv = False,
    html: Html = None,
    explain: Annotated[
        bool | None,
        typer.Option(
            "--explain/--no-explain",
            help="Tell all of every result, and where its time went; by default where there is one result.",
        ),
    ] = None,
    official: Annotated[
        bool, typer.Option("--official/--no-official", help="Ask the official mlperf-logging checker about each log.")
    ] = True,
    workers: Workers = None,
) -> None:
    """What results score, whether they stand, and why not. Exit code: 0 all stand, 1 one does not, 2 not readable."""
    if not paths:
        raise UserError("score: no path; as in: timetrial score results/SYSTEM/BENCHMARK")
    _one_output(as_json, as_csv, html)
    from timetrial.report import score_json, score_text

    results = list(_scored([Path(path) for path in paths], round_, official, workers))
    if not results:
        raise UserError(f"{', '.join(paths)}: nothing to score; give a log or a directory with result_*.txt")
    if html is not None:
        from timetrial.report import score_page

        print(f"wrote {score_page.write_page(results, html)}", file=sys.stderr)
    with _reader_may_leave():
        if as_json:
            print(score_json.as_json(results, explain is not False))
        elif as_csv:
            print(score_json.as_csv(results).rstrip("\n"))
        else:
            score_text.show(results, whole=explain or None, explain=explain is not False)
    raise SystemExit(_ended(results))


def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BASE OTHER...", help="Paths, or published:ROUND/SUBMITTER/BENCHMARK/SYSTEM; the first is the base."
        ),
    ] = None,
    round_: Round = "",
    as_json: Json = False,
    as_csv: Csv = False,
    html: Html = None,
    workers: Workers = None,
) -> None:
    """Results side by side: how much faster, and whether by throughput, convergence or batch size."""
    given = arguments or []
    if len(given) < 2 and not any("*" in one or one.startswith("published:") for one in given):
        raise UserError(f"compare: {len(given)} of the two results that are needed; as in: timetrial compare A B")
    _one_output(as_json, as_csv, html)
    from timetrial.report import compare_text, score_json
    from timetrial.results.comparison import compare as compared
    from timetrial.results.comparison import parse

    results = parse(given, lambda path: _scored([path], round_, False, workers))
    for result in results:
        if result.unverified and result.verdict == "unread":
            raise UserError(_unread(result))
    comparison = compared(results)
    if why := compare_text.nothing(comparison):
        raise UserError(f"compare: {why}")
    if html is not None:
        from timetrial.report import compare_page

        print(f"wrote {compare_page.write_page(comparison, html)}", file=sys.stderr)
    with _reader_may_leave():
        if as_json:
            print(score_json.comparison_json(comparison))
        elif as_csv:
            print(score_json.comparison_csv(comparison).rstrip("\n"))
        else:
            compare_text.show(comparison)
    raise SystemExit(_ended([result for result in results if result.unverified]))


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """A reader such as `head` that has seen enough changes nothing about the exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_output(as_json: bool, as_csv: bool, html: Path | None) -> None:
    from timetrial.report import pages

    if as_json and as_csv:
        raise UserError("--json and --csv: give one of them")
    pages.check("--html", html)


def _scored(paths: list[Path], round_: str, official: bool, workers: int | None) -> Iterable[Result]:
    """Results in the order of the tree; what is merely worth a note goes to standard error."""
    from timetrial.report.progress import Progress
    from timetrial.results.many import score_all

    progress = Progress()
    try:
        for result in score_all(paths, _cores() if workers is None else workers, progress, round_, official):
            if not result.runs and all(finding.level == "note" for finding in result.findings):
                progress.close()
                for finding in result.findings:
                    print(f"note: {finding.path}: {finding.found}; {finding.change}", file=sys.stderr)
                continue
            yield result
    finally:
        progress.close()


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return min(MOST_WORKERS, len(affinity(0)) if affinity else os.cpu_count() or 1)


def _ended(results: list[Result]) -> int:
    """The exit code of commands on `results`; where something could not be read, one line says what."""
    from timetrial.report import score_record

    unread = [result for result in results if result.verdict == "unread"]
    if unread:
        more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
        print(f"error: {_unread(unread[0])}{more}", file=sys.stderr)
    return score_record.exit_code(results)


def _unread(result: Result) -> str:
    from timetrial.report import score_record

    first = next((group for group in score_record.groups(result) if group.level == "fail"), None)
    return f"{result.path} could not be read" + (f": {first.found_words}; {first.change}" if first else "")
