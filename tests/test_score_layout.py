"""Runs taken together: counts, seeds, hyperparameters, names, directories, descriptions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from timetrial.results import ruleset
from timetrial.results.check import check_result, check_run, verdict
from timetrial.results.description import check_description
from timetrial.results.read import read
from timetrial.results.records import Finding, Run
from timetrial.results.runs import run_of
from timetrial.results.tree import Entry, find

LOGS = Path(__file__).parents[2] / "shared" / "logs"
RULES = ruleset.load("v6.0", "llama31_8b")
DESCRIPTION: dict[str, Any] = {
    **dict.fromkeys(RULES.fields, ""),
    **{"division": "closed", "status": "Preview", "submitter": "Acme", "number_of_nodes": "1"},
    "accelerators_per_node": "8",
}


def run(number: int, **changes: Any) -> Run:
    keys = {"submission_benchmark": "llama31_8b", "submission_division": "closed", "submission_org": "Acme"}
    keys |= {"opt_base_learning_rate": 8e-4, **changes.pop("keys", {})}
    path = Path(f"result_{number}.txt")
    base = Run(path, True, "success", 80.0, 172032.0, 3.29, 32, 100 + number, keys=keys, benchmark="llama31_8b")
    return dataclasses.replace(base, **changes)


def entry(tmp_path: Path, count: int = 10, **changes: Any) -> Entry:
    root = tmp_path / "Acme"
    path = root / "results" / "box" / "llama31_8b"
    (root / "benchmarks" / "llama31_8b").mkdir(parents=True, exist_ok=True)
    logs = tuple(path / f"result_{i}.txt" for i in range(count))
    base = Entry(path, "benchmark", logs, "v6.0", "path", "Acme", "box", "llama31_8b", DESCRIPTION)
    return dataclasses.replace(base, **{"description_path": root / "systems" / "box.json", **changes})


def rules(findings: tuple[Finding, ...], level: str = "fail") -> list[str]:
    return [f.rule for f in findings if f.level == level]


def test_a_result_with_nothing_amiss(tmp_path: Path) -> None:
    runs = [run(i) for i in range(10)]
    found = check_result(entry(tmp_path), runs)
    assert found == ()
    assert verdict(found, runs) == "stands"


@pytest.mark.parametrize("count", [9, 11])
def test_number_of_runs(tmp_path: Path, count: int) -> None:
    runs = [run(i) for i in range(count)]
    found = check_result(entry(tmp_path, count), runs)
    assert rules(found) == ["result.count"]
    assert found[0].found == f"{count} runs"
    assert verdict(found, runs) == "fails"


def test_a_single_log_is_not_held_to_the_number_of_runs(tmp_path: Path) -> None:
    found = check_result(entry(tmp_path, 1, kind="log", description_path=None), [run(0)])
    assert [(f.level, f.rule) for f in found] == [("warn", "result.count")]


def test_seeds(tmp_path: Path) -> None:
    same = [run(i, seed=100 + i % 9) for i in range(10)]
    (found,) = check_result(entry(tmp_path), same)
    assert (found.rule, found.found) == ("result.seed", "seed 100 in result_0.txt and result_9.txt")
    none = [run(i, seed=None) if i == 3 else run(i) for i in range(10)]
    assert rules(check_result(entry(tmp_path), none)) == ["result.seed"]
    opened = [run(i, seed=None, keys={"submission_division": "open"}) for i in range(10)]
    open_entry = entry(tmp_path, description={**DESCRIPTION, "division": "open"})
    assert "result.seed" not in rules(check_result(open_entry, opened))


def test_seeds_in_v40_are_asked_by_the_checker_alone(tmp_path: Path) -> None:
    keys = {"submission_benchmark": "bert"}
    runs = [run(i, seed=None, benchmark="bert", keys=keys) for i in range(10)]
    found = check_result(entry(tmp_path, round="v4.0", benchmark="bert"), runs)
    assert rules(found) == []
    assert "contradiction.seeds" in rules(found, "note")


def test_hyperparameters_and_batch_sizes_over_runs(tmp_path: Path) -> None:
    one = [run(i, keys={"opt_base_learning_rate": 1e-3}) if i == 4 else run(i) for i in range(10)]
    found = check_result(entry(tmp_path), one)
    assert [(f.level, f.found) for f in found] == [("warn", "opt_base_learning_rate differs: 0.0008, 0.001")]
    sizes = [run(i, gbs=64) if i == 4 else run(i) for i in range(10)]
    assert rules(check_result(entry(tmp_path), sizes)) == ["result.global_batch_size"]


def test_runs_that_did_not_converge(tmp_path: Path) -> None:
    missed = Finding("fail", "llama31_8b.target", "", "", "", "")

    def runs(*which: int) -> list[Run]:
        return [run(i, converged=False, findings=(missed,)) if i in which else run(i) for i in range(10)]

    one = check_result(entry(tmp_path), runs(2))
    assert [(f.level, f.rule) for f in one] == [("note", "result.not_converged")]
    assert rules(check_result(entry(tmp_path), runs(2, 3))) == ["result.not_converged"]


def test_one_run_that_breaks_another_rule(tmp_path: Path) -> None:
    broken = Finding("fail", "llama31_8b.opt_adamw_epsilon", "", "", "", "")
    runs = [run(i, findings=(broken,)) if i == 2 else run(i) for i in range(10)]
    found = check_result(entry(tmp_path), runs)
    assert rules(found) == ["result.compliance"]
    assert rules(found, "note") == ["contradiction.one_bad_file"]


def test_names_and_other_files(tmp_path: Path) -> None:
    odd = entry(tmp_path)
    odd = dataclasses.replace(odd, logs=(*odd.logs[:9], odd.path / "result_final.txt"), others=(odd.path / "x.csv",))
    runs = [run(i) for i in range(10)]
    assert rules(check_result(odd, runs), "warn") == ["result.names", "result.others"]
    gap = dataclasses.replace(entry(tmp_path), logs=tuple(Path(f"result_{i}.txt") for i in range(1, 11)))
    (found,) = check_result(gap, runs)
    assert found.asked == "result_0.txt to result_9.txt"


def test_tree_around_the_result(tmp_path: Path) -> None:
    runs = [run(i, keys={"submission_org": "Other"}) for i in range(10)]
    bare = entry(tmp_path, description={**DESCRIPTION, "division": "open"})
    (tmp_path / "Acme" / "benchmarks" / "llama31_8b").rmdir()
    found = check_result(bare, runs)
    assert rules(found) == ["result.division"]
    assert rules(found, "warn") == ["result.code", "result.organization"]


def test_mini_runs_are_mini_and_never_stand(tmp_path: Path) -> None:
    runs = [run(0, benchmark="llama31_8b_mini", keys={"notice": "mini preset: not an MLPerf result"})]
    found = check_result(entry(tmp_path, 1, kind="run", preset="mini", benchmark=""), runs)
    assert found == ()
    assert verdict(found, runs) == "mini"


def test_result_of_no_known_round(tmp_path: Path) -> None:
    assert rules(check_result(entry(tmp_path, round=""), [run(i) for i in range(10)])) == ["result.round"]


@pytest.mark.skipif(not LOGS.is_dir(), reason="no published logs here")
def test_every_published_directory_stands() -> None:
    count = 0
    for one in find([LOGS]):
        runs = []
        for path in one.logs:
            log = read(path)
            made = run_of(log, one)
            more = check_run(log, one.round, one.benchmark, "closed")
            runs.append(dataclasses.replace(made, findings=(*made.findings, *more)))
        found = check_result(one, runs)
        assert verdict(found, runs) == "stands", [f for f in found if f.level == "fail"]
        assert [f.rule for f in found if f.rule.startswith("description")] == []
        count += 1
    assert count == 12


# ---- descriptions ------------------------------------------------------------------------------------------


def described(**changes: Any) -> list[tuple[str, str]]:
    values = {name: value for name, value in {**DESCRIPTION, **changes}.items() if value is not None}
    return [(f.level, f.rule) for f in check_description(values, Path("box.json"), RULES)]


def test_description() -> None:
    assert described() == []
    lacking = sorted(described(cooling=None, framework=None))
    assert lacking == [("fail", "description.cooling"), ("fail", "description.framework")]
    assert described(accelerators_per_node=8) == [("fail", "description.accelerators_per_node")]
    assert described(status="on sale") == [("fail", "description.status")]
    assert described(number_of_nodes="many") == [("warn", "description.number_of_nodes")]
    assert described(division="ajar") == [("warn", "description.division")]
    old = ruleset.load("v4.0", "bert")
    assert [f.level for f in check_description({**DESCRIPTION, "status": "onprem"}, None, old)] == ["warn"]


@pytest.mark.skipif(not LOGS.is_dir(), reason="no published logs here")
def test_published_descriptions() -> None:
    for path in LOGS.glob("*/*/systems/*.json"):
        assert check_description(json.loads(path.read_text()), path, RULES) == ()
