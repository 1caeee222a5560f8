"""The score of one result: olympic mean of its runs' times, times the convergence test's factor.

By mlperf-logging 4.1.68 result_summarizer.py (181-206, 337-433): the fastest and the slowest run are left out (unet3d:
four each), a run that did not converge counts as the slowest, the rest's mean is multiplied by the factor of
scaling.json. Where the official arithmetic gives no score (too few runs, too many that did not converge), there is
none here.

The factor is the one that the convergence test computes wherever there is a reference point, since the official package
checker writes just that, over what stood in scaling.json before (rcp_checker.py:460-496); all published results agree
with it. Without a test (open division, no reference) it is that of scaling.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from timetrial.results import convergence, rounds
from timetrial.results.records import Convergence, Finding, Level, Result, Run
from timetrial.results.tree import Entry

SUMMARIZER = "mlperf-logging 4.1.68 result_summarizer.py"
MINI = "_mini"
ALIASES = {"mask": "maskrcnn"}
"""Directory -> benchmark (result_summarizer.py:80)."""
SAME = 1e-6
"""Relative difference of two factors that are the same."""


def olympic_mean(times: Sequence[float], failed: int, rejected: int) -> float | None:
    """Mean of `times` without the `rejected` fastest and slowest; `failed` further runs, which have no time, are
    among the slowest. None where more failed than are left out, or where nothing is left."""
    if failed > rejected:
        return None
    counted = sorted(times)[rejected : len(times) - (rejected - failed)]
    return sum(counted) / len(counted) if counted else None


def benchmark_of(entry: Entry, runs: Sequence[Run]) -> str:
    """The benchmark: of the directory, else of the logs where they agree; empty where they do not."""
    if entry.benchmark:
        return ALIASES.get(entry.benchmark, entry.benchmark)
    named = {run.benchmark for run in runs if run.benchmark}
    return named.pop() if len(named) == 1 else ""


def round_of(entry: Entry, benchmark: str, runs: Sequence[Run]) -> tuple[str, Finding | None]:
    """The round, and a note where it was guessed; none, and a failure, where the path names one without rules."""
    if entry.round:
        return entry.round, None
    mlperf = "mlperf-logging 4.1.68 benchmark_meta.py"
    if entry.unknown_round and not benchmark.endswith(MINI) and entry.preset != "mini":
        found = f"the directory {entry.unknown_round} is of a round without rules here, so that there is no score"
        asked = f"one of {', '.join(rounds.rounds())}"
        change = "name the round whose rules hold with --round, or add its rules (docs/score-rules.md)"
        return "", _finding("fail", "unknown_round", found, asked, mlperf, change, entry.path)
    start = next((run.start_ms for run in runs if run.start_ms is not None), None)
    guessed = rounds.guess(benchmark.removesuffix(MINI), start)
    if guessed:
        found, change = f"no round in the path; taken for {guessed} by benchmark and date", "name it with --round"
    else:
        found, change = f"no round in the path, and none has {benchmark or 'this benchmark'}", "name it with --round"
    asked = "a directory such as v5.0 or training_results_v5.0 above, or --round"
    return guessed, _finding("note", "round", found, asked, mlperf, change, entry.path)


def division_of(entry: Entry, runs: Sequence[Run]) -> str:
    """closed or open: of the description, else of the logs; empty where neither says."""
    said = (entry.description or {}).get("division")
    if not isinstance(said, str) or not said:
        said = next((run.keys["submission_division"] for run in runs if "submission_division" in run.keys), "")
    return said.strip().lower() if isinstance(said, str) else ""


def size_of(entry: Entry) -> tuple[int | None, int | None]:
    """(accelerators, nodes) of the system's description; None where it does not say."""
    description = entry.description or {}
    nodes, each = _count(description.get("number_of_nodes")), _count(description.get("accelerators_per_node"))
    return (nodes * each if nodes is not None and each is not None else None), nodes


