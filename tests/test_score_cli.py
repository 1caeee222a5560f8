"""The commands that score, as a user calls them."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import score_logs
from score_runs import LOGS, benchmark_directory, needs_logs, run_lines
from score_runs import write as write_lines
from timetrial.cli import main
from timetrial.errors import UserError
from timetrial.report import progress
from timetrial.results import ruleset

AMD = LOGS / "v5.1" / "AMD" / "results" / "MI355X_EPYC_9575F_pytorch"
PUBLISHED = {
    ("v5.0", "llama2_70b_lora"): 22.0366,
    ("v5.0", "llama31_405b"): 269.1216,
    ("v5.1", "llama31_8b"): 99.7085,
    ("v5.0", "rgat"): 8.1279,
    ("v5.0", "bert"): 300.5089,
}


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[str, str]:
    """Standard output and error of a command that must end with `code`."""
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    found = capsys.readouterr()
    assert (ended.value.code or 0) == code, found.err
    return found.out, found.err


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A benchmark's directory in a tree, to be broken."""
    target = tmp_path / "v5.1" / "AMD" / "results" / AMD.name / "llama31_8b"
    shutil.copytree(AMD / "llama31_8b", target)
    shutil.copytree(AMD.parents[1] / "systems", tmp_path / "v5.1" / "AMD" / "systems")
    (tmp_path / "v5.1" / "AMD" / "benchmarks" / "llama31_8b").mkdir(parents=True)
    for path in tmp_path.rglob("*"):
        path.chmod(0o755)
    return target


def official_log(path: Path, benchmark: str, round_: str, **changed: Any) -> Path:
    events = score_logs.made(ruleset.load(round_, benchmark))
    for event in events:
        event["value"] = changed.get(event["key"], event["value"])
    return score_logs.write(path, events)


# ---- what is printed ---------------------------------------------------------------------------------------


@needs_logs
def test_a_tree_is_a_table_and_a_sum(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "score", LOGS, "--no-official")
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["round", "organization", "system", "benchmark"]
    assert sum("stands" in line for line in lines) == 12
    assert "12 results: 12 stand." in out
    for (round_, benchmark), minutes in PUBLISHED.items():
        assert any(
            line.startswith(round_) and f" {benchmark} " in line and f"{minutes:.4f}" in line for line in lines
        ), benchmark
    assert all(line == line.rstrip() for line in lines)


@needs_logs
def test_one_result_is_the_whole_story(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "score", LOGS / "v5.0" / "tinycorp" / "results" / "tinybox_green")
    for words in (
        *("✓ stands   803.5947 min", "olympic mean 803.5947 min of 3 of 5 runs", "6 x NVIDIA GeForce RTX 4090"),
        *(
            "Official checker",
            "4 of 5 logs pass its check of compliance",
            "Required EXACTLY_ONE occurrence of 'run_stop'",
        ),
        *("fastest, left out", "no run_stop; counted as the slowest", "one run may miss the target"),
        *("Where the time went, mean of 3 runs", "training", "evaluation", "the median run", "samples/s"),
        *("there is no room", "beyond the target 0.340"),
    ):
        assert words in out, words
    assert "FAIL" not in out
    assert max(map(len, out.splitlines())) <= 110
    short, _ = run(capsys, "score", LOGS / "v5.0" / "tinycorp" / "results" / "tinybox_green", "--no-explain")
    assert "Where the time went" not in short


