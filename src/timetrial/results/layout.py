"""The runs of one result together: how many, their seeds, their hyperparameters, and where they lie.

Sources: training_policies `training_rules.adoc` (sections named), mlperf-logging 4.1.68 package_checker.py and
seed_checker.py (lines named). Figures of a round come from its rule data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from timetrial.errors import UserError
from timetrial.results import ruleset
from timetrial.results.description import check_description
from timetrial.results.records import Finding, Level, Run
from timetrial.results.ruleset import MINI, Ruleset

if TYPE_CHECKING:
    from timetrial.results.tree import Entry

PACKAGE = "mlperf-logging 4.1.68 package_checker.py"
SEEDS = "mlperf-logging 4.1.68 seed_checker.py"
SUMMARIZER = "mlperf-logging 4.1.68 result_summarizer.py"
NO_TIME = frozenset(("no run_start", "clock ran backwards"))
"""States of runs that are no runs at all; each has a finding of level fail of its own."""
TEXT = "training_rules.adoc"
NAME = re.compile(r"result_(\d+)\.txt")
ENDED_EARLY = re.compile(
    r"run\.(not_converged|run_stop|status)|.*\.(target|run_stop|eval_accuracy|eval_stop|block_stop|epoch_stop)"
)
"""Rules that a run breaks because it did not get to its end; one such run is allowed."""
HYPERPARAMETERS = re.compile(r"opt_\w+|\w+_opt_\w+|lora_\w+|max_sequence_length|gradient_accumulation_steps|max_steps")
Verdict = Literal["stands", "fails", "mini"]


def verdict(findings: Iterable[Finding], runs: Sequence[Run]) -> Verdict:
    """What a result's own findings come to: those of `check_result`, of the tree and of convergence.

    The findings of single runs are not to be among them: `check_result` weighs those, since one run may miss the
    target. A result with a run of a mini preset is `mini`, never `stands`.
    """
    if any(run.benchmark.endswith("_mini") or str(run.keys.get("notice", "")).startswith("mini") for run in runs):
        return "mini"
    return "fails" if any(finding.level == "fail" for finding in findings) else "stands"


def check_result(entry: Entry, runs: Sequence[Run]) -> tuple[Finding, ...]:
    """What is amiss with the runs taken together; `run.findings` are to hold those of `check_run` already.

    Empty where there is nothing to say. A single log (`entry.kind` log or run) is not held to the number of runs.
    """
    names = {run.benchmark or entry.benchmark for run in runs} - {""}
    name = next(iter(names)) if len(names) == 1 else entry.benchmark
    if name.endswith("_mini") or entry.preset == "mini":
        return ()
    found = list(_names(entry)) + list(_alike(entry, runs, names))
    division = _division(entry, runs)
    try:
        rules = ruleset.load(entry.round, name, division)
    except UserError as error:
        if entry.unknown_round and not entry.round:
            return tuple(found)  # the score says so
        asked, change = "a benchmark of a known round", "name the round"
        found.append(_finding("fail", "round", str(error), asked, "timetrial: rules/", change, entry.path))
        return tuple(found)
    found += [*_counts(entry, runs, rules), *_compliant(entry, runs, rules), *_tree(entry, runs, rules, division)]
    if division == "closed":
        found += _seeds(entry, runs, rules)
    if entry.description is not None:
        found += check_description(entry.description, entry.description_path, rules)
    for c in rules.contradictions:
        if c.rule is None and division == "closed":
            said = f"{c.one}; but {c.another}"
            change = f"followed: {c.followed}"
            found.append(Finding(c.level, f"contradiction.{c.name}", said, "one rule", c.source, change, entry.path))
    return tuple(found)


def _division(entry: Entry, runs: Sequence[Run]) -> str:
    stated = [run.keys.get("submission_division") for run in runs]
    described = (entry.description or {}).get("division")
    return next((d for d in (*stated, described) if d in ruleset.DIVISIONS), "closed")


def _names(entry: Entry) -> Iterable[Finding]:
    """Names of the result files, and what else lies beside them."""
    if entry.kind != "benchmark":
        return
    source = f"{PACKAGE}:97-146"
    odd = [log.name for log in entry.logs if not NAME.fullmatch(log.name)]
    if odd:
        found, change = f"{', '.join(odd[:4])}{' ...' if len(odd) > 4 else ''}", "rename them"
        yield _finding("warn", "names", found, "result_N.txt", source, change, entry.path)
    numbers = sorted(int(m[1]) for log in entry.logs if (m := NAME.fullmatch(log.name)))
    if not odd and numbers != list(range(len(numbers))):
        asked = f"result_0.txt to result_{len(numbers) - 1}.txt"
        found = f"numbers {', '.join(map(str, numbers[:12]))}"
        yield _finding("warn", "names", found, asked, source, "number them from 0 on", entry.path)
    if entry.others:
        names = ", ".join(other.name for other in entry.others[:4])
        asked = "result_N.txt and scaling.json alone"
        yield _finding("warn", "others", f"{len(entry.others)} more: {names}", asked, source, "move them", entry.path)


def _alike(entry: Entry, runs: Sequence[Run], names: set[str]) -> Iterable[Finding]:
    """All runs are of one benchmark, batch size and set of hyperparameters."""
    rcp = "mlperf-logging 4.1.68 rcp_checker.py:178-185"
    if len(names) > 1:
        found = f"benchmarks {', '.join(sorted(names))}"
        yield _finding("fail", "benchmark", found, "one benchmark", rcp, "part the runs by benchmark", entry.path)
    sizes = {run.gbs for run in runs if run.gbs is not None}
    if len(sizes) > 1:
        found = f"global batch sizes {', '.join(map(str, sorted(sizes)))}"
        yield _finding(
            "fail", "global_batch_size", found, "one global batch size", rcp, "submit runs of one", entry.path
        )
    for run in runs:
        size = run.keys.get("global_batch_size")
        if size is not None and run.gbs is None:
            found = f"global_batch_size = {str(size)[:40]!r} in {run.path.name} is no whole number"
            asked = "an integer: the official convergence checker compares it with its reference points"
            change = (
                f"log an integer{f': {size.strip()}' if isinstance(size, str) and size.strip().isdecimal() else ''}"
            )
            yield _finding("fail", "global_batch_size", found, asked, rcp, change, run.path)
    runs = [run for run in runs if not run.broken]  # keys that those lack are no wonder
    keys = sorted({key for run in runs for key in run.keys if HYPERPARAMETERS.fullmatch(key)})
    for key in keys:
        values = list(dict.fromkeys(_hashable(run.keys[key]) for run in runs if key in run.keys))
        if len(values) > 1:
            shown = ", ".join(map(str, values[:4]))
            source = f"{TEXT}, Scoring: N independent runs of one submission"
            asked, change = "one value in all runs", "submit runs with the same hyperparameters"
            yield _finding("warn", key, f"{key} differs: {shown}", asked, source, change, entry.path)
        lacking = [run.path.name for run in runs if key not in run.keys]
        if lacking and len(lacking) < len(runs):
            source = f"{TEXT}, Scoring: N independent runs of one submission"
            change = "log it in all"
            yield _finding("note", key, f"no {key} in {', '.join(lacking[:4])}", "all runs", source, change, entry.path)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _counts(entry: Entry, runs: Sequence[Run], rules: Ruleset) -> Iterable[Finding]:
    have, want = len(runs), rules.runs
    source = f"{TEXT}, Benchmark Results; {rules.runs_source}; {PACKAGE}:138"
    if entry.kind != "benchmark":
        if have < want:
            found = f"{have} run"
            asked = f"{want} runs make a result of {rules.benchmark}"
            yield _finding("warn", "count", found, asked, source, "score the directory of all", entry.path)
        return
    if have < want:
        change = f"add {want - have} more, not chosen by their time"
        yield _finding("fail", "count", f"{have} runs", f"{want} runs", source, change, entry.path)
    if have > want:
        found = f"{have} runs"
        asked = f"{want}; of more, those {want} consecutive whose score is the median of all such sets"
        change = f"keep the {want} consecutive runs of the median set, and the others elsewhere"
        yield _finding("fail", "count", found, asked, f"{source}; {TEXT}, Scoring", change, entry.path)


def _compliant(entry: Entry, runs: Sequence[Run], rules: Ruleset) -> Iterable[Finding]:
    """How many logs cannot be read, how many runs missed the target, and how many broke another rule."""
    unread = [run for run in runs if run.broken]
    whole = [run for run in runs if not run.broken]
    bad = [run for run in whole if _broken_rules(run)]
    untrue = [run for run in bad if run.converged and all(rule.endswith(".target") for rule in _broken_rules(run))]
    missed = [run for run in whole if not run.converged and run.status not in NO_TIME]
    source = f"{TEXT}, Benchmark Results; {PACKAGE}:185"
    if unread:
        yield _unread(unread, len(runs))
    yield from _missed(entry, missed, len(runs), rules)
    for run in untrue:
        found = f"{run.path.name} says success, and no evaluation reached the target"
        asked, change = "a status that the evaluations bear out", "let it say aborted, or train on"
        if len(runs) > 1:
            change += ": a run that owns up to having missed the target may be left out as the slowest"
        yield _finding("fail", "compliance", found, asked, source, change, run.path)
    others = [run for run in bad if run not in untrue]
    if others:
        broken = sorted({rule for run in others for rule in _broken_rules(run)})
        found = f"{len(others)} of {len(runs)} runs break rules: {', '.join(broken[:6])}"
        asked = "every run within the rules"
        change = "see the findings of the runs"
        yield _finding("fail", "compliance", found, asked, source, change, others[0].path)
    if bad and len(runs) > 1 and len({run.path for run in (*bad, *missed, *unread)}) <= rules.may_fail:
        said = "says success without reaching the target" if untrue else "breaks a rule other than the target"
        yield Finding(
            "note", "contradiction.one_bad_file", f"{len(bad)} run {said}",
            f"{TEXT}, Benchmark Results: a single run may miss the target; but {PACKAGE}:185 accepts "
            f"{rules.may_fail} file that breaks any rule", source, "followed: the rules' text", bad[0].path,
        )  # fmt: skip


def _broken_rules(run: Run) -> list[str]:
    """Rules that the run breaks and that it would not have by ending early alone; of `run.*` what was found."""
    broken = (f for f in run.findings if f.level == "fail" and not _early(f, run))
    return list(dict.fromkeys(f.found if f.rule.startswith("run.") else f.rule for f in broken))


def _unread(unread: Sequence[Run], runs: int) -> Finding:
    """Logs of which no official program can make a run: not the same as one that missed the target."""
    reasons = [next(f for f in run.findings if f.level == "fail") for run in unread]
    said = [f"{run.path.name}: {reason.found}" for run, reason in zip(unread, reasons, strict=True)]
    found = f"{len(unread)} of {runs} logs cannot be read as they are: {'; '.join(said[:4])}"
    asked = "every log whole: one that cannot be read is none that missed the target"
    source = f"{SEEDS}:62-92 (such a log has no seed), {PACKAGE}:196"
    return _finding("fail", "compliance", found, asked, source, reasons[0].change, unread[0].path)


def _missed(entry: Entry, missed: Sequence[Run], runs: int, rules: Ruleset) -> Iterable[Finding]:
    """Runs that count as not converged: those that say so, and those without a run_stop."""
    if not missed:
        return
    source = f"{TEXT}, Benchmark Results; {PACKAGE}:185"
    asked = f"at most {rules.may_fail} that did not converge"
    cut = [run for run in missed if run.status == "no run_stop"]
    said = f"{len(missed)} {'run' if len(missed) == 1 else 'runs'} did not converge"
    if cut:
        said = f"{len(missed)} {'run counts' if len(missed) == 1 else 'runs count'} as not converged"
        source += f"; {SUMMARIZER}:122-155, 386-391"
    found = f"{said}: {', '.join(map(_why_missed, missed[:4]))}"
    if len(missed) > rules.may_fail and runs > 1:
        yield _finding("fail", "not_converged", found, asked, source, "run them again", entry.path)
    elif runs > 1:
        yield _finding(
            "note", "not_converged", found, f"{asked}, counted as the slowest", source, "nothing", entry.path
        )
    elif cut:
        change = "let the run end, or get its whole log"
        yield _finding("fail", "not_converged", "the run has no run_stop", "one run_stop", source, change, entry.path)
    else:
        found = "the run did not converge"
        yield _finding("fail", "not_converged", found, "the target reached", source, "train on", entry.path)


def _why_missed(run: Run) -> str:
    """The log, and what is special about it."""
    if run.status != "no run_stop":
        return run.path.name
    reached = run.quality is not None and not any(f.rule.endswith(".target") for f in run.findings)
    though = ", though it reached the target: the official summarizer leaves it out too" if reached else ""
    return f"{run.path.name} has no run_stop{though}"


def _early(finding: Finding, run: Run) -> bool:
    return not run.converged and ENDED_EARLY.fullmatch(finding.rule) is not None


def _seeds(entry: Entry, runs: Sequence[Run], rules: Ruleset) -> Iterable[Finding]:
    runs = [run for run in runs if not run.broken]  # those have a finding of their own
    for run in runs:
        if run.seeds_odd:
            change = "log it with mllog, as a whole number"
            found, asked = f"{run.path.name}: {run.seeds_odd}", "a whole number, and where it was logged"
            yield _finding(rules.seeds, "seed", found, asked, f"{SEEDS}:62-79", change, run.path)
        several = [record for record, times in Counter(run.seeds).items() if times > 1]
        if several:
            file, line, seed = several[0]
            times = run.seeds.count(several[0])
            found = f"seed {seed} is logged {times} times in {run.path.name}, by {file}:{line}"
            asked = "each seed once: the official checker takes the second for that of another run"
            yield _finding("fail", "seed", found, asked, f"{SEEDS}:81-113", "let one process log it, once", run.path)
    without = [run.path.name for run in runs if run.seed is None and not run.seeds_odd]
    if without:
        names = ", ".join(without[:4])
        change = "log the seed of each run with mllog, key `seed`"
        found = f"no whole-numbered seed in {len(without)} runs: {names}"
        yield _finding(rules.seeds, "seed", found, "one seed a run", rules.seeds_source, change, entry.path)
        if rules.seeds != "fail":
            yield Finding(
                "note", "contradiction.seeds", found,
                f"{TEXT}, Random numbers: seeds from v4.1 on; but {PACKAGE}:196 asks for them in every round from 1.0",
                rules.seeds_source, "followed: the rules' text", entry.path,
            )  # fmt: skip
    taken: dict[tuple[str, str, int], str] = {}
    for run in runs:
        if run.seed is None:
            continue
        # the first seed wherever it was logged, any other by the line that logged it
        records = {("", "", run.seed), *run.seeds}
        if again := sorted(records & taken.keys()):
            found = f"seed {again[0][2]} in {taken[again[0]]} and {run.path.name}"
            asked, change = "a seed of its own in each run", "run one of them again with another seed"
            yield _finding("fail", "seed", found, asked, rules.seeds_source, change, run.path)
        for record in records:
            taken.setdefault(record, run.path.name)


def _tree(entry: Entry, runs: Sequence[Run], rules: Ruleset, division: str) -> Iterable[Finding]:
    """Where the result lies: organization, code, division."""
    if entry.description_path is None:
        return
    source = f"{PACKAGE}:56-110"
    root = entry.description_path.parent.parent
    code = root / "benchmarks" / (entry.benchmark or rules.benchmark)
    if not code.is_dir():
        found, asked = f"no benchmarks/{code.name}", "the code of each benchmark that has results"
        yield _finding("warn", "code", found, asked, f"{PACKAGE}:119", f"add {root.name}/benchmarks/{code.name}", root)
    described = (entry.description or {}).get("division")
    if described in ruleset.DIVISIONS and described != division:
        found = f"division {division} in the logs, {described} in {entry.description_path.name}"
        yield _finding("fail", "division", found, "one division", f"{PACKAGE}:89", "let them agree", entry.path)
    submitter = entry.organization
    orgs = {str(run.keys["submission_org"]) for run in runs if "submission_org" in run.keys}
    if submitter and orgs and orgs != {submitter}:
        found = f"submission_org {', '.join(sorted(orgs))} in the logs of {submitter}"
        asked, change = "one organization", "log submission_org as the description's submitter"
        yield _finding("warn", "organization", found, asked, source, change, entry.path)
    if entry.benchmark and entry.benchmark != rules.benchmark:
        found = f"logs of {rules.benchmark} in a directory {entry.benchmark}"
        asked, change = "results/SYSTEM/BENCHMARK", "move the logs"
        yield _finding("fail", "directory", found, asked, source, change, entry.path)


def _finding(level: Level, name: str, found: str, asked: str, source: str, change: str, path: Path) -> Finding:
    return Finding(level, f"result.{name}", found, asked, source, change, path)


__all__ = ["MINI", "Verdict", "check_result", "verdict"]
