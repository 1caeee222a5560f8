"""Broken copies of published directories: our verdict beside what the official tools say of the same files."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.package_checker.seed_checker import SeedChecker
from mlperf_logging.rcp_checker import rcp_checker
from mlperf_logging.result_summarizer import result_summarizer
from mlperf_logging.system_desc_checker import system_desc_checker

from score_runs import LOGS, line, needs_logs, run_lines, write
from timetrial.results import rounds
from timetrial.results.breakdown import explain
from timetrial.results.many import score_all
from timetrial.results.records import Finding, Result
from timetrial.results.tree import find

pytestmark = [needs_logs, pytest.mark.filterwarnings("ignore:Result file")]
SYSTEM = "MI355X_EPYC_9575F_pytorch"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a published result of llama31_8b, ten runs, that may be broken."""
    source = LOGS / "v5.1" / "AMD"
    copy = tmp_path / "v5.1" / "AMD"
    (copy / "systems").mkdir(parents=True)
    shutil.copyfile(source / "systems" / f"{SYSTEM}.json", copy / "systems" / f"{SYSTEM}.json")
    target = copy / "results" / SYSTEM / "llama31_8b"
    target.mkdir(parents=True)
    for path in (source / "results" / SYSTEM / "llama31_8b").iterdir():
        shutil.copyfile(path, target / path.name)
    return target


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """The official tools log and print."""
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    logging.disable(logging.NOTSET)


def ours(path: Path) -> Result:
    (result,) = score_all([path])
    return result


def failing(result: Result) -> list[Finding]:
    return [found for found in result.findings if found.level == "fail"]


def compliant(log: Path) -> bool:
    checker = mlp_compliance.make_checker("training", "5.1.0", True, False)
    mlp_compliance.enqueued_configs.clear()
    return bool(mlp_compliance.main(str(log), "training_5.1.0/common.yaml", checker)[0])


def seeds_pass(directory: Path) -> bool:
    return bool(SeedChecker("5.1.0").check_seeds(sorted(map(str, directory.glob("result_*.txt")))))


def summarized(directory: Path) -> tuple[float | None, float]:
    """(score, factor) of the official summarizer."""
    score, _, factor = result_summarizer._compute_strong_score_standalone(
        "llama31_8b", SYSTEM, False, str(directory), "training", "5.1.0"
    )
    return score, factor


def rewritten(directory: Path) -> None:
    """scaling.json as the official package checker leaves it."""
    rcp_checker.check_directory(
        str(directory), "training", "5.1.0", False, False, rcp_pass="pruned_rcps", set_scaling=True
    )


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text("".join(change(line) for line in path.read_text().splitlines(keepends=True)))


def keyed(key: str, change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda line: change(line) if f'"key": "{key}"' in line else line


def value(key: str, new: str) -> Callable[[str], str]:
    return keyed(key, lambda line: re.sub(r'"value": [^,]+,', f'"value": {new},', line, count=1))


# ---- seeds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["the seed", "every line"])
def test_a_seed_logged_twice_is_that_of_another_run(directory: Path, which: str) -> None:
    log = directory / "result_3.txt"
    assert seeds_pass(directory)
    edit(log, keyed("seed", lambda line: line * 2) if which == "the seed" else lambda line: line * 2)
    assert compliant(log)  # equal values pass there
    assert not seeds_pass(directory)
    result = ours(directory)
    assert result.verdict == "fails"
    (found,) = failing(result)
    assert (found.rule, found.found.partition(",")[0]) == (
        "result.seed",
        "seed 25468 is logged 2 times in result_3.txt",
    )


@pytest.mark.parametrize(
    ("new", "passes"), [('"77"', True), ("7.5", True), ('"abc"', False), ("null", False), ("NaN", False)]
)
def test_what_is_a_seed(directory: Path, new: str, passes: bool) -> None:
    edit(directory / "result_3.txt", value("seed", new))
    assert seeds_pass(directory) == passes
    assert (ours(directory).verdict == "stands") == passes


def test_a_second_seed_by_another_line_passes_and_by_the_same_line_of_two_runs_does_not(directory: Path) -> None:
    def second(line: str) -> str:
        return line + re.sub(r'"lineno": \d+', '"lineno": 7', re.sub(r'"value": \d+', '"value": 99', line))

    edit(directory / "result_3.txt", keyed("seed", second))
    assert seeds_pass(directory)
    assert ours(directory).verdict == "stands"
    edit(directory / "result_4.txt", keyed("seed", second))
    assert not seeds_pass(directory)
    assert [found.found for found in failing(ours(directory))] == ["seed 99 in result_3.txt and result_4.txt"]


def test_a_seed_without_its_line(directory: Path) -> None:
    edit(directory / "result_3.txt", keyed("seed", lambda line: line.replace('"lineno"', '"line"')))
    assert not seeds_pass(directory)
    (found,) = failing(ours(directory))
    assert "without lineno in its metadata" in found.found


# ---- descriptions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"), [("[1, 2]", "a list"), ("null", "null"), ('"text"', "a text"), ("3", "a number")]
)
def test_a_description_that_is_no_object(directory: Path, content: str, words: str) -> None:
    path = directory.parents[2] / "systems" / f"{SYSTEM}.json"
    path.write_text(content)
    passed = False
    with contextlib.suppress(TypeError, AttributeError):  # it ends in a traceback on some
        passed = system_desc_checker.check_system_desc(str(path), "training", "5.1.0")[0]
    assert not passed
    result = ours(directory)
    assert result.verdict == "fails"
    (found,) = failing(result)
    assert found.found == f"{path.name} holds {words}, so that every field is missing"


