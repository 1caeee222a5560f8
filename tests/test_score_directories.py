"""The score of each directory of published logs is the published one, to four decimals."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from pathlib import Path

import pytest

from score_runs import LOGS, PUBLISHED, needs_logs
from timetrial.results.convergence import choose, judge, reference
from timetrial.results.many import score_all
from timetrial.results.read import read
from timetrial.results.runs import run_of
from timetrial.results.scoring import score
from timetrial.results.tree import find

DIRECTORIES = sorted(LOGS.glob("v*/*/results/*/*")) if LOGS.is_dir() else []


def rows() -> list[dict[str, str]]:
    with PUBLISHED.open() as file:
        return list(csv.DictReader(file))


def published(directory: Path) -> dict[str, str] | None:
    round_, organization, _, system, benchmark = directory.parts[-5:]
    wanted = (round_, organization, system, benchmark)
    found = [r for r in rows() if (r["round"], r["org_dir"], r["system_id"], r["benchmark"]) == wanted]
    return found[0] if found else None


def official(directory: Path) -> tuple[float, float]:
    """(score, factor) of the official summarizer."""
    from mlperf_logging.result_summarizer import result_summarizer as summarizer

    ruleset = directory.parts[-5].removeprefix("v") + ".0"
    with contextlib.redirect_stdout(io.StringIO()):
        got = summarizer._compute_strong_score_standalone(
            directory.name, directory.parent.name, False, str(directory), "training", ruleset
        )
    return got[0], got[2]


@needs_logs
@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: "/".join(path.parts[-5:]).replace("/results", ""))
def test_score_is_the_published_one(directory: Path) -> None:
    (entry,) = find([directory])
    result = score(entry, [run_of(read(log), entry) for log in entry.logs])
    assert result.score_min is not None
    assert result.unscaled_min is not None
    assert result.convergence is not None
    assert result.convergence.passed
    row = published(directory)
    if row is None:  # the table leaves some out: the official summarizer tells
        expected, factor = official(directory)
        assert result.score_min == pytest.approx(expected, rel=1e-12)
        assert result.convergence.scaling_factor == factor
        return
    assert round(result.score_min, 4) == float(row["ttt_min"])
    assert round(result.unscaled_min, 4) == float(row["ttt_olympic_unscaled_min"])
    assert round(result.convergence.scaling_factor, 6) == float(row["rcp_scaling_factor"])
    assert len(result.runs) == int(row["runs"])
    assert sum(not run.converged for run in result.runs) == int(row["runs_nonconverged"])
    assert result.gbs == int(row["global_batch_size"])
    assert (result.round, result.system, result.benchmark) == (row["round"], row["system_id"], row["benchmark"])
    assert result.accelerators == int(row["accelerators"])
    assert result.nodes == int(row["nodes"])
    assert result.accelerator == row["accelerator"]
    assert result.convergence.samples_mean == pytest.approx(
        float(row["converge_mean"]), abs=5e-4
    )  # the table rounds epochs less
    assert not [found for found in result.findings if found.level != "note"]


@needs_logs
def test_scaling_of_every_published_row_is_what_the_test_computes() -> None:
    """From the rows' mean samples to converge, which have four decimals."""
    checked = 0
    for row in rows():
        if not (row["converge_mean"] and row["rcp_scaling_factor"] and row["global_batch_size"]):
            continue
        if row["benchmark"] == "gpt3" and row["framework"].startswith("MaxText"):
            continue  # the table has its tokens, the reference's unit is another
        known = reference(row["benchmark"], row["round"])
        assert known is not None, row
        choice = choose(known, int(row["global_batch_size"]))
        assert choice.point is not None
        _, factor, _ = judge(known, choice.point, float(row["converge_mean"]))
        if row["benchmark"] == "ssd" and row["system_id"] == "R760x2H100NVL-PCIe-94GB":
            continue  # fails the test, and has no scaling.json
        if math.isclose(factor, 1.0) and row["benchmark"] == "gpt3":
            continue
        assert factor == pytest.approx(float(row["rcp_scaling_factor"]), rel=8e-4), row["source"]
        checked += 1
    assert checked > 600


@needs_logs
def test_a_whole_repository_in_processes_is_the_same_as_one_by_one() -> None:
    seen: list[tuple[int, int]] = []
    alone = list(score_all([LOGS], workers=1, progress=lambda done, total, path: seen.append((done, total))))
    assert [result.path for result in alone] == DIRECTORIES
    assert seen[-1] == (96, 96)
    import timetrial.results.many as many

    entries = find([LOGS])
    together = list(many._parallel(entries, 2))
    assert together == alone
    assert {result.verdict for result in alone} == {"stands"}
    assert all(run.time is not None for result in alone for run in result.runs if run.time_min)


@needs_logs
def test_the_official_checker_is_asked_where_wanted() -> None:
    directory = LOGS / "v5.0" / "tinycorp" / "results" / "tinybox_green" / "retinanet"
    (result,) = score_all([directory], official=True)
    assert result.official[0] == "4 of 5 logs pass"
    assert any(text.startswith("result_4.txt: ") and "run_stop" in text for text in result.official)
    (without,) = score_all([directory])
    assert (without.official, without.score_min) == ((), result.score_min)
