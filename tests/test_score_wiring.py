"""How the parts hang together: the package's names, rounds of rule data, one source of targets, what is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import score_logs
from score_runs import LOGS, needs_logs
from timetrial.results import rounds, ruleset
from timetrial.results.check import check_run, refused
from timetrial.results.lookup import benchmark_of
from timetrial.results.lookup import rows as table_rows
from timetrial.results.official import check


def test_the_package_is_light_and_its_names_are_what_they_say() -> None:
    code = """
import sys, json
import timetrial.results as results
light = sorted(m for m in sys.modules if m.split(".")[0] in ("numpy", "scipy", "torch", "rich", "mlperf_logging"))
import timetrial.results.scoring, timetrial.results.comparison, timetrial.results.lookup
from timetrial.results.scoring import olympic_mean
from timetrial.results import compare, published, score, score_all, Finding, Result, Run
names = {n: type(getattr(results, n)).__name__ for n in results.__all__}
heavy = sorted(m for m in sys.modules if m.startswith(("torch", "timetrial.train", "timetrial.predict")))
print(json.dumps([light, names, heavy, Result.__name__, callable(score)]))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    light, names, heavy, result, called = json.loads(done.stdout)
    assert (light, heavy, result, called) == ([], [], "Result", True)
    assert {names[name] for name in ("score", "compare", "published", "score_all", "one", "explain")} == {"function"}
    assert "module" not in names.values()


def test_a_name_that_is_not_there() -> None:
    from timetrial import results

    with pytest.raises(AttributeError, match="no attribute 'scores'"):
        _ = results.scores  # type: ignore[attr-defined]
    assert "score" in dir(results)


@needs_logs
def test_scored_from_python() -> None:
    from timetrial import results

    (ours,) = results.score(LOGS / "v5.1" / "AMD" / "results" / "MI355X_EPYC_9575F_pytorch" / "llama31_8b")
    theirs = results.one("published:v5.1/AMD/llama31_8b")
    assert results.compare([theirs, ours]).pairs[0].speedup == pytest.approx(1, abs=1e-5)


def test_a_round_that_has_rules_here_is_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounds.rounds() == ruleset.rounds()
    monkeypatch.setattr(ruleset, "rounds", lambda: ("v6.1", "v7.0"))
    monkeypatch.setattr(ruleset, "benchmarks", lambda round_: ("fusion",) if round_ == "v7.0" else ())
    for cached in (rounds.rounds, rounds.benchmarks, rounds.known_benchmarks):
        cached.cache_clear()
    try:
        assert rounds.rounds()[-1] == "v7.0"
        assert rounds.named("7.0") == "v7.0"
        assert rounds.benchmarks("v7.0") == {"fusion"}
        assert "fusion" in rounds.known_benchmarks()
    finally:
        for cached in (rounds.rounds, rounds.benchmarks, rounds.known_benchmarks):
            cached.cache_clear()


def test_the_table_of_targets_agrees_with_the_rules() -> None:
    compared = 0
    for row in table_rows("targets.csv"):
        name = row["benchmark"]
        known = ruleset.benchmarks(row["round"]) if row["round"] in ruleset.rounds() else ()
        found = next((b for b in known if benchmark_of(b) == benchmark_of(name)), None)
        if found is None:
            continue
        bounds = [
            check.parameters["value"]
            for rule in ruleset.load(row["round"], found).rules
            if rule.level == "fail" and rule.key == "eval_accuracy"
            for check in rule.reached
            if check.form in ("at_least", "at_most", "above")
        ]
        try:
            stated = float(row["target"])
        except ValueError:
            continue
        if bounds:
            assert stated in bounds, row
            compared += 1
    assert compared >= 25


def test_a_contradiction_hides_no_other_failure(tmp_path: Path) -> None:
    """405B's learning rate is followed by the formula; the official checker compares floats."""
    rules = ruleset.load("v5.0", "llama31_405b")
    events = score_logs.made(rules)
    rate = next(event for event in events if event["key"] == "opt_base_learning_rate")
    rate["value"] *= 1 + 1e-12
    seen = {}
    for name, epsilon in (("rate alone", 1e-5), ("rate and epsilon", 1e-8)):
        for event in events:
            event["value"] = epsilon if event["key"] == "opt_adamw_epsilon" else event["value"]
        path = score_logs.write(tmp_path / f"{epsilon}.txt", events)
        log = dataclasses.replace(score_logs.log_of(events), path=path)
        found = check_run(log, "v5.0", "llama31_405b")
        assert any(finding.rule == "contradiction.405b_learning_rate" for finding in found)
        fails = any(finding.level == "fail" for finding in found)
        seen[name] = (fails, refused(log, found, "v5.0", "llama31_405b"), check(path, "5.0.0").passed)
    assert seen == {"rate alone": (False, True, False), "rate and epsilon": (True, True, False)}


def test_where_our_rule_fails_and_the_checker_does_not(tmp_path: Path) -> None:
    rules = ruleset.load("v5.1", "llama31_8b")
    events = score_logs.made(rules)
    events[-1]["metadata"]["status"] = "aborted"  # the checker takes any status
    log = score_logs.log_of(events)
    found = check_run(log, "v5.1", "llama31_8b")
    assert {f.rule for f in found if f.level == "fail"} == {"llama31_8b.run_stop"}
    assert not refused(log, found, "v5.1", "llama31_8b")
    assert check(score_logs.write(tmp_path / "log.txt", events), "5.1.0").passed