def test_numbers_in_a_description_crash_the_official_checker(directory: Path) -> None:
    path = directory.parents[2] / "systems" / f"{SYSTEM}.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "number_of_nodes": 1}))
    assert system_desc_checker.check_system_desc(str(path), "training", "5.1.0")[0]
    assert ours(directory).verdict == "stands"
    path.write_text(json.dumps({**described, "accelerators_per_node": 8}))
    with pytest.raises(TypeError):
        system_desc_checker.check_system_desc(str(path), "training", "5.1.0")
    (found,) = failing(ours(directory))
    assert (found.found, found.change) == ("accelerators_per_node = 8", 'write "8"')
    assert "cannot be submitted" in found.asked


# ---- scaling.json ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1.2, None])
def test_a_stale_scaling_file_is_written_anew(directory: Path, factor: float | None) -> None:
    path = directory / "scaling.json"
    path.write_text(json.dumps({"scaling_factor": factor})) if factor else path.unlink()
    result = ours(directory)
    rewritten(directory)
    score, scale = summarized(directory)
    assert result.score_min == pytest.approx(score, rel=1e-12)
    assert result.convergence is not None
    assert result.convergence.scaling_factor == pytest.approx(scale, rel=1e-12)
    assert result.verdict == "stands"
    (found,) = [found for found in result.findings if found.rule == "score.scaling"]
    assert found.level == "warn"
    assert ("stale" in found.found) == (factor is not None)


# ---- rounds ------------------------------------------------------------------------------------------------


def test_a_round_without_rules_is_not_guessed(directory: Path) -> None:
    root = directory.parents[3]
    moved = root.rename(root.parent / "v7.0")
    result = ours(moved)
    assert (result.verdict, result.round, result.score_min) == ("fails", "", None)
    (found,) = failing(result)
    assert found.rule == "score.unknown_round"
    assert "v7.0" in found.found
    assert found.asked == f"one of {', '.join(rounds.rounds())}"
    assert "--round" in found.change
    (named,) = score_all([moved], round_="v5.1")
    assert (named.verdict, named.round) == ("stands", "v5.1")


