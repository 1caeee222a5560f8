"""One entry from its logs to its result: read, score, check, explain. Holds one log at a time."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from pathlib import Path

from timetrial.errors import UserError
from timetrial.results import rounds
from timetrial.results.breakdown import run_time
from timetrial.results.check import check_result, check_run
from timetrial.results.check import refused as refuses
from timetrial.results.energy import energy
from timetrial.results.official import Official, rulesets
from timetrial.results.read import read
from timetrial.results.records import Finding, Result, Run, RunLog
from timetrial.results.runs import run_of
from timetrial.results.scoring import MINI, benchmark_of, division_of, round_of, score, size_of, verdict
from timetrial.results.tree import Entry

Progress = Callable[[Path], None]
"""Called with each log that was read."""


def score_entry(entry: Entry, progress: Progress | None = None, official: Official | None = None) -> Result:
    """The result of one entry with everything that is known of it.

    With `official`, the official compliance checker is asked about each log: its verdict stands in `Result.official`,
    and which runs its summarizer would leave out is taken from it. Without, that is taken from our own rules, which
    say the same but for what is told as a contradiction.

    Raises nothing: what goes wrong inside of this package is a finding `internal.error`, and the result is unread.
    """
    try:
        return _score(entry, progress, official)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        return failed(entry, "internal.error", found, "report it, with the log if you may")


def failed(entry: Entry, rule: str, found: str, change: str) -> Result:
    """The result of an entry that could not be worked on."""
    finding = Finding("fail", rule, found, "no error", "timetrial", change, entry.path)
    return dataclasses.replace(score(entry, ()), verdict="unread", findings=(*entry.findings, finding))


def _score(entry: Entry, progress: Progress | None, official: Official | None) -> Result:
    accelerators, _ = size_of(entry)
    accelerator = (entry.description or {}).get("accelerator_model_name")
    notes = str((entry.description or {}).get("sw_notes") or "")
    runs: list[Run] = []
    refused: set[Path] = set()
    said: dict[Path, tuple[str, ...]] = {}
    guessed: Finding | None = None
    known = entry
    for path in entry.logs:
        log = read(path)
        run = run_of(log, entry)
        benchmark = benchmark_of(entry, [run])
        if not known.round and benchmark:
            round_, said_ = round_of(entry, benchmark, [run])
            guessed = said_ if round_ else None  # where there is none, `score` says so
            known = dataclasses.replace(entry, round=round_, round_source="guess" if round_ else "")
        if log.events:
            division = division_of(entry, [run])
            checked = _checked(log, known.round, benchmark, division)
            if refuses(log, checked, known.round, benchmark, division):
                refused.add(path)
            if official and not _mini(entry, benchmark) and rounds.ruleset(known.round) in rulesets():
                verdict_ = official.log(path, rounds.ruleset(known.round))
                said[path] = verdict_.lines
                if not verdict_.skipped:
                    (refused.discard if verdict_.passed else refused.add)(path)
            name = accelerator if isinstance(accelerator, str) else ""
            time = run_time(log, benchmark, accelerators, name, notes)
            run = dataclasses.replace(run, findings=(*run.findings, *checked), time=time)
        runs.append(run)
        if progress:
            progress(path)
    result = _whole(known, runs, refused, guessed)
    return dataclasses.replace(result, official=_said(result, said)) if official else result


def _said(result: Result, said: dict[Path, tuple[str, ...]]) -> tuple[str, ...]:
    """How many logs the official checker passes, by our count; then its messages by log, word for word."""
    if not said:
        return ("not asked: no log that it has rules for",)
    passed, logs = sum(lines[0] == "SUCCESS" for lines in said.values()), len(result.runs)
    counted = f"{passed} of {logs} {'log passes' if logs == 1 else 'logs pass'}"
    return (counted, *(f"{path.name}: {line}" for path, lines in said.items() for line in lines[1:]))


def _checked(log: RunLog, round_: str, benchmark: str, division: str) -> tuple[Finding, ...]:
    try:
        return check_run(log, round_, benchmark, division)
    except UserError:
        return ()  # no rules for the round: check_result says so, once


def _mini(entry: Entry, benchmark: str) -> bool:
    return entry.preset == "mini" or benchmark.endswith(MINI)


def _whole(entry: Entry, runs: list[Run], refused: set[Path], guessed: Finding | None) -> Result:
    result = score(entry, runs, refused)
    findings = [*([guessed] if guessed else []), *result.findings]
    if result.runs:
        findings += check_result(entry, result.runs)
    if entry.power_logs:
        factor = result.convergence.scaling_factor if result.convergence else entry.scaling or 1.0
        joules, said = energy(result.runs, factor)
        findings += said
        result = dataclasses.replace(result, energy=joules)
    result = dataclasses.replace(result, findings=tuple(findings))
    return dataclasses.replace(result, verdict=verdict(result))
