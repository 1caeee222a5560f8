"""Rules as data: what the files may say, that they say what their sources say, and a round that is only data."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from score_logs import event, every, log_of, made
from timetrial.errors import UserError
from timetrial.results import make_rules, ruleset
from timetrial.results.check import judge
from timetrial.results.expressions import Seen, number, words
from timetrial.results.forms import FORMS

BENCHMARKS = {
    "v4.0": "bert dlrm_dcnv2 gpt3 resnet ssd unet3d stable_diffusion llama2_70b_lora gnn",
    "v4.1": "bert dlrm_dcnv2 gpt3 ssd stable_diffusion llama2_70b_lora gnn",
    "v5.0": "bert dlrm_dcnv2 retinanet stable_diffusion llama2_70b_lora rgat llama31_405b",
    "v5.1": "llama31_8b dlrm_dcnv2 retinanet flux1 llama2_70b_lora rgat llama31_405b",
    "v6.0": "llama31_8b dlrm_dcnv2 flux1 llama2_70b_lora llama31_405b gpt_oss_20b deepseekv3_671b",
    "v6.1": "llama31_8b flux1 llama2_70b_lora gpt_oss_20b deepseekv3_671b qwen35_397b_grpo dlrmv4",
}
"""Facts, loadgen_and_mllog.md section 2 and training_rounds.md section 4."""
RUNS = {"llama31_405b": 3, "deepseekv3_671b": 3, "qwen35_397b_grpo": 3, "gpt3": 3, "retinanet": 5, "ssd": 5}
RUNS |= {"resnet": 5, "unet3d": 40}


def test_every_round_has_its_benchmarks_and_their_runs() -> None:
    assert ruleset.rounds() == tuple(BENCHMARKS)
    for round_, names in BENCHMARKS.items():
        assert sorted(ruleset.benchmarks(round_)) == sorted(names.split())
        for name in names.split():
            rules = ruleset.load(round_, name)
            assert rules.runs == RUNS.get(name, 10)
            assert rules.may_fail == (4 if name == "unet3d" else 1)
            assert rules.official == f"{round_[1:]}.0"


def test_files_are_what_the_generator_makes(tmp_path: Path) -> None:
    shutil.copy(ruleset.RULES / "text.toml", tmp_path)
    for round_ in make_rules.ROUNDS:
        for path in make_rules.make(round_, tmp_path):
            assert path.read_text() == (ruleset.RULES / round_ / path.name).read_text()


def test_each_source_names_the_line_of_its_key() -> None:
    checked = 0
    for rules in every():
        for rule in rules.rules:
            match = re.fullmatch(r"mlperf-logging 4\.1\.68 compliance_checker/(\S+):(\d+)", rule.source)
            if match is None:
                continue
            lines = (make_rules.directory() / match[1]).read_text().splitlines()
            assert rule.key in lines[int(match[2]) - 1], rule
            for check in (*rule.checks, *rule.first, *rule.reached):
                file, line = check.source.split(" ")[-1].removeprefix("compliance_checker/").rsplit(":", 1)
                text = (make_rules.directory() / file).read_text().splitlines()[int(line) - 1]
                if check.form in ("equals", "at_most") and isinstance(check.parameters["value"], float):
                    assert re.search(r"[0-9]", text), check
            checked += 1
    assert checked > 1500


def test_a_few_figures_against_the_facts() -> None:
    def target(round_: str, benchmark: str) -> list[tuple[str, object]]:
        (rule,) = [r for r in ruleset.load(round_, benchmark).rules if r.reached]
        return [(check.form, check.parameters.get("value")) for check in rule.reached]

    assert target("v6.0", "llama31_8b")[0] == ("at_most", 3.3)
    assert target("v5.0", "llama31_405b")[0] == ("at_most", 5.6)
    assert target("v6.1", "gpt_oss_20b")[0] == ("at_most", 3.34)
    assert target("v6.0", "deepseekv3_671b")[0] == ("at_most", 3.6)
    assert target("v5.1", "rgat")[0] == ("at_least", 0.72)
    assert target("v5.0", "dlrm_dcnv2")[0] == ("at_least", 0.80275)
    assert target("v6.1", "qwen35_397b_grpo") == [("above", 0.69)]
    assert target("v4.0", "unet3d") == [("at_least", 0.908)]
    seen = Seen({"global_batch_size": 18432}, {}, {})
    (rate,) = [r for r in ruleset.load("v6.0", "deepseekv3_671b").rules if r.key == "opt_base_learning_rate"]
    assert number(rate.checks[0].parameters["value"], seen) == pytest.approx(0.000025456, abs=5e-10)  # the text's table


def test_new_keys_are_optional_in_60_and_mandatory_in_61() -> None:
    for name in ("lowest_numerical_precision_in_attn", "expert_parallelism", "micro_batch_size", "config_filename"):
        counts = {
            round_: {r.count for r in ruleset.load(round_, "llama31_8b").rules if r.key == name and r.level == "fail"}
            for round_ in ("v5.1", "v6.0", "v6.1")
        }
        assert counts == {"v5.1": set(), "v6.0": {"optional"}, "v6.1": {"exactly_one"}}


def test_expressions() -> None:
    seen = Seen({"global_batch_size": 1000}, {}, {})
    ceil = ["times", ["ceil", ["over", 18432, "global_batch_size"]], "global_batch_size"]
    assert number(ceil, seen) == 19000
    assert words(ceil) == "ceil(18432 / global_batch_size) * global_batch_size"
    assert number(["root", 16], seen) == 4
    assert words(["key", "opt_name"]) == "opt_name"


# ---- a round that is only data -----------------------------------------------------------------------------

ROUND = """
[round]
ruleset = "7.0.0"
benchmarks = ["newbench"]
[[common]]
key = "submission_division"
count = "exactly_one"
source = "training_7.0.0/common.yaml"
line = 3
check = [{form = "one_of", values = ["closed", "open"]}]
[[common]]
key = "run_start"
count = "exactly_one"
source = "training_7.0.0/common.yaml"
[[common]]
key = "run_stop"
count = "exactly_one"
source = "training_7.0.0/common.yaml"
check = [{form = "after", key = "run_start"}]
"""
BENCHMARK = """
[benchmark]
runs = 4
may_fail = 1
source = "the rules of v7.0"
[[closed]]
key = "global_batch_size"
count = "exactly_one"
source = "training_7.0.0/closed_newbench.yaml"
[[closed]]
key = "opt_base_learning_rate"
count = "exactly_one"
source = "training_7.0.0/closed_newbench.yaml"
check = [
  {form = "near", value = ["times", 3e-4, ["root", ["over", "global_batch_size", 64]]], within = 1e-9, line = 12},
]
[[closed]]
key = "eval_accuracy"
count = "at_least_one"
source = "training_7.0.0/closed_newbench.yaml"
reached = [{form = "at_most", value = 2.5, line = 20}]
"""


def new_round(root: Path, benchmark: str = BENCHMARK) -> Path:
    (root / "v7.0").mkdir(parents=True)
    (root / "v7.0" / "common.toml").write_text(ROUND)
    (root / "v7.0" / "newbench.toml").write_text(benchmark)
    return root


def test_a_new_round_is_a_change_of_data(tmp_path: Path) -> None:
    root = new_round(tmp_path)
    assert ruleset.rounds(root) == ("v7.0",)
    assert ruleset.benchmarks("v7.0", root) == ("newbench",)
    rules = ruleset.load("v7.0", "newbench", "closed", root)
    assert (rules.official, rules.runs) == ("7.0.0", 4)
    good = [event("submission_division", "closed"), event("global_batch_size", 256)]
    good += [event("opt_base_learning_rate", 6e-4), event("run_start"), event("eval_accuracy", 2.4), event("run_stop")]
    assert judge(log_of(good), rules) == ()
    (finding,) = judge(log_of([{**e, "value": 5e-4} if e["key"].startswith("opt") else e for e in good]), rules)
    assert finding.rule == "newbench.opt_base_learning_rate"
    assert finding.asked == "0.0003 * root(global_batch_size / 64) within 1e-09 = 0.0006"
    assert finding.source == "training_7.0.0/closed_newbench.yaml:12"
    (missed,) = judge(log_of([{**e, "value": 2.6} if e["key"] == "eval_accuracy" else e for e in good]), rules)
    assert (missed.rule, missed.found) == ("newbench.target", "eval_accuracy never got there: best 2.6, last 2.6")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('form = "near"', 'form = "nearby"', "unknown form 'nearby'; there are equals"),
        ("within = 1e-9, ", "", "form near needs within"),
        ('"root"', '"square"', "unknown operator 'square'; there are key, plus"),
        ('["over", "global_batch_size", 64]', '["over", 64]', "'over' takes 2 operands, not 1"),
        ('count = "at_least_one"', 'count = "some"', "count = 'some' is none of exactly_one"),
        ("runs = 4\n", "", r"\[benchmark\] with runs is missing"),
        ("[benchmark]", "[benchmark", "is no TOML"),
        ("reached =", "target =", "unknown entry 'target'"),
        ('source = "training_7.0.0/closed_newbench.yaml"\ncheck', "check", "a rule needs a source"),
    ],
)
def test_a_rule_file_that_says_something_else_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in BENCHMARK
    root = new_round(tmp_path, BENCHMARK.replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        ruleset.load("v7.0", "newbench", "closed", root)


def test_unknown_rounds_benchmarks_and_divisions_are_named() -> None:
    with pytest.raises(UserError, match=r"no rules for round 'v3\.1'; there are v4\.0, v4\.1"):
        ruleset.load("v3.1", "bert")
    with pytest.raises(UserError, match=r"llama31_405b is no benchmark of v6\.1; it has llama31_8b"):
        ruleset.load("v6.1", "llama31_405b")
    with pytest.raises(UserError, match="unknown division 'ajar'"):
        ruleset.load("v6.1", "llama31_8b", "ajar")


def test_a_log_made_from_the_rules_keeps_them() -> None:
    for rules in every():
        assert [f for f in judge(log_of(made(rules)), rules) if f.level == "fail"] == [], rules.benchmark


def test_the_document_names_every_contradiction_and_form() -> None:
    text = (Path(__file__).parents[1] / "docs" / "score-rules.md").read_text()
    names = {c.name for rules in every() for c in rules.contradictions} | {"one_bad_file", "seeds"}
    assert len(names) == 15
    for name in (*names, *FORMS):
        assert f"`{name}`" in text, name