@needs_logs
def test_json_is_a_list_without_nan(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    results = json.loads(run(capsys, "score", LOGS, "--json", "--no-official")[0], parse_constant=refuse)
    assert len(results) == 12
    for result in results:
        assert {"round", "organization", "system", "benchmark", "score_min", "verdict", "runs"} <= result.keys()
        assert (result["verdict"], result["stands"], len(result["runs"]) >= 3) == ("stands", True, True)
        wanted = PUBLISHED.get((result["round"], result["benchmark"]))
        if wanted is not None and result["system"] not in ("MI355X_EPYC_9575F_pytorch",):
            assert result["score_min"] == pytest.approx(wanted, abs=5e-5)
        assert result["explanation"]
        assert result["breakdown_s"]["total_s"] == pytest.approx(60 * result["unscaled_min"], rel=1e-9)
    documented = (Path(__file__).parents[1] / "docs" / "score.md").read_text()
    assert [name for name in results[0] if f"`{name}`" not in documented] == []
    assert sorted(result["round"] for result in results) == [result["round"] for result in results]


@needs_logs
def test_csv_has_one_row_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "score", LOGS / "v5.0", "--csv", "--no-official")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 7
    by_name = {row["benchmark"]: row for row in rows}
    assert float(by_name["llama31_405b"]["score_min"]) == pytest.approx(269.12157, abs=1e-5)
    assert by_name["retinanet"]["not_converged"] == "1"
    assert by_name["retinanet"]["mfu"] == ""
    assert all(row["verdict"] == "stands" and row["first_fail"] == "" for row in rows)


@needs_logs
def test_the_order_does_not_hang_on_the_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    one, three = (run(capsys, "score", LOGS, "--csv", "--no-official", "--workers", n)[0] for n in (1, 3))
    assert one == three


@needs_logs
def test_a_single_log_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "score", AMD / "llama31_8b" / "result_0.txt")
    assert "! keeps the rules; 1 run is no result" in out
    assert "10 runs make a result of llama31_8b" in out
    assert "1 of 1 log passes" in out


# ---- what is broken ----------------------------------------------------------------------------------------


@needs_logs
def test_a_wrong_value_says_what_where_and_what_to_change(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    for log in copy.glob("result_*.txt"):
        log.write_text(
            log.read_text().replace('"opt_adamw_epsilon", "value": 1e-05', '"opt_adamw_epsilon", "value": 1e-08')
        )
    out, _ = run(capsys, "score", copy, code=1)
    for words in (
        *("does not stand", "FAIL    llama31_8b.opt_adamw_epsilon   result_0.txt:27", "and 7 more"),
        *("found   opt_adamw_epsilon = 1e-08", "asked   1e-05", "change  run with opt_adamw_epsilon 1e-05"),
        *("closed_llama31_8b.yaml:", "  0 of 10 logs pass its check", "failed test:  v['value'] == 1e-05"),
    ):
        assert words in out, words
    table, _ = run(capsys, "score", copy.parents[4], "--no-official", code=1)  # alone, but of a tree
    assert "opt_adamw_epsilon" in table


@needs_logs
def test_a_log_that_is_cut_off_tells_the_cause_once(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    log = copy / "result_2.txt"
    log.write_bytes(log.read_bytes()[:3000])
    shutil.copy(copy / "result_0.txt", copy / "result_1.txt")
    out, _ = run(capsys, "score", copy, "--no-explain", code=1)
    assert "the last line is cut off" in out
    assert "required keys are not in what can be read of it: submission_org" in out
    assert out.count("log submission_platform once") == 0
    assert "result_1.txt and result_0.txt are of one run" in out
    assert "seed" in out


@needs_logs
def test_among_many_only_what_fails_is_told(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    (copy / "result_9.txt").unlink()
    shutil.copytree(LOGS / "v5.0" / "QCT", copy.parents[4] / "v5.0" / "QCT")
    out, _ = run(capsys, "score", copy.parents[4], code=1)
    assert "2 results: 1 stands, 1 does not stand." in out
    assert "found   9 runs" in out
    assert "change  add 1 more" in out
    assert "Where the time went" not in out
    whole, _ = run(capsys, "score", copy.parents[4], "--explain", code=1)
    assert whole.count("Where the time went") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["score"], "score: no path; as in: timetrial score"),
        (["score", "nowhere"], "nowhere: No such file or directory; give a log or a directory"),
        (["score", ".", "--round", "v9.9"], "unknown round 'v9.9'; there are v4.0, "),
        (["score", ".", "--json", "--csv"], "--json and --csv: give one of them"),
        (["score", ".", "--workers", "0"], "0 workers: at least one is needed"),
        (["score", ".", "--html", "nowhere/x.html"], "--html nowhere/x.html: there is no directory nowhere"),
        (["score", ".", "--html", "."], "--html"),
        (["compare"], "compare: 0 of the two results"),
        (["compare", "nowhere"], "compare: 1 of the two results"),
        (["compare", "nowhere", "elsewhere"], "nowhere: no such path; give results on disk or published:"),
        (["compare", "published:v5.0/NVIDIA/llama31_405b/eos-dfw_n64*"], "compare: 1 result; give at least two"),
        (["compare", "published:v5.0/NVIDIA/llama31_405c", "x"], "llama31_405b"),
        (["compare", "published:v5.0/*/llama31_405b", "x"], "the first is what the others are compared with"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = run(capsys, *arguments, code=2)
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    assert words in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"\x1f\x8b\x08rest", "gzip data; gunzip it"),
        (b"hello\n", "no :::MLLOG line"),
        ("\ufeff:::MLLOG {}".encode("utf-16"), "UTF-16 text"),
        (None, "is no regular file"),
    ],
)
def test_what_cannot_be_read_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "result_0.txt"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    out, err = run(capsys, "score", path, code=2)
    assert err.count("\n") == 1
    assert err.startswith(f"error: {path} could not be read: ")
    assert words in err
    assert "could not be read" in out
    told = json.loads(run(capsys, "score", path, "--json", code=2)[0])
    assert [(one["verdict"], one["stands"], one["score_min"]) for one in told] == [("unread", None, None)]
    assert "unread" in run(capsys, "score", path, "--csv", code=2)[0]