def test_the_directory_of_a_run_and_its_log_are_of_one_round(directory: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    shutil.copyfile(directory / "result_0.txt", run / "result_0.txt")
    (run / "config.json").write_text(json.dumps({"preset": "mini", "round": "v6.0"}))
    (whole,), (log,) = find([run]), find([run / "result_0.txt"])
    assert (whole.kind, log.kind) == ("run", "log")
    assert (whole.round, whole.preset) == (log.round, log.preset) == ("v6.0", "mini")


# ---- runs that do not count --------------------------------------------------------------------------------


def test_success_without_the_target_is_a_contradiction(directory: Path) -> None:
    log = directory / "result_3.txt"
    edit(log, value("eval_accuracy", "3.4"))
    assert not compliant(log)
    result = ours(directory)
    assert result.verdict == "fails"
    (found,) = failing(result)
    assert found.found == "result_3.txt says success, and no evaluation reached the target"
    assert "left out as the slowest" in found.change
    note = next(found for found in result.findings if found.rule == "contradiction.one_bad_file")
    assert note.found == "1 run says success without reaching the target"
    edit(log, lambda line: line.replace('"status": "success"', '"status": "aborted"'))
    honest = ours(directory)
    assert (honest.verdict, honest.runs[3].dropped) == ("stands", "slowest")
    assert honest.score_min == pytest.approx(summarized(directory)[0], rel=1e-12)


def _gzip(log: Path) -> None:
    log.write_bytes(gzip.compress(log.read_bytes()))


def _utf16(log: Path) -> None:
    log.write_bytes(log.read_text().encode("utf-16"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_gzip, "gzip data"),
        (_utf16, "UTF-16 text"),
        (lambda log: log.write_text(""), "an empty file"),
        (lambda log: log.write_bytes(log.read_bytes()[:-30]), "the last line is cut off"),
    ],
    ids=["gzip", "utf16", "empty", "cut"],
)
def test_a_log_that_cannot_be_read_is_none_that_missed_the_target(
    directory: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(directory / "result_3.txt")
    assert not compliant(directory / "result_3.txt")
    assert not seeds_pass(directory)  # so that the package checker does not take it as the one bad file
    result = ours(directory)
    assert result.verdict == "fails"
    (found,) = failing(result)
    assert found.found == f"1 of 10 logs cannot be read as they are: result_3.txt: {words}"
    assert not [found for found in result.findings if "not_converged" in found.rule or "one_bad" in found.rule]


def test_a_clock_that_runs_backwards_is_said(directory: Path) -> None:
    def early(line: str) -> str:
        return re.sub(r'"time_ms": (\d+)', lambda m: f'"time_ms": {int(m[1]) - 36_000_000}', line)

    edit(directory / "result_3.txt", keyed("run_stop", early))
    (found,) = failing(ours(directory))
    assert "before run_start" in found.found
    assert not [found for found in ours(directory).findings if "not_converged" in found.rule]


def test_a_log_without_run_stop_counts_as_not_converged(directory: Path) -> None:
    log = directory / "result_3.txt"
    edit(log, keyed("run_stop", lambda line: ""))
    assert not compliant(log)
    assert seeds_pass(directory)
    result = ours(directory)
    assert (result.verdict, result.runs[3].dropped) == ("stands", "slowest")
    assert result.score_min == pytest.approx(summarized(directory)[0], rel=1e-12)
    found = next(found for found in result.findings if found.rule == "result.not_converged")
    assert found.level == "note"
    assert "result_3.txt has no run_stop, though it reached the target" in found.found
    edit(directory / "result_4.txt", keyed("run_stop", lambda line: ""))
    assert summarized(directory)[0] is None
    assert ours(directory).verdict == "fails"


def test_a_compressed_log_is_told_with_its_directory(directory: Path) -> None:
    log = directory / "result_3.txt"
    (directory / "result_3.txt.gz").write_bytes(gzip.compress(log.read_bytes()))
    assert ours(directory).verdict == "stands"  # a copy beside the log; the official checker warns
    log.unlink()
    result = ours(directory)
    assert result.verdict == "fails"
    assert [found.found for found in failing(result)] == ["result_3.txt.gz is compressed, and was not read", "9 runs"]


def test_a_batch_size_that_is_text(directory: Path) -> None:
    log = directory / "result_3.txt"
    edit(log, value("global_batch_size", '"32"'))
    assert compliant(log)  # it has no rule for the type
    with pytest.raises(Exception, match="None"):  # and the convergence checker finds no benchmark: "do not match"
        rewritten(directory)
    result = ours(directory)
    (found,) = failing(result)
    assert found.found == "global_batch_size = '32' in result_3.txt is no whole number"
    assert found.change == "log an integer: 32"
    assert not [found for found in result.runs[3].findings if "evaluation_points" in found.rule]


# ---- words and figures -------------------------------------------------------------------------------------


def test_nul_bytes_are_told_with_their_line(directory: Path) -> None:
    log = directory / "result_3.txt"
    lines = log.read_bytes().count(b"\n")
    log.write_bytes(log.read_bytes() + b"\0\0garbage\n")
    found = next(found for found in ours(log).runs[0].findings if found.rule == "reader.nul")
    assert found.line == lines + 1


def test_the_rule_of_run_stop_is_that_of_the_round(directory: Path) -> None:
    edit(directory / "result_3.txt", keyed("run_stop", lambda line: ""))
    found = next(found for found in ours(directory).runs[3].findings if found.rule == "llama31_8b.run_stop")
    place = re.search(r"(training_5\.1\.0/common\.yaml):(\d+)", found.source)
    assert place is not None
    text = (rounds.package() / "compliance_checker" / place[1]).read_text().splitlines()
    assert "run_stop" in text[int(place[2]) - 1]


def test_a_format_in_the_notes_is_a_hint(directory: Path) -> None:
    time = ours(directory).runs[0].time
    assert time is not None
    assert 'fp8 by the system\'s sw_notes ("FP8 Training"): a hint' in time.mfu_basis
    path = directory.parents[2] / "systems" / f"{SYSTEM}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sw_notes": ""}))
    plain = ours(directory).runs[0].time
    assert plain is not None
    assert plain.mfu is not None
    assert time.mfu == pytest.approx(plain.mfu / 2, rel=0.02)  # the peak in fp8 is about twice that in bf16
    assert "dense bf16 peak" in plain.mfu_basis


@pytest.mark.parametrize(("status", "asked"), [("aborted", False), ("success", True)])
def test_a_mini_run_that_was_stopped_needs_no_evaluation(tmp_path: Path, status: str, asked: bool) -> None:
    log = write(tmp_path / "result_0.txt", run_lines(samples=(), benchmark="llama31_8b_mini", status=status))
    found = {found.found for found in ours(log).runs[0].findings}
    assert ("no eval_start" in found) == asked
    assert ("no eval_accuracy" in found) == asked
    assert "no block_start" in found


def test_a_mean_over_blocks_is_called_one(tmp_path: Path) -> None:
    lines = run_lines(samples=(3200,))
    blocks = [
        line("block_start", None, 0, "INTERVAL_START", samples_count=0),
        line("block_stop", None, 1_800_000, "INTERVAL_END", samples_count=3200),
    ]
    time = ours(write(tmp_path / "result_0.txt", [*lines[:6], *blocks, *lines[6:]])).runs[0].time
    assert time is not None
    assert (time.step_s, time.step_kind) == (18.0, "mean")
    assert any(sentence.startswith("100 steps of 18 s (mean;") for sentence in explain(time))
