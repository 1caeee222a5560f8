"""The official tools underneath: one process, word for word, and each of their defects met."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from score_logs import made, write
from timetrial.errors import UserError
from timetrial.results import official, ruleset
from timetrial.results.official import Official

LOGS = Path(__file__).parents[2] / "shared" / "logs"
RULES = ruleset.load("v6.0", "llama31_8b")


@pytest.fixture(scope="module")
def tool() -> object:
    with Official() as one:
        yield one


def log(path: Path, **changes: object) -> Path:
    return write(path, [{**e, "value": changes.get(e["key"], e["value"])} for e in made(RULES)])


def test_verdict_word_for_word(tmp_path: Path, tool: Official) -> None:
    good = tool.log(log(tmp_path / "result_0.txt"), "6.0.0")
    assert (good.passed, good.lines) == (True, ("SUCCESS",))
    bad = tool.log(log(tmp_path / "result_1.txt", opt_adamw_epsilon=1e-8), "6.0.0")
    assert bad.lines[0] == "FAILED"
    assert bad.messages[0].startswith("CHECK for 'opt_adamw_epsilon' failed in line ")
    assert "failed test:  v['value'] == 1e-05" in bad.messages[0]


def test_a_crash_says_so_and_the_next_log_is_not_touched_by_it(tmp_path: Path, tool: Official) -> None:
    good = log(tmp_path / "result_0.txt")
    text = log(tmp_path / "result_1.txt", eval_accuracy="low")
    unknown = log(tmp_path / "result_2.txt", submission_benchmark="llama4")
    division = log(tmp_path / "result_3.txt", submission_division="ajar")
    crashed, lacking, ajar = (tool.log(path, "6.0.0") for path in (text, unknown, division))
    assert crashed.messages[-1].startswith("checker crashed: TypeError")
    assert lacking.messages[0].startswith("llama4 is no benchmark of ruleset 6.0.0; it has deepseekv3_671b")
    assert ajar.messages[0] == "ajar is no division of ruleset 6.0.0"
    assert tool.log(good, "6.0.0").passed


def test_many_logs_take_one_process(tmp_path: Path, tool: Official) -> None:
    path = log(tmp_path / "result_0.txt")
    tool.log(path, "6.0.0")
    began = time.monotonic()
    assert all(v.passed for v in tool.logs([path] * 50, "6.0.0"))
    assert time.monotonic() - began < 5  # one process a log took 35 s


def test_nothing_is_written_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log(tmp_path / "result_0.txt")
    monkeypatch.chdir(tmp_path)
    with Official() as tool:
        tool.log(path, "6.0.0")
        tool.convergence(tmp_path, "6.0.0")
    assert os.listdir(tmp_path) == ["result_0.txt"]


def test_a_log_that_is_too_large_or_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "LARGEST", 100)
    (said,) = official.check(log(tmp_path / "result_0.txt"), "6.0.0").messages
    assert said.startswith("not checked: 0 MiB")
    with pytest.raises(UserError, match="cannot read the result log"):
        official.check(tmp_path / "none.txt", "6.0.0")
    with pytest.raises(UserError, match="cannot read the result log"):
        official.check(tmp_path, "6.0.0")
    with pytest.raises(UserError, match=r"unknown ruleset '6\.2\.0'; there are 0\.6\.0"):
        official.check(tmp_path / "result_0.txt", "6.2.0")


def test_a_process_that_hangs_or_dies_is_a_verdict_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log(tmp_path / "result_0.txt")
    worker = tmp_path / "worker.py"
    with Official(timeout_s=0.5) as tool:
        worker.write_text("import time; time.sleep(60)")
        monkeypatch.setattr(official, "WORKER", worker)
        assert tool.log(path, "6.0.0").messages == ("checker crashed: gave no answer within 0.5 s",)
        worker.write_text("raise SystemExit('no pandas here')")
        tool.timeout_s = 20
        assert tool.log(path, "6.0.0").messages == ("checker crashed: ended without an answer: no pandas here",)
        monkeypatch.undo()
        assert tool.log(path, "6.0.0").passed
    tool.close()


def description(path: Path, **changes: object) -> Path:
    values = {**dict.fromkeys(ruleset.load("v6.0", "llama31_8b").fields, ""), "division": "closed"}
    path.write_text(json.dumps({**values, "status": "Available cloud", **changes}))
    return path


def test_description_with_numbers_does_not_crash_the_checker(tmp_path: Path, tool: Official) -> None:
    assert tool.description(description(tmp_path / "a.json", accelerators_per_node=8), "6.0.0").lines == ("SUCCESS",)
    bad = tool.description(description(tmp_path / "b.json", status="on sale"), "6.0.0")
    assert not bad.passed
    assert "Field status contains a non valid value: on sale" in bad.messages[0]
    (tmp_path / "c.json").write_text("{")
    assert "checker crashed" in tool.description(tmp_path / "c.json", "6.0.0").messages[-1]


def test_package_of_an_organization(tmp_path: Path, tool: Official) -> None:
    results = tmp_path / "org" / "results" / "sys" / "llama31_405b"
    results.mkdir(parents=True)
    (tmp_path / "org" / "systems").mkdir()
    description(tmp_path / "org" / "systems" / "sys.json", accelerators_per_node=4)
    rules = ruleset.load("v6.0", "llama31_405b")
    for run in range(3):
        events = [{**e, "value": run} if e["key"] == "seed" else e for e in made(rules)]
        for e in events:
            if "samples_count" in e["metadata"]:
                e["metadata"]["samples_count"] += 320_000
        write(results / f"result_{run}.txt", events)
    (results / "scaling.json").write_text('{"scaling_factor": 1.5}')
    assert tool.package(tmp_path / "org", "6.0.0").passed
    assert (results / "scaling.json").read_text() == '{"scaling_factor": 1.5}'
    (results / "result_2.txt").write_text((results / "result_1.txt").read_text())
    twice = tool.package(tmp_path / "org", "6.0.0")
    assert not twice.passed
    assert any("Seed checker failed" in message for message in twice.messages)
    (results / "package_checker_params").write_text("seed-checker-bypass\nrcp-bypass\n")
    assert tool.package(tmp_path / "org", "6.0.0").passed
    (tmp_path / "org" / "systems" / "sys.json").unlink()
    assert "checker crashed: FileNotFoundError" in tool.package(tmp_path / "org", "6.0.0").messages[-1]


@pytest.mark.skipif(not LOGS.is_dir(), reason="no published logs here")
def test_convergence_of_a_published_result(tool: Official) -> None:
    directory = LOGS / "v5.0/NVIDIA/results/nyx_n1_ngc25.03_hugectr/dlrm_dcnv2"
    verdict = tool.convergence(directory, "5.0.0")
    assert verdict.passed
    factor = json.loads((directory / "scaling.json").read_text())["scaling_factor"]
    assert verdict.messages[-1] == f"RCP found; factor {factor}"