def test_an_empty_directory_and_a_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, err = run(capsys, "score", tmp_path, code=2)
    assert "no result logs" in err
    benchmark_directory(tmp_path / "v5.1" / "llama31_8b", [60.0] * 3)
    (tmp_path / "v5.1" / "loop").symlink_to(tmp_path)
    out, err = run(capsys, "score", tmp_path, "--no-official", code=1)
    assert "links to a directory above" in err
    assert err.startswith("note: ")
    assert "does not stand" in out


def test_text_of_a_log_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [line.replace("Nobody", "\\u001b[31mred\\u001b[0m") for line in run_lines()]
    out, _ = run(capsys, "score", write_lines(tmp_path / "result_0.txt", lines), "--no-official", code=1)
    assert "\x1b" not in out
    assert "red" in out


@needs_logs
def test_advice_has_all_digits(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    """What it asks for keeps the rule when it is followed."""
    log = copy / "result_3.txt"
    lines = log.read_text().splitlines(True)

    def changed(key: str, value: str) -> None:
        for i, line in enumerate(lines):
            if f'"key": "{key}"' in line:
                lines[i] = re.sub(r'"value": [^,]+,', f'"value": {value},', line, count=1)
        log.write_text("".join(lines))

    changed("opt_learning_rate_decay_steps", "1199000")
    out, _ = run(capsys, "score", copy, "--no-official", code=1)
    advised = re.search(r"run with opt_learning_rate_decay_steps .* = (\S+)", out)
    assert advised is not None
    assert advised[1] == "1199872"
    changed("opt_learning_rate_decay_steps", advised[1])
    run(capsys, "score", copy, "--no-official")


@needs_logs
def test_a_sum_of_warnings_says_what_was_found_and_asked(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    log = copy / "result_3.txt"
    log.write_text(log.read_text().replace('"status": "success"', '"status": "aborted"'))
    shutil.copytree(LOGS / "v5.0" / "QCT", copy.parents[4] / "v5.0" / "QCT")
    out, _ = run(capsys, "score", copy.parents[4], "--no-official")
    words = " ".join(out.partition("Warnings, which")[2].split())
    assert "run.not_converged 1 result run_stop says aborted; asked is success" in words


@needs_logs
def test_notes_name_both_sides_of_a_contradiction(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    log = copy / "result_3.txt"
    log.write_text(log.read_text().replace('"status": "success"', '"status": "aborted"'))
    words = " ".join(run(capsys, "score", copy, "--no-official")[0].split())
    note = words.partition("note contradiction.run_status")[2]
    for part in (
        *("found run_stop with metadata.status = 'aborted': fails by what is followed", "asked training_rules.adoc"),
        *("; but mlperf-logging", "change followed: the rules' text", "rule training_rules.adoc, Quality measure"),
    ):
        assert part in note, part
    assert "run_stop = None" not in words


@needs_logs
def test_our_count_stands_apart_from_the_checkers_words(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    log = copy / "result_3.txt"
    log.write_text(
        log.read_text().replace('"opt_adamw_epsilon", "value": 1e-05', '"opt_adamw_epsilon", "value": 1e-08')
    )
    page = copy / "page.html"
    out, _ = run(capsys, "score", copy, "--html", page, code=1)
    ours, _, quoted = " ".join(out.partition("Official checker (")[2].split()).partition(" Word for word: ")
    assert "9 of 10 logs pass its check of compliance, as Timetrial counts them; the result does not stand" in ours
    for checker in ("packages", "seeds", "system descriptions"):
        assert checker in ours.partition("Not asked were")[2]
    assert quoted.startswith("result_3.txt: CHECK for 'opt_adamw_epsilon' failed")
    assert "SUCCESS" not in out
    html = page.read_text()
    assert html.index("9 of 10 logs pass") < html.index("Not asked were") < html.index("Word for word")
    assert "SUCCESS" not in html
    told = json.loads(run(capsys, "score", copy, "--json", code=1)[0])[0]
    assert told["official"][0] == "9 of 10 logs pass"


@needs_logs
def test_figures_of_interleaved_logs_are_not_told(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    log = copy / "result_3.txt"
    pairs = zip(log.read_text().splitlines(), (copy / "result_4.txt").read_text().splitlines(), strict=False)
    log.write_text("".join(f"{one}\n{other}\n" for one, other in pairs))
    page = copy / "page.html"
    out = " ".join(run(capsys, "score", copy, "--no-official", "--html", page, code=1)[0].split())
    doubt = "result_3.txt: The log has lines of several runs (2 times run_start, 110.9 min apart)"
    assert doubt in out
    assert doubt in page.read_text()
    told = json.loads(run(capsys, "score", log, "--no-official", "--json", code=1)[0])[0]
    time = told["runs"][0]["time"]
    assert [time[name] for name in ("train_s", "eval_s", "gap_s", "step_s", "samples_per_s", "mfu")] == [None] * 6
    assert time["doubt"].endswith("figures taken from it mean nothing.")
    alone = run(capsys, "score", log, "--no-official", code=1)[0]
    assert "training  " not in alone
    assert "The log has lines of several runs" in alone


# ---- runs of ours ------------------------------------------------------------------------------------------


def test_a_mini_is_no_result_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, status, code in (("good", "success", 0), ("missed", "aborted", 1)):
        events = score_logs.made(ruleset.load(ruleset.MINI, "llama31_8b"))
        for event in events:
            event["value"] = "llama31_8b_mini" if event["key"] == "submission_benchmark" else event["value"]
            if event["key"] == "run_stop":
                event["metadata"]["status"] = status
        (tmp_path / name).mkdir()
        log = score_logs.write(tmp_path / name / "result_0.txt", events)
        (log.parent / "config.json").write_text('{"preset": "mini", "round": "v6.0"}')
        for path in (log.parent, log):
            out, _ = run(capsys, "score", path, code=code)
            assert "a mini preset: no MLPerf result" in out
            assert ("target missed" in out) == (status == "aborted")
            assert "Official checker" not in out
            told = json.loads(run(capsys, "score", path, "--json", code=code)[0])[0]
            assert told["verdict"] == "mini"
            assert (told["score_min"] is None) == (status == "aborted")
    assert "train until the target is reached" in run(capsys, "score", log, code=1)[0]


def test_a_shrunken_official_preset_does_not_stand(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    events = score_logs.made(ruleset.load("v6.0", "llama31_8b"))
    notice = "2 layers in place of 32"
    events.insert(2, score_logs.event("notice", notice))
    out, _ = run(capsys, "score", score_logs.write(tmp_path / "result_0.txt", events), "--round", "v6.0", code=1)
    assert f"the log says: '{notice}'" in out
    assert "run the official preset unchanged" in out
    assert "1 of 1 log passes" in out, "the official checker cannot know"
    assert "the result does not stand, see the findings" in " ".join(out.split())


def test_a_log_of_an_official_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = official_log(tmp_path / "result_0.txt", "llama31_8b", "v6.0")
    out, _ = run(capsys, "score", log, "--round", "6.0")
    assert "keeps the rules; 1 run is no result" in out
    assert "1 of 1 log passes" in out
    out, _ = run(
        capsys,
        "score",
        official_log(log, "llama31_8b", "v6.0", max_sequence_length=512),
        code=1,
    )
    assert "run with max_sequence_length 8192" in out


# ---- compare -----------------------------------------------------------------------------------------------


def test_announced_figures_come_out(capsys: pytest.CaptureFixture[str]) -> None:
    base, other = (
        "published:v5.0/NVIDIA/llama31_405b/eos-dfw_n64*",
        "published:v5.0/CoreWeave*/llama31_405b/carina_ngpu512*",
    )
    out, err = run(capsys, "compare", base, other)
    assert err == ""
    assert "per accelerator   2.222x" in out
    words = " ".join(out.split())
    assert "- B over A: different batch sizes, 1,152 and 896, but as many samples by v5.0's reference" in words
    assert "see the figures at equal batch size" not in out
    told = json.loads(run(capsys, "compare", base, other, "--json")[0])
    assert told["pairs"][0]["per_accelerator"] == pytest.approx(2.2224, abs=1e-4)
    rows = list(csv.DictReader(io.StringIO(run(capsys, "compare", base, other, "--csv")[0])))
    assert [row["base"] for row in rows] == ["True", "False"]
    assert float(rows[1]["speedup"]) == pytest.approx(2.2224, abs=1e-4)


@needs_logs
def test_own_runs_beside_published_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    out, err = run(capsys, "compare", "published:v5.1/AMD/llama31_8b", AMD / "llama31_8b", "--html", page)
    assert "speed-up          1.000x" in out
    assert "unverified, not reviewed by MLCommons" in out
    assert str(page) in err
    assert page.read_text().startswith("<!DOCTYPE html>")
    out, err = run(capsys, "compare", AMD / "llama31_8b", AMD / "llama2_70b_lora", "--html", page, code=2)
    assert out == ""
    assert err == "error: compare: nothing to compare: different benchmarks, llama31_8b and llama2_70b_lora\n"


def test_figures_are_finite_or_missing() -> None:
    from timetrial.report.score_json import plain

    assert plain({"a": math.nan, 1: (math.inf, Path("x"), True, 3)}) == {"a": None, "1": [None, "x", True, 3]}
    assert issubclass(UserError, Exception)


@pytest.mark.parametrize("output", [(), ("--json",), ("--csv",)])
def test_a_reader_that_leaves_does_not_change_the_exit_code(tmp_path: Path, output: tuple[str, ...]) -> None:
    for index in range(40):
        benchmark_directory(tmp_path / "v5.1" / f"s{index}" / "llama31_8b", [60.0] * 3)
    command = [sys.executable, "-m", "timetrial", "score", str(tmp_path), "--no-official", *output]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, b"")


def test_a_base_that_cannot_be_read_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, err = run(capsys, "compare", tmp_path, "published:v5.0/QCT/rgat", code=2)
    assert err == f"error: {tmp_path} could not be read: no result logs; give a directory with result logs\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_tells_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    to = _Terminal()
    shown = progress.Progress(to=to)
    for done, at in ((10, 101.0), (40, 102.0), (41, 102.05), (100, 105.0)):
        now[0] = at
        shown(done, 100, Path("x"))
    shown.close()
    assert to.getvalue() == (
        "\r40 of 100 logs, 20.0 a second, 3.00 s left\x1b[K\r100 of 100 logs, 20.0 a second\x1b[K\r\x1b[K"
    )
    silent = progress.Progress(to=io.StringIO())
    silent(1, 2, Path("x"))
    silent.close()
    assert silent.to.getvalue() == ""  # type: ignore[attr-defined]
