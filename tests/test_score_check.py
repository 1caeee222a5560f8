"""One log against the rules: our verdict beside the official checker's, on logs broken one thing at a time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from score_logs import event, events_of, every, log_of, made, mutants, write
from test_mllog import run_log
from timetrial.errors import UserError
from timetrial.results import ruleset
from timetrial.results.check import check_run
from timetrial.results.official import Official
from timetrial.results.read import read
from timetrial.results.records import Finding
from timetrial.results.tree import find
from timetrial.workloads.workload import resolve

LOGS = Path(__file__).parents[2] / "shared" / "logs"
SAMPLE = 67
"""Every so manyeth mutant of those made from rules; a run over all 19,640 takes four minutes."""
SAMPLE_REAL = 31


@pytest.fixture(scope="module")
def official() -> Any:
    with Official() as tool:
        yield tool


def differs(official: Official, path: Path, round_: str) -> str:
    """Empty, or how our verdict and the official one differ without a contradiction being named."""
    theirs = official.log(path, f"{round_[1:]}.0")
    findings = check_run(read(path), round_)
    ours = not any(f.level == "fail" for f in findings)
    if ours == theirs.passed or any(f.rule.startswith("contradiction.") for f in findings):
        return ""
    return f"official {theirs.lines[:2]}, ours {[(f.rule, f.found) for f in findings if f.level == 'fail'][:3]}"


def test_same_verdict_as_the_official_checker_on_made_logs(tmp_path: Path, official: Official) -> None:
    path, count = tmp_path / "result_0.txt", 0
    everything = ((rules, *mutant) for rules in every() for mutant in mutants(made(rules), rules))
    for rules, what, events in itertools.islice(everything, 0, None, SAMPLE):
        wrong = differs(official, write(path, events), rules.round)
        assert not wrong, f"{rules.round} {rules.benchmark} {rules.division}, {what}: {wrong}"
        count += 1
    assert count > 250


@pytest.mark.skipif(not LOGS.is_dir(), reason="no published logs here")
def test_same_verdict_as_the_official_checker_on_published_logs(tmp_path: Path, official: Official) -> None:
    count = 0
    for entry in find([LOGS]):
        for log in entry.logs:
            assert not differs(official, log, entry.round), log
            count += 1
    assert count == 96


@pytest.mark.skipif(not LOGS.is_dir(), reason="no published logs here")
def test_same_verdict_as_the_official_checker_on_published_logs_that_were_broken(
    tmp_path: Path, official: Official
) -> None:
    path, count = tmp_path / "result_0.txt", 0
    for entry in find([LOGS]):
        rules = ruleset.load(entry.round, entry.benchmark)
        for what, events in itertools.islice(mutants(events_of(read(entry.logs[0])), rules), 0, None, SAMPLE_REAL):
            wrong = differs(official, write(path, events), entry.round)
            assert not wrong, f"{entry.path.name}, {what}: {wrong}"
            count += 1
    assert count > 100


@pytest.mark.skipif(not LOGS.is_dir(), reason="no published logs here")
def test_published_logs_stand_but_for_one_that_did_not_end() -> None:
    failed = {}
    for entry in find([LOGS]):
        for log in entry.logs:
            fails = [f.rule for f in check_run(read(log), entry.round, entry.benchmark, "closed") if f.level == "fail"]
            if fails:
                failed[f"{entry.system}/{log.name}"] = fails
    assert failed == {"tinybox_green/result_4.txt": ["retinanet.run_stop", "retinanet.target"]}


# ---- single findings ---------------------------------------------------------------------------------------


def findings(round_: str, benchmark: str, changes: dict[str, Any], division: str = "closed") -> list[Finding]:
    rules = ruleset.load(round_, benchmark, division)
    events = [{**e, "value": changes.get(e["key"], e["value"])} for e in made(rules)]
    return list(check_run(log_of(events), round_))


def test_a_finding_says_what_where_and_what_to_change() -> None:
    (found,) = [f for f in findings("v6.0", "llama31_8b", {"opt_adamw_epsilon": 1e-8}) if f.level == "fail"]
    assert found.rule == "llama31_8b.opt_adamw_epsilon"
    assert (found.found, found.asked) == ("opt_adamw_epsilon = 1e-08", "1e-05")
    assert found.source == "mlperf-logging 4.1.68 compliance_checker/training_6.0.0/closed_llama31_8b.yaml:54"
    assert found.change == "run with opt_adamw_epsilon 1e-05"
    assert found.line is not None


def test_learning_rate_of_405b_at_a_batch_size_that_no_float_meets(tmp_path: Path, official: Official) -> None:
    rules = ruleset.load("v6.0", "llama31_405b")
    base = {"global_batch_size": 1984, "opt_base_learning_rate": 8e-5 * 1984 / 1152}
    base["opt_learning_rate_warmup_steps"] = -(-8000 * 1152 // 1984)
    base["opt_learning_rate_decay_steps"] = -(-1_200_000 * 1152 // 1984) - base["opt_learning_rate_warmup_steps"]
    events = [{**e, "value": base.get(e["key"], e["value"])} for e in made(rules)]
    path = write(tmp_path / "result_0.txt", events)
    assert not official.log(path, "6.0.0").passed
    found = check_run(read(path), "v6.0")
    assert [f.level for f in found if f.rule == "contradiction.405b_learning_rate"] == ["warn"]
    assert not [f for f in found if f.level == "fail"]
    rounded = [{**e, "value": round(e["value"], 8)} if e["key"] == "opt_base_learning_rate" else e for e in events]
    assert [f.rule for f in check_run(log_of(rounded), "v6.0") if f.level == "fail"] == [
        "llama31_405b.opt_base_learning_rate"
    ]


def test_what_the_text_asks_beyond_is_a_warning() -> None:
    changes = {"opt_gradient_clip_norm": 1.0, "lora_alpha": 16, "opt_adamw_weight_decay": 0.1}
    found = findings("v6.0", "llama2_70b_lora", changes)
    assert {f.rule for f in found if f.level == "warn"} >= {f"llama2_70b_lora.{key}" for key in changes}
    assert not [f for f in found if f.level == "fail"]
    (alpha,) = [f for f in found if f.rule == "llama2_70b_lora.lora_alpha"]
    assert alpha.source == "training_rules.adoc, Hyperparameters, row llama2_70b_lora lora_alpha"


@pytest.mark.parametrize(("value", "named"), [(8e-5, []), (4e-5, []), (1e-5, ["warn"])])
def test_end_learning_rate_and_its_exception_in_v60(value: float, named: list[str]) -> None:
    found = findings("v6.0", "llama31_8b", {"opt_base_learning_rate": 8e-4, "opt_end_learning_rate": value})
    assert [f.level for f in found if f.rule == "contradiction.end_learning_rate"] == named
    assert not [f for f in found if f.level == "fail"]


def test_an_aborted_run_that_met_the_target_once_fails_here_and_passes_there() -> None:
    rules = ruleset.load("v6.0", "llama31_8b")
    *events, stop = made(rules)
    found = check_run(log_of([*events, {**stop, "metadata": {"status": "aborted"}}]), "v6.0")
    assert {("llama31_8b.run_stop", "fail"), ("contradiction.run_status", "note")} <= {(f.rule, f.level) for f in found}


def test_initialisation_longer_than_the_division_allows(tmp_path: Path) -> None:
    for division, minutes, fails in (("closed", 29, 0), ("closed", 31, 1), ("open", 239, 0), ("open", 241, 1)):
        rules = ruleset.load("v6.0", "gpt_oss_20b", division)
        log = read(write(tmp_path / "result_0.txt", made(rules), late_ms=minutes * 60_000))
        late = [f for f in check_run(log, "v6.0") if f.rule == "gpt_oss_20b.init_stop"]
        assert len(late) == fails, (division, minutes)


def test_keys_of_61_in_60_and_61() -> None:
    rules = ruleset.load("v6.1", "llama31_8b")
    events = [e for e in made(rules) if e["key"] != "tensor_parallelism"]
    assert [f.rule for f in check_run(log_of(events), "v6.1") if f.level == "fail"] == ["llama31_8b.tensor_parallelism"]
    assert not [f for f in check_run(log_of(events), "v6.0") if f.level == "fail"]
    odd = [{**e, "value": "mxfp6"} if e["key"].endswith("_in_attn") else e for e in made(rules)]
    assert [f.level for f in check_run(log_of(odd), "v6.1") if f.rule.endswith("_in_attn")] == ["warn"]
    assert [f.level for f in check_run(log_of(odd), "v6.0") if f.rule.endswith("_in_attn")] == ["fail"]


def test_evaluations_between_the_points_of_the_rules() -> None:
    rules = ruleset.load("v6.0", "llama31_8b")

    def at(*samples: int) -> list[str]:
        events = [e for e in made(rules) if e["key"] != "eval_accuracy"]
        more = [event("eval_accuracy", 3.2, samples_count=s) for s in samples]
        found = check_run(log_of([*events[:-1], *more, events[-1]]), "v6.0")
        return [f.rule for f in found if f.rule.endswith("evaluation_points")]

    assert at(12288, 24576, 36864) == []
    assert at(12288 - 64, 24576 - 64) == []  # counted from 0, a batch earlier
    assert at(12288, 20000) == ["llama31_8b.evaluation_points"]
    assert at(24576, 36864) == ["llama31_8b.evaluation_points"]


def test_log_of_another_benchmark_or_division_than_its_directory() -> None:
    rules = ruleset.load("v6.0", "llama31_8b")
    found = check_run(log_of(made(rules)), "v6.0", "gpt_oss_20b", "open")
    assert {"benchmark", "division"} <= {f.rule for f in found if f.level == "warn"}


def test_benchmark_and_round_without_rules() -> None:
    rules = ruleset.load("v6.0", "llama31_405b")
    (found,) = check_run(log_of(made(rules)), "v6.1")
    assert (found.level, found.rule) == ("fail", "submission_benchmark")
    assert found.asked.startswith("llama31_405b is no benchmark of v6.1; it has llama31_8b")
    with pytest.raises(UserError, match=r"no rules for round 'v9\.9'"):
        check_run(log_of(made(rules)), "v9.9")
    (empty,) = check_run(log_of([]), "v6.1")
    assert empty.level == "fail"


def test_a_division_that_is_none_is_checked_as_closed() -> None:
    rules = ruleset.load("v6.0", "llama31_8b")
    events = [{**e, "value": "ajar"} if e["key"] == "submission_division" else e for e in made(rules)]
    fails = [f.rule for f in check_run(log_of(events), "v6.0", "llama31_8b", "ajar") if f.level == "fail"]
    assert fails == ["llama31_8b.submission_division"]


def test_metadata_of_any_type_is_a_finding_never_an_error() -> None:
    for value in (None, "x", [], {}, True, float("nan"), 10**400):
        for rules in (ruleset.load("v5.0", "stable_diffusion"), ruleset.load("v6.1", "qwen35_397b_grpo")):
            events = [{**e, "metadata": dict.fromkeys(e["metadata"], value)} for e in made(rules)]
            assert any(f.level == "fail" for f in check_run(log_of(events), rules.round))


def test_values_of_any_type_are_findings_never_errors() -> None:
    for value in (None, "x", [], {}, [1], True, float("nan"), float("inf"), 10**400):
        for rules in (ruleset.load("v6.1", "dlrmv4"), ruleset.load("v6.0", "llama31_405b")):
            events = made(rules)
            for one in events:
                check_run(log_of([{**e, "value": value} if e is one else e for e in events]), rules.round)
            broken = [{**e, "value": value} for e in events]
            assert any(f.level == "fail" for f in check_run(log_of(broken), rules.round, rules.benchmark, "closed"))


# ---- mini presets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama31_8b", "llama31_405b", "llama2_70b_lora"])
def test_mini_presets_have_rules_of_their_own(tmp_path: Path, name: str) -> None:
    config = resolve(name, "mini")
    log = run_log(tmp_path / "result_0.txt", config)
    assert check_run(read(log), "v6.0") == ()
    rules = ruleset.load(ruleset.MINI, name)
    (target,) = [r for r in rules.rules if r.reached]
    assert target.reached[0].parameters["value"] == config.evaluation.target
    missed = run_log(tmp_path / "result_1.txt", config, [config.evaluation.target + 0.01])
    assert {f.rule for f in check_run(read(missed), "v6.0") if f.level == "fail"} == {
        f"{name}.run_stop",
        f"{name}.target",
    }
    late = log.read_text().splitlines()
    moved = [line for line in late if "init_stop" not in line] + [line for line in late if "init_stop" in line]
    swapped = tmp_path / "result_2.txt"
    swapped.write_text("\n".join(moved) + "\n")
    assert {f.rule for f in check_run(read(swapped), "v6.0")} == {f"{name}.init_stop", f"{name}.run_start"}


def test_official_preset_that_says_it_is_none(tmp_path: Path) -> None:
    log = run_log(tmp_path / "result_0.txt", resolve("llama31_8b", "official", "v6.0"))
    (found,) = check_run(read(log), "v6.0")
    assert (found.level, found.rule) == ("fail", "notice")
