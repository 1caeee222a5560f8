"""The score's arithmetic against the official summarizer's, and its findings."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from mlperf_logging.result_summarizer import result_summarizer as summarizer

from score_runs import benchmark_directory, run_lines, write
from timetrial.results import many, scored
from timetrial.results.many import score_all
from timetrial.results.read import read
from timetrial.results.records import Result
from timetrial.results.runs import run_of
from timetrial.results.scoring import olympic_mean, score
from timetrial.results.tree import find


def scored_alone(directory: Path, refused: tuple[str, ...] = (), round_: str = "v5.1") -> Result:
    """Without the checks, which these small logs do not pass."""
    (entry,) = find([directory], round_)
    return score(entry, [run_of(read(log), entry) for log in entry.logs], [directory / name for name in refused])


def test_the_olympic_mean_is_the_summarizers() -> None:
    dice = random.Random(1)
    for _ in range(2000):
        count, rejected = dice.randrange(0, 45), dice.choice((1, 4))
        failed = dice.randrange(0, 6)
        times = [dice.choice((60.0, dice.uniform(1, 1e3))) for _ in range(count)]
        expected = None
        if failed <= rejected:
            expected = summarizer._compute_olympic_average(list(times), failed, rejected)
        assert olympic_mean(times, failed, rejected) == expected


@pytest.mark.parametrize("failed", range(4))
def test_failed_runs_are_the_slowest(tmp_path: Path, failed: int) -> None:
    directory = benchmark_directory(tmp_path / "llama31_8b", [60.0 + i for i in range(10)], [200_000] * 10)
    for i in range(failed):
        write(directory / f"result_{i}.txt", run_lines(50.0, status="aborted", seed=i, offset=i * 100_000_000))
    result = scored_alone(directory)
    marks = [run.dropped for run in result.runs]
    if failed == 0:
        assert (result.score_min, marks[0], marks[9]) == (pytest.approx(64.5), "fastest", "slowest")
    elif failed == 1:
        assert (result.score_min, marks[0], marks[1]) == (pytest.approx(65.5), "slowest", "fastest")
    else:
        assert result.score_min is None
        assert set(marks) == {""}
        assert f"{failed} of 10 runs do not count" in next(f.found for f in result.findings if "not_conv" in f.rule)
    assert result.verdict == ("stands" if failed < 2 else "fails")


def test_unet3d_leaves_out_four(tmp_path: Path) -> None:
    options = {"benchmark": "unet3d", "gbs": 56, "position": "epoch_num"}
    directory = benchmark_directory(tmp_path / "unet3d", [10.0 + i for i in range(40)], [300_000] * 40, **options)
    for i in (5, 6, 7):
        write(directory / f"result_{i}.txt", run_lines(50.0, status="aborted", seed=i, **options))
    result = scored_alone(directory, round_="v4.0")
    left = [10.0 + i for i in range(40) if i not in (5, 6, 7)][4:-1]
    assert result.unscaled_min == pytest.approx(sum(left) / len(left))
    assert [run.dropped for run in result.runs].count("fastest") == 4
    assert [run.dropped for run in result.runs].count("slowest") == 4


def test_scaling_is_computed_where_the_file_is_missing(tmp_path: Path) -> None:
    directory = benchmark_directory(tmp_path / "llama31_8b", [60.0 + i for i in range(10)], [175_104] * 10)
    result = scored_alone(directory)
    assert result.convergence is not None
    assert result.score_min == pytest.approx(65.88, abs=0.01)  # the facts' example, loadgen_and_mllog.md section 2
    assert (result.convergence.scaling_source, result.verdict) == ("computed", "stands")
    assert [found.rule for found in result.findings if found.level == "warn"] == ["score.scaling"]
    write(directory / "scaling.json", [json.dumps({"scaling_factor": result.convergence.scaling_factor})])
    again = scored_alone(directory)
    assert again.score_min == result.score_min
    assert again.convergence is not None
    assert again.convergence.scaling_source == "scaling.json"
    assert not again.findings
    write(directory / "scaling.json", ['{"scaling_factor": 1.5}'])
    other = scored_alone(directory)
    assert other.score_min == result.score_min  # the official package checker writes the file anew
    assert other.convergence == result.convergence
    assert "scaling.json is stale: it says 1.500000, and the logs come to 1.021" in other.findings[0].found
    assert other.verdict == "stands"


def test_a_failed_convergence_test_is_a_finding_and_no_factor(tmp_path: Path) -> None:
    result = scored_alone(benchmark_directory(tmp_path / "llama31_8b", [60.0 + i for i in range(10)]))
    assert result.score_min == pytest.approx(64.5)
    assert result.verdict == "fails"
    failing = [found for found in result.findings if found.level == "fail"]
    assert [found.rule for found in failing] == ["score.convergence"]
    assert "evaluations before the fastest allowed" in failing[0].found


def test_open_division_is_not_tested(tmp_path: Path) -> None:
    directory = benchmark_directory(tmp_path / "llama31_8b", [60.0 + i for i in range(10)])
    for log in directory.iterdir():
        log.write_text(log.read_text().replace('"closed"', '"open"'))
    result = scored_alone(directory)
    assert (result.convergence, result.verdict, result.division) == (None, "stands", "open")


def test_refused_logs(tmp_path: Path) -> None:
    directory = benchmark_directory(tmp_path / "llama31_8b", [60.0 + i for i in range(10)], [200_000] * 10)
    one = scored_alone(directory, ("result_0.txt",))
    assert one.score_min == pytest.approx(65.5)
    assert one.runs[0].dropped == "slowest"
    two = scored_alone(directory, ("result_0.txt", "result_1.txt"))
    assert two.score_min == pytest.approx(64.5)
    assert (two.verdict, two.findings[0].rule) == ("fails", "score.refused")


def test_runs_that_do_not_belong_together(tmp_path: Path) -> None:
    directory = benchmark_directory(tmp_path / "here", [60.0 + i for i in range(10)], [200_000] * 10)
    write(directory / "result_4.txt", run_lines(60.0, benchmark="flux1", seed=4))
    result = scored_alone(directory)
    assert (result.score_min, result.unscaled_min, result.verdict) == (None, None, "fails")
    assert result.findings[0].found == "logs of flux1, llama31_8b"
    other = benchmark_directory(tmp_path / "there", [60.0 + i for i in range(10)], [200_000] * 10)
    write(other / "result_4.txt", (other / "result_5.txt").read_text().splitlines())
    twice = scored_alone(other)
    assert [found.found for found in twice.findings] == ["result_5.txt and result_4.txt are of one run"]


def test_few_runs_have_no_score(tmp_path: Path) -> None:
    for count in (1, 2):
        result = scored_alone(benchmark_directory(tmp_path / str(count), [60.0] * count, [200_000] * count))
        assert result.score_min is None
        assert result.findings[0].rule == "score.too_few"
    assert scored_alone(benchmark_directory(tmp_path / "3", [60.0] * 3, [200_000] * 3)).score_min == 60.0


def test_mini_runs_by_their_own_rules(tmp_path: Path) -> None:
    for count, expected in ((1, 5.0), (2, 5.5), (3, 6.0)):
        minutes = [5.0, 6.0, 9.0][:count]
        result = scored_alone(benchmark_directory(tmp_path / str(count), minutes, benchmark="llama31_8b_mini"))
        assert (result.score_min, result.verdict, result.convergence) == (expected, "mini", None)
    failed = benchmark_directory(tmp_path / "failed", [5.0], benchmark="llama31_8b_mini", status="aborted")
    missed = scored_alone(failed)
    assert (missed.score_min, missed.verdict) == (None, "mini")
    assert missed.findings[0].found == "no score: 1 of 1 runs did not reach the target"


def test_a_process_that_dies_costs_its_entry_alone(tmp_path: Path) -> None:
    worker = many._Worker()
    entries = [
        find([benchmark_directory(tmp_path / "v5.1" / str(i) / "llama31_8b", [60.0] * 10, [200_000] * 10)])[0]
        for i in range(2)
    ]
    assert worker.score(entries[0]) == scored.score_entry(entries[0])
    process = worker._process
    assert process is not None
    poisoned = dataclasses.replace(entries[0], logs=(Poison(),))  # type: ignore[arg-type]
    dead = worker.score(poisoned)
    assert (dead.verdict, dead.findings[-1].rule) == ("unread", "internal.died")
    assert worker.score(entries[1]) == scored.score_entry(entries[1])
    worker.stop()


class Poison:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return (os._exit, (7,))


def test_an_error_of_ours_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = benchmark_directory(tmp_path / "v5.1" / "llama31_8b", [60.0] * 10)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(scored, "run_time", broken)
    (result,) = score_all([directory])
    assert result.verdict == "unread"
    assert "ZeroDivisionError: oops" in result.findings[-1].found


def test_the_caller_may_stop_listening(tmp_path: Path) -> None:
    for i in range(20):
        benchmark_directory(tmp_path / "v5.1" / f"s{i:02}" / "llama31_8b", [60.0] * 3)
    entries = find([tmp_path])
    stream = many._parallel(entries, 2)
    assert next(stream).path == entries[0].path
    stream.close()