def score(entry: Entry, runs: Sequence[Run], refused: Collection[Path] = ()) -> Result:
    """The result of an entry's runs.

    `refused` are logs of runs that converged but that the official checker refuses. Its summarizer counts them as not
    converged, and so does this while they may be left out. Where they are more, the official summarizer has no score;
    here the score is what the runs would come to, with a finding of level `fail`.
    """
    findings = list(entry.findings)
    benchmark = benchmark_of(entry, runs)
    round_, guessed = round_of(entry, benchmark, runs) if runs else (entry.round, None)
    findings += [guessed] if guessed else []
    division = division_of(entry, runs)
    mini = benchmark.endswith(MINI) or entry.preset == "mini"
    rejected = convergence.rejected(benchmark)
    counted = [run for run in runs if run.converged and run.time_min is not None]
    accepted = [run for run in counted if run.path not in refused]
    if not mini and len(accepted) < len(counted):
        if len(runs) - len(accepted) > rejected:
            findings.append(_refused(entry, len(counted) - len(accepted), len(runs)))
        else:
            counted = accepted
    times = [run.time_min for run in counted if run.time_min is not None]
    failed = len(runs) - len(counted)
    unscaled = _mini_mean(times, failed) if mini else olympic_mean(times, failed, rejected)
    consistent = _consistent(entry, runs, findings)
    if mini and failed:
        found = f"no score: {failed} of {len(runs)} runs did not reach the target"
        source = "timetrial: a mini preset's score is the mean of runs that all reach it"
        findings.append(_finding("fail", "not_converged", found, "the target reached", source, "train on", entry.path))
    elif not mini and runs and unscaled is None:
        findings.append(_why_none(entry, runs, failed, rejected))
    gbs = _one({run.gbs for run in runs if run.gbs is not None})
    tested: Convergence | None = None
    if not mini and division != "open" and len(runs) > 2:
        tested = convergence.convergence_of(runs, benchmark, round_, gbs)
    if tested is not None and tested.passed is False:
        change = "look at the hyperparameters, or ask for a reference point (training_rules.adoc, RCP)"
        source = "mlperf-logging 4.1.68 rcp_checker.py:476-556"
        asked = "the reference's convergence"
        findings.append(_finding("fail", "convergence", tested.why, asked, source, change, entry.path))
    tested, factor = _factor(entry, tested, unscaled, findings)
    judged = bool(round_) or not (guessed and guessed.level == "fail")
    accelerators, nodes = size_of(entry)
    description = entry.description or {}
    result = Result(
        path=entry.path,
        round=round_,
        organization=entry.organization or _key(runs, "submission_org"),
        system=entry.system or _key(runs, "submission_platform"),
        benchmark=benchmark,
        division=division,
        accelerator=_text(description.get("accelerator_model_name")),
        accelerators=accelerators,
        nodes=nodes,
        gbs=gbs,
        score_min=unscaled * factor if unscaled is not None and factor is not None and consistent and judged else None,
        unscaled_min=unscaled if consistent else None,
        runs=_dropped(runs, counted, rejected, mini),
        convergence=tested,
        verdict="mini" if mini else "stands",
        findings=tuple(findings),
        system_name=_text(description.get("system_name")),
    )
    return dataclasses.replace(result, verdict=verdict(result))


def verdict(result: Result) -> Literal["stands", "fails", "unread", "mini"]:
    """What the findings make of a result: of the result itself any `fail`, of its runs more than may be left out."""
    if not any(run.time_min is not None or run.keys for run in result.runs):
        return "unread"
    if result.verdict == "mini":
        return "mini"
    bad = [run for run in result.runs if not run.converged or any(found.level == "fail" for found in run.findings)]
    allowed = convergence.rejected(result.benchmark) if len(result.runs) > 2 else 0
    failing = any(found.level == "fail" for found in result.findings)
    return "fails" if failing or len(bad) > allowed else "stands"


def _mini_mean(times: list[float], failed: int) -> float | None:
    """A mini preset has no number of runs to it: olympic from three on, else the mean; all must have converged."""
    if failed or not times:
        return None
    return olympic_mean(times, 0, 1) if len(times) > 2 else sum(times) / len(times)


def _consistent(entry: Entry, runs: Sequence[Run], findings: list[Finding]) -> bool:
    """Whether the runs are of one benchmark and each another run."""
    named = sorted({run.benchmark for run in runs if run.benchmark})
    source = "mlperf-logging 4.1.68 rcp_checker.py:174-187"
    if len(named) > 1:
        found = f"logs of {', '.join(named[:4])}"
        change = "keep one benchmark a directory"
        findings.append(_finding("fail", "benchmarks", found, "one benchmark", source, change, entry.path))
        return False
    seen: dict[tuple[int | None, int | None], Run] = {}
    for run in runs:
        moments = (run.start_ms, run.stop_ms)
        if None not in moments and moments in seen:
            found, asked = f"{run.path.name} and {seen[moments].path.name} are of one run", "each run once"
            rule = "training_policies training_rules.adoc (runs are independent)"
            findings.append(_finding("fail", "same_run", found, asked, rule, "give one log a run", run.path))
        seen.setdefault(moments, run)
    return True


