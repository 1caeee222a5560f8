"""The reference-convergence test against the official checker: every reference, synthetic directories, odd ones."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.rcp_checker import rcp_checker

from score_runs import LOGS, benchmark_directory, needs_logs, run_lines, write
from timetrial.results import rounds
from timetrial.results.convergence import (
    Reference,
    choose,
    convergence_of,
    fastest_mean,
    judge,
    reference,
    reference_of,
    submission_runs,
    unit,
)
from timetrial.results.read import read
from timetrial.results.records import Convergence
from timetrial.results.runs import run_of
from timetrial.results.tree import find

SETS = [
    (round_, path.stem.removeprefix("rcps_"))
    for round_ in rounds.rounds()
    for path in sorted((rounds.package() / "rcp_checker" / f"training_{rounds.ruleset(round_)}").glob("rcps_*.json"))
]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.CRITICAL)
    # without a directory to write to it removes /scaling.json
    monkeypatch.setattr(rcp_checker.RCP_Checker, "_reset_results_scaling", lambda self, directory: None)


def official(benchmark: str, round_: str) -> Any:
    return rcp_checker.RCP_Checker("training", rounds.ruleset(round_), benchmark, False)


def official_verdict(checker: Any, gbs: int, values: list[float], name: str) -> tuple[bool, float]:
    """What check_directory does behind its reading (rcp_checker.py:528-556), for runs with these values."""
    record = checker._find_rcp(gbs, name)
    if record is None:
        low, high = checker._find_top_min_rcp(gbs, name), checker._find_bottom_max_rcp(gbs, name)
        if low is not None and high is not None:
            _, record = checker._create_interp_rcp(gbs, low, high)
        elif low is not None:
            return False, 1.0
        else:
            record = checker._find_min_rcp(name)
    passed, factor = checker._eval_submission_record(dict(record), list(values), "")
    return bool(passed), float(factor)


def test_rounds_are_those_of_the_issue() -> None:
    assert rounds.rounds() == ("v4.0", "v4.1", "v5.0", "v5.1", "v6.0", "v6.1")
    assert len(SETS) > 40


@pytest.mark.parametrize(("round_", "benchmark"), SETS, ids=lambda value: str(value))
def test_points_and_verdicts_are_the_checkers(round_: str, benchmark: str) -> None:
    checker = official(benchmark, round_)
    ours = reference(benchmark, round_)
    assert ours is not None
    assert ours.submission_runs == checker.submission_runs == submission_runs(benchmark)
    for points, records in ((ours.full, checker.rcp_data), (ours.pruned, checker.pruned_rcp_data)):
        assert [p.gbs for p in points] == [r["BS"] for r in records.values()]
        for point, record in zip(points, records.values(), strict=True):
            assert point.mean == record["RCP Mean"]
            assert point.stdev == record["RCP Stdev"]
            assert point.fastest == pytest.approx(record["Min Epochs"], rel=1e-12)
            assert point.speedup == pytest.approx(record["Max Speedup"], rel=1e-12)
    dice = random.Random(f"{round_}{benchmark}")
    sizes = {p.gbs for p in ours.full}
    least, most = min(sizes), max(sizes)
    for full in (False, True):
        for gbs in (*sizes, max(1, least - 1), least + 1, (least + most) // 2, most - 1, most + 1):
            compare(ours, checker, int(gbs), full, dice)


def compare(ours: Reference, checker: Any, gbs: int, full: bool, dice: random.Random) -> None:
    choice = choose(ours, gbs, full)
    name = "full_rcps" if full else "pruned_rcps"
    count = ours.submission_runs
    if choice.point is None:
        assert official_verdict(checker, gbs, [1.0] * count, name)[0] is False
        return
    _, _, turn = judge(ours, choice.point, choice.point.mean)
    for mean in (turn - 0.01, turn + 0.01, choice.point.mean, 1.1 * choice.point.mean, dice.uniform(0.8, 1.2) * turn):
        if mean <= 0:
            continue
        passed, factor, _ = judge(ours, choice.point, mean)
        expected = official_verdict(checker, gbs, [mean] * count, name)
        got = (passed, pytest.approx(factor, rel=1e-12))
        if mean != choice.point.mean:  # where the turn is the mean itself a sum's last digit decides
            assert expected == got, (gbs, full, mean)


def test_the_turning_point_is_the_bisections() -> None:
    checker = official("llama31_8b", "v5.1")
    dice = random.Random(0)
    for _ in range(200):
        mean, runs = dice.choice([1.0, 40.0, 5e3, 3e5, 2e9]) * dice.uniform(0.5, 2), dice.randrange(2, 90)
        stdev = mean * dice.choice([0.0, 1e-6, 0.01, 0.1, 1.0, 5.0])
        checker.submission_runs = dice.choice([3, 5, 10, 40])
        expected = checker._find_min_acceptable_mean(mean, stdev, runs)
        assert fastest_mean(mean, stdev, runs, checker.submission_runs) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def of_directory(directory: Path, round_: str, full: bool = False) -> Convergence:
    (entry,) = find([directory], round_)
    runs = [run_of(read(log), entry) for log in entry.logs]
    sizes = {run.gbs for run in runs}
    return convergence_of(runs, runs[0].benchmark, round_, sizes.pop() if len(sizes) == 1 else None, full)


def assert_official(directory: Path, round_: str) -> Convergence:
    """Ours and the official check_directory agree on a directory, against pruned and full points."""
    for full, name in ((True, "full_rcps"), (False, "pruned_rcps")):
        ours = of_directory(directory, round_, full)
        passed, message, factor = rcp_checker.check_directory(
            str(directory), "training", rounds.ruleset(round_), False, False, rcp_pass=name
        )
        assert ours.passed == passed, (ours, message)
        if passed:
            assert ours.scaling_factor == pytest.approx(factor, rel=1e-12)
    return ours


@needs_logs
@pytest.mark.parametrize(
    "directory", sorted(LOGS.glob("v*/*/results/*/*")) if LOGS.is_dir() else [], ids=lambda p: "-".join(p.parts[-4:])
)
def test_published_directories(directory: Path) -> None:
    assert_official(directory, directory.parts[-5])


@pytest.mark.parametrize(
    ("samples", "gbs", "passed", "factor"),
    [
        (172_032, 32, False, 1.0),
        (175_104, 32, True, 1.0214),  # the facts' example, loadgen_and_mllog.md section 2
        (200_000, 32, True, 1.0),
        (175_000, 40, False, 1.0),  # between 32 and 64
        (186_000, 40, True, 1.0259),
        (230_000, 40, True, 1.0),
        (400_000, 1024, False, 1.0),  # above the largest
        (170_000, 8, True, 1.0),  # below the smallest, slower
        (100_000, 8, False, 1.0),
    ],
)
def test_made_directories(tmp_path: Path, samples: int, gbs: int, passed: bool, factor: float) -> None:
    directory = benchmark_directory(tmp_path / "llama31_8b", [60.0] * 10, [samples] * 10, gbs=gbs)
    ours = assert_official(directory, "v5.1")
    assert ours.passed is passed
    assert ours.scaling_factor == pytest.approx(factor, abs=1e-4)


def test_405b_may_be_an_evaluation_faster(tmp_path: Path) -> None:
    point = choose(reference("llama31_405b", "v5.1"), 1152).point  # type: ignore[arg-type]
    assert point is not None
    for i, (mean, passed) in enumerate([(point.fastest - 46_080, True), (point.fastest - 46_081, False)]):
        made = benchmark_directory(tmp_path / str(i), [90.0] * 3, [mean] * 3, benchmark="llama31_405b", gbs=1152)
        assert assert_official(made, "v5.1").passed is passed


def test_one_run_may_fail_and_two_may_not(tmp_path: Path) -> None:
    directory = benchmark_directory(tmp_path / "llama31_8b", [60.0] * 10, [200_000] * 10)
    write(directory / "result_3.txt", run_lines(70.0, status="aborted", seed=3))
    assert assert_official(directory, "v5.1").passed is True
    write(directory / "result_4.txt", run_lines(70.0, status=None, seed=4))
    ours = assert_official(directory, "v5.1")
    assert ours.passed is False
    assert ours.samples_mean is None
    assert "2 runs did not converge" in ours.why


def test_epochs_are_rounded_as_the_checker_does(tmp_path: Path) -> None:
    options = {"benchmark": "dlrm_dcnv2", "gbs": 55296, "position": "epoch_num"}
    directory = tmp_path / "dlrm_dcnv2"
    for i in range(10):
        write(directory / f"result_{i}.txt", run_lines(3.0, samples=(0.7004, 0.7503999), seed=i, **options))
    ours = assert_official(directory, "v5.1")
    assert ours.samples_mean == pytest.approx(0.75)
    assert ours.unit == "epoch_fraction"
    assert unit("retinanet") == "epochs"


def diffusion(directory: Path, scores: list[tuple[int, float | None, float | None]]) -> Path:
    from score_runs import line

    for i in range(10):
        lines = run_lines(15.0, samples=(), benchmark="stable_diffusion", gbs=256, seed=i, offset=i * 10_000_000)
        stop = lines.pop()
        for count, fid, clip in scores:
            if clip is not None:
                lines.append(line("eval_accuracy", clip, 0, samples_count=count, metric="CLIP"))
            if fid is not None:
                lines.append(line("eval_accuracy", fid, 0, samples_count=count, metric="FID"))
        write(directory / f"result_{i}.txt", [*lines, stop])
    return directory


def test_diffusion_counts_the_first_that_passes_both(tmp_path: Path) -> None:
    scores = [(2_048_000, 80.0, 0.17), (1_024_000, 95.0, 0.2), (1_536_000, 89.0, 0.14), (2_560_000, 70.0, 0.2)]
    ours = assert_official(diffusion(tmp_path / "stable_diffusion", scores), "v5.0")
    assert ours.samples_mean == 2_048_000
    assert ours.passed
    half = diffusion(tmp_path / "half", [(2_048_000, 80.0, None), (2_560_000, 70.0, 0.2)])
    with pytest.raises(KeyError):  # the official one ends in a traceback
        rcp_checker.check_directory(str(half), "training", "5.0.0", False, False, rcp_pass="pruned_rcps")
    (entry,) = find([half], "v5.0")
    run = run_of(read(entry.logs[0]), entry)
    assert run.samples is None
    assert [found.found for found in run.findings if found.level == "fail"] == ["no CLIP after 2048000 samples"]


def test_synthetic_references_are_pruned_as_the_checker_does(tmp_path: Path) -> None:
    dice = random.Random(7)
    for trial in range(40):
        sizes = dice.sample(range(8, 4096, 8), dice.randrange(1, 9))
        records = {
            f"r{size}": {
                "Benchmark": "llama31_8b",
                "BS": size,
                "Hyperparams": {},
                "Epochs to converge": [dice.randrange(100_000, 300_000) for _ in range(20)],
            }
            for size in sizes
        }
        path = tmp_path / f"{trial}.json"
        path.write_text(json.dumps(records))
        with path.open() as file:
            checker = rcp_checker.RCP_Checker("training", "5.1.0", "llama31_8b", False, file)
        ours = reference_of(records, "llama31_8b", "v5.1")
        assert [p.gbs for p in ours.pruned] == [r["BS"] for r in checker.pruned_rcp_data.values()]
        for gbs in (*sizes, *dice.sample(range(4, 5000), 5)):
            compare(ours, checker, gbs, bool(trial % 2), dice)


def test_what_cannot_be_tested_is_said(tmp_path: Path) -> None:
    directory = benchmark_directory(tmp_path / "llama31_8b", [60.0] * 10, gbs=32)
    (entry,) = find([directory], "v5.1")
    runs = [run_of(read(log), entry) for log in entry.logs]
    assert convergence_of(runs, "no_such", "v5.1", 32).passed is None
    assert convergence_of(runs, "llama31_8b", "v4.0", 32).why == "v4.0 has no reference for llama31_8b."
    assert convergence_of(runs, "llama31_8b", "v5.1", None).passed is False
    assert convergence_of(runs[:2], "llama31_8b", "v5.1", 32).passed is None
    assert "above the largest batch size" in convergence_of(runs, "llama31_8b", "v5.1", 10**6).why