def _refused(entry: Entry, refused: int, runs: int) -> Finding:
    found = (
        f"{refused} of {runs} runs break rules: the official summarizer gives no score; this is what they would score"
    )
    change = "see the findings of the runs"
    return _finding(
        "fail", "refused", found, "runs that the checker accepts", f"{SUMMARIZER}:122-138", change, entry.path
    )


def _why_none(entry: Entry, runs: Sequence[Run], failed: int, rejected: int) -> Finding:
    """Why there is no olympic mean."""
    if (len(runs) - failed <= rejected and failed <= rejected) or len(runs) <= 2 * rejected:
        found = f"no score: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, of which {failed} do not count"
        asked, change = f"more than {2 * rejected} runs", "score the directory of all runs"
        level: Level = "fail" if entry.kind == "benchmark" else "note"
        return _finding(level, "too_few", found, asked, f"{SUMMARIZER}:195-206", change, entry.path)
    found = f"no score: {failed} of {len(runs)} runs do not count (not converged, or refused by the checker)"
    asked, change = f"at most {rejected}", "run them again"
    return _finding("fail", "not_converged", found, asked, f"{SUMMARIZER}:386-412", change, entry.path)


def _factor(
    entry: Entry, tested: Convergence | None, unscaled: float | None, findings: list[Finding]
) -> tuple[Convergence | None, float | None]:
    """What the time is multiplied by (None where it cannot be known), and the test with its source."""
    computed = tested.scaling_factor if tested else 1.0
    source = "mlperf-logging 4.1.68 rcp_checker.py:460-496"
    if entry.scaling_path is None:
        if computed > 1 and unscaled is not None:
            found = f"no scaling.json, though the runs converge faster than the reference: {computed:.6f} was computed"
            change = "run the official package checker, which writes it; without it the official summarizer says "
            findings.append(
                _finding("warn", "scaling", found, "scaling.json", source, f"{change}{unscaled:.4f} min", entry.path)
            )
        return tested, computed
    if entry.scaling is None:  # the tree has a finding
        return tested, None
    known = tested is not None and tested.reference_mean is not None
    if known and abs(entry.scaling - computed) > SAME * computed:  # the package checker writes the file anew
        found = f"scaling.json is stale: it says {entry.scaling:.6f}, and the logs come to {computed:.6f}"
        change = "let the official package checker write it again; the score is by the logs, as it will be then"
        findings.append(_finding("warn", "scaling", found, f"{computed:.6f}", source, change, entry.scaling_path))
        return tested, computed
    if tested is not None:
        tested = dataclasses.replace(tested, scaling_factor=entry.scaling, scaling_source="scaling.json")
    return tested, entry.scaling


def _dropped(runs: Sequence[Run], counted: Sequence[Run], rejected: int, mini: bool) -> tuple[Run, ...]:
    """The runs, those left out of the mean marked."""
    order = sorted(counted, key=lambda run: run.time_min or 0.0)
    failed = len(runs) - len(counted)
    marks: dict[int, Literal["fastest", "slowest"]] = {}
    if len(runs) > 2 and failed <= rejected and not (mini and failed):
        marks |= {id(run): "slowest" for run in order[max(0, len(order) - (rejected - failed)) :]}
        marks |= {id(run): "fastest" for run in order[:rejected]}
        uncounted = {id(run) for run in runs} - {id(run) for run in counted}
        marks |= dict.fromkeys(uncounted, "slowest")
    return tuple(dataclasses.replace(run, dropped=marks.get(id(run), "")) for run in runs)


def _key(runs: Sequence[Run], key: str) -> str:
    return next((run.keys[key] for run in runs if isinstance(run.keys.get(key), str)), "")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    """A whole number of 0 or more as descriptions write it: "8" or 8."""
    text = str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _one(values: Collection[int]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None


def _finding(level: Level, rule: str, found: str, asked: str, source: str, change: str, path: Path) -> Finding:
    return Finding(level, f"score.{rule}", found, asked, source, change, path)
