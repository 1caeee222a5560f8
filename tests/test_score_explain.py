"""Where the time of a run went: published figures of real logs, and intervals as bad as they come."""

from __future__ import annotations

import csv
import dataclasses
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from score_events import event, log
from timetrial.results.breakdown import explain, figure, run_time
from timetrial.results.intervals import parts
from timetrial.results.margin import (
    convergence_sentence,
    eval_interval,
    evals_to_fastest,
    quality_margin,
    quality_sentence,
)
from timetrial.results.read import read
from timetrial.results.records import Convergence, Energy, Run, RunTime

LOGS = Path(__file__).resolve().parents[2] / "shared/logs"
TABLE = Path(__file__).resolve().parents[2] / "shared/facts/published_results.csv"
DIRECTORIES = sorted({path.parent for path in LOGS.glob("*/*/results/*/*/result_*.txt")}) if LOGS.is_dir() else []


def row_of(directory: Path) -> dict[str, str] | None:
    round_, org, _, system, benchmark = directory.relative_to(LOGS).parts
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["round"], row["org_dir"], row["system_id"], row["benchmark"]) == (round_, org, system, benchmark):
                return row
    return None


def times_of(directory: Path, accelerators: int | None = 8, accelerator: str = "") -> list[RunTime]:
    """Those of the runs that have a run_stop, as the table takes them."""
    files = sorted(directory.glob("result_*.txt"))
    times = [run_time(read(file), directory.name, accelerators, accelerator) for file in files]
    return [time for time in times if time.total_s is not None]


def rounded(text: str) -> float:
    """Half a unit of the last digit that the table gives."""
    return 0.5000001 * 10.0 ** -len(text.partition(".")[2])


def median(values: list[float | None]) -> float:
    return statistics.median([value for value in values if value is not None])


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda d: "-".join(d.parts[-5:-3] + d.parts[-2:]))
def test_published_directory(directory: Path) -> None:
    row = row_of(directory)
    times = times_of(directory)
    for time in times:
        milliseconds = [round(1000 * (part or 0)) for part in (time.train_s, time.eval_s, time.gap_s)]
        assert sum(milliseconds) == round(1000 * (time.total_s or 0))
        assert min(milliseconds) >= 0
    if row is None:  # v5.0 AMD MI325X: not in the table; its figures are the same arithmetic
        for time in times:
            assert (time.steps or 0) * (time.step_s or 0) == pytest.approx(time.train_s, rel=0.02)
        return
    assert median([time.init_s for time in times]) == pytest.approx(float(row["init_s"]), abs=rounded(row["init_s"]))
    evaluation = median([(time.eval_s or 0) + (time.eval_off_clock_s or 0) for time in times])
    assert evaluation == pytest.approx(float(row["eval_s_per_run"]), abs=rounded(row["eval_s_per_run"]))
    step = median([time.step_s for time in times])
    assert step > 0
    if not row["step_time_s"]:
        # The table has none where throughput is not logged, or is not trusted (R-GAT).
        assert row["benchmark"] in ("rgat", "retinanet", "bert")
        return
    if directory.name == "llama31_405b" and row["round"] == "v5.0":
        # The table counts the six block means of each log as steps; see the next test.
        assert step == pytest.approx(float(row["step_time_s"]), rel=2e-5)
        return
    assert step == pytest.approx(float(row["step_time_s"]), abs=rounded(row["step_time_s"]))
    assert median([time.samples_per_s for time in times]) == pytest.approx(float(row["samples_per_s"]), rel=1e-4)
    if row["step_time_p10"]:
        assert median([t.step_p10_s for t in times]) == pytest.approx(float(row["step_time_p10"]), abs=5.1e-6)
        assert median([t.step_p90_s for t in times]) == pytest.approx(float(row["step_time_p90"]), abs=5.1e-6)


@pytest.mark.skipif(not DIRECTORIES, reason="no logs")
def test_block_means_are_no_steps() -> None:
    """NVIDIA's v5.0 logs have 240 steps and 6 block means; with these the table's figure comes out."""
    directory = LOGS / "v5.0/NVIDIA/results/eos-dfw_n64_ngc25.01_nemo/llama31_405b"
    row = row_of(directory)
    assert row is not None
    medians = []
    for file in sorted(directory.glob("result_*.txt")):
        stats = [one.value for one in read(file).all("tracked_stats")]
        everything = [value["train_step_time"] for value in stats if "train_step_time" in value]
        steps = [value["train_step_time"] for value in stats if "reduced_train_loss" in value]
        assert (len(everything), len(steps)) == (246, 240)
        medians.append(statistics.median(everything[3:]))
        assert run_time(read(file), "llama31_405b", 512, "").step_s == statistics.median(steps[3:])
    assert f"{statistics.median(medians):.5f}" == row["step_time_s"]


@pytest.mark.skipif(not DIRECTORIES, reason="no logs")
def test_flops_of_published_rows() -> None:
    """512 H100 on 405B: 878 TFLOP/s; the vendor's own benchmark gives 877 (facts, ground_truth.md)."""
    (first, *_) = times_of(
        LOGS / "v5.0/NVIDIA/results/eos-dfw_n64_ngc25.01_nemo/llama31_405b", 512, "NVIDIA H100-SXM5-80GB"
    )
    assert first.tflops_per_accelerator == pytest.approx(877, rel=0.01)
    assert first.mfu == pytest.approx(first.tflops_per_accelerator / 989.5)
    assert "bf16" in first.mfu_basis
    assert "does not name its format" in first.mfu_basis
    assert "not halved" in first.mfu_basis
    text = " ".join(explain(first))
    assert "95.7 % training, 4.3 % evaluation" in text
    assert "240 steps of" in text


@pytest.mark.skipif(not DIRECTORIES, reason="no logs")
def test_asynchronous_evaluation_is_told() -> None:
    for time in times_of(LOGS / "v5.1/NVIDIA/results/tyche_ngpu8_ngc25.04_pytorch/retinanet"):
        assert time.overlap_s is not None
        assert 10 < time.overlap_s < (time.eval_s or 0)
        assert time.steps == 18_286
    for time in times_of(LOGS / "v5.0/NVIDIA/results/nyx_n1_ngc25.03_hugectr/dlrm_dcnv2"):
        assert time.overlap_s is None, "an evaluation within an epoch stops training"


# ---- intervals -----------------------------------------------------------------------------------------------


def split(*events: tuple[float, str]) -> tuple[int | None, int | None, int | None]:
    found = parts([event(0, "run_start"), *(event(*one) for one in events), event(100, "run_stop")])
    return found.train_ms, found.eval_ms, found.gap_ms


CASES = {
    "plain": (((0, "block_start"), (40, "block_stop"), (40, "eval_start"), (50, "eval_stop")), (40, 10, 50)),
    "evaluation inside a block": (
        ((0, "block_start"), (40, "eval_start"), (50, "eval_stop"), (90, "block_stop")),
        (80, 10, 10),
    ),
    "block begins before the evaluation ends": (
        (
            *((0, "block_start"), (40, "block_stop"), (40, "eval_start"), (45, "block_start")),
            *((60, "eval_stop"), (100, "block_stop")),
        ),
        (80, 20, 0),
    ),
    "no block_stop": (
        (
            *((0, "block_start"), (40, "eval_start"), (50, "eval_stop")),
            *((50, "block_start"), (70, "block_stop")),
        ),
        (60, 10, 30),
    ),
    "last block open": (((10, "block_start"),), (90, None, 10)),
    "nested and interleaved ranks": (
        ((0, "block_start"), (1, "block_start"), (40, "block_stop"), (41, "block_stop")),
        (41, None, 59),
    ),
    "a rank without a stop": (((0, "block_start"), (1, "block_start"), (40, "block_stop")), (40, None, 60)),
    "no eval_stop": (
        (
            *((0, "block_start"), (40, "block_stop"), (40, "eval_start"), (48, "eval_accuracy")),
            *((50, "block_start"), (100, "block_stop")),
        ),
        (90, 8, 2),
    ),
    "epochs": (((5, "epoch_start"), (50, "eval_start"), (60, "eval_stop"), (95, "epoch_stop")), (80, 10, 10)),
    "an epoch around blocks": (
        ((0, "epoch_start"), (10, "block_start"), (30, "block_stop"), (99, "epoch_stop")),
        (20, None, 80),
    ),
    "stops alone": (((10, "block_stop"), (20, "eval_stop")), (None, None, None)),
    "clock backwards": (
        ((50, "block_start"), (20, "block_stop"), (60, "block_start"), (70, "block_stop")),
        (10, None, 90),
    ),
    "beyond the clock": (
        ((-50, "block_start"), (50, "block_stop"), (90, "eval_start"), (150, "eval_stop")),
        (50, 10, 40),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_intervals(name: str) -> None:
    events, wanted = CASES[name]
    assert split(*events) == tuple(None if one is None else 1000 * one for one in wanted)


KEYS = ["block_start", "block_stop", "epoch_start", "epoch_stop", "eval_start", "eval_stop", "eval_accuracy"]
EVENTS = st.lists(
    st.tuples(st.integers(-10, 120), st.sampled_from([*KEYS, "run_start", "run_stop", "init_start"])), max_size=40
)


@settings(max_examples=400, deadline=None)
@given(EVENTS)
def test_parts_never_exceed_the_whole(events: list[tuple[int, str]]) -> None:
    found = parts([event(*one) for one in events])
    for part in (found.init_ms, found.total_ms, found.train_ms, found.eval_ms, found.gap_ms, found.overlap_ms):
        assert part is None or part >= 0
    assert found.eval_off_ms >= 0
    if found.total_ms is not None and found.train_ms is not None:
        assert found.train_ms + (found.eval_ms or 0) + (found.gap_ms or 0) == found.total_ms
    assert found.overlap_ms <= (found.eval_ms or 0)


def test_without_run_stop_steps_are_still_told() -> None:
    steps = [event(i, "tracked_stats", {"train_step_time": 1.0}) for i in range(1, 8)]
    time = run_time(log(event(0, "run_start"), event(0, "block_start"), *steps), "llama31_8b", 8, "")
    assert (time.total_s, time.train_s, time.gap_s) == (None, None, None)
    assert (time.step_s, time.steps) == (1.0, 7)


# ---- steps ---------------------------------------------------------------------------------------------------


def run_of(durations: list[float], gbs: int = 4, **more: object) -> RunTime:
    moment, steps = 0.0, []
    for seconds in durations:
        moment += seconds
        steps.append(event(moment, "tracked_stats", {"train_step_time": seconds}))
    stop = event(moment, "run_stop", samples_count=gbs * len(durations))
    head = [event(0, "global_batch_size", gbs), *(event(0, key, value) for key, value in more.items())]
    body = [event(0, "run_start"), event(0, "block_start"), *steps, event(moment, "block_stop"), stop]
    return run_time(log(*head, *body), "llama31_8b", 2, "NVIDIA H100-SXM5-80GB")


def test_slow_start_spread_and_stragglers() -> None:
    time = run_of([9.0, 3.0, 2.0] + [1.0] * 10 + [5.0] + [1.0] * 10 + [1.2] * 3)
    assert time.step_s == 1.0
    assert time.slow_first_s == pytest.approx(11.0)
    assert time.stragglers == ((14, 5.0),)
    assert (time.step_p10_s, time.step_p90_s) == (1.0, 1.2)
    text = explain(time)
    assert any("first 3 steps took 11 s longer" in line for line in text)
    assert any("1 step over twice the median: 4 s lost" in line for line in text)


def test_many_stragglers_stay_few() -> None:
    time = run_of([1.0] * 1200 + [3.0] * 500)
    assert time.stragglers_count == 500
    assert len(time.stragglers) == 100


def test_lowest_format_of_the_log_is_the_peak() -> None:
    time = run_of([1.0] * 8, lowest_numerical_precision_in_linear="fp8")
    assert time.tflops_per_accelerator == pytest.approx(4 * 421.59 / 2)
    assert time.mfu == pytest.approx(4 * 421.59 / 2 / 1979)
    assert "fp8" in time.mfu_basis
    no_peak = run_of([1.0] * 8, lowest_numerical_precision_in_linear="nvfp4")
    assert no_peak.mfu is None
    assert "no peak for nvfp4" in no_peak.mfu_basis


def test_another_length_has_no_flops() -> None:
    time = run_of([1.0] * 8, max_sequence_length=4096)
    assert time.tflops_per_accelerator is None
    assert "8192 tokens a sample, the log has 4096" in time.flops_basis


def test_a_rate_of_one_accelerator_is_not_believed() -> None:
    """SSD's logs of v4 give the throughput of one GPU in many cases."""
    events = [event(0, "global_batch_size", 80), event(0, "run_start"), event(0, "block_start", samples_count=0)]
    events += [event(100, "tracked_stats", {"throughput": 10.0}), event(100, "block_stop")]
    events += [event(100, "run_stop", samples_count=8000)]
    time = run_time(log(*events), "llama31_8b", 8, "")
    assert time.step_s == pytest.approx(1.0)
    assert "does not fit the clock" in time.step_source


def test_values_that_are_no_numbers() -> None:
    bad = [{"train_step_time": value} for value in ("1", None, True, -1.0, float("nan"), float("inf"), [], 10**400)]
    events = [event(1, "tracked_stats", value) for value in bad] + [event(1, "global_batch_size", "x")]
    time = run_time(log(event(0, "run_start"), *events, event(2, "run_stop")), "llama31_8b", None, "")
    assert time.step_s is None
    assert time.step_source.startswith("none")
    assert explain(time)


def test_numbers_are_written_in_full_and_the_basis_apart() -> None:
    time = run_of([1.0] * 8)
    large = dataclasses.replace(time, samples_per_s=16_708_912.0, tflops_per_accelerator=186_631.4, step_s=1.0)
    text = explain(large, energy=Energy(8.4e11, 1.2e8, 1, "meter"))
    assert "16,709,000 samples/s while training." in text
    assert any(line.startswith("186,631 model TFLOP/s per accelerator, MFU ") and len(line) < 70 for line in text)
    assert any(line.startswith("MFU is of the dense bf16 peak, 989.5 TFLOP/s") for line in text)
    assert any(line.startswith("Model FLOPs: 421.59 TFLOP a sample") for line in text)
    assert "Energy 233,300 kWh, 120,000 kW on average over 1 run." in text
    assert not any("e+" in line for line in text)
    assert [figure(x) for x in (0.5, 1234.5, 0.012345)] == ["0.5", "1,234", "0.01235"]  # halves go to even


def test_a_log_of_several_runs_has_no_parts() -> None:
    def starts(apart: float) -> RunTime:
        body = [event(0, "run_start"), event(apart, "run_start"), event(apart, "block_start")]
        return run_time(log(*body, event(500, "block_stop"), event(500, "run_stop")), "llama31_8b", 8, "")

    ranks, several = starts(3), starts(300)
    assert (ranks.doubt, ranks.train_s) == ("", 497)
    assert (several.train_s, several.steps, several.samples_per_s) == (None, None, None)
    assert several.total_s is not None
    assert explain(several) == [several.doubt]
    assert "2 times run_start, 5 min apart" in several.doubt


# ---- margins -------------------------------------------------------------------------------------------------


def convergence(mean: float) -> Convergence:
    return Convergence(True, mean, 178858.7, 7165.0, 173_700.0, "one point", 1.0, "computed", "samples")


def test_evaluations_to_the_fastest_allowed() -> None:
    every = eval_interval("llama31_8b", "v5.1", 32)
    assert every == 12_288
    assert evals_to_fastest(173_700 - 2 * 12_288, 173_700, every) == pytest.approx(-2)
    assert "2.0 evaluations faster than the fastest allowed" in convergence_sentence(convergence(149_124), every)
    assert "1.0 evaluations slower than the fastest allowed" in convergence_sentence(convergence(185_988), every)
    assert evals_to_fastest(None, 1, 1) is None


@pytest.mark.parametrize(
    ("benchmark", "round_", "gbs", "wanted"),
    [
        ("llama31_405b", "v5.0", 1152, 46_080),
        ("llama31_405b", "v5.1", 1152, 18_432),
        ("llama2_70b_lora", "v5.1", 9, 387),
        ("deepseekv3_671b", "v6.0", 16_384, 16_384),
        ("bert", "v5.0", 448, 150_000),
        ("rgat", "v5.0", None, 0.05),
        ("unet3d", "v4.0", 7, None),
    ],
)
def test_interval(benchmark: str, round_: str, gbs: int | None, wanted: float | None) -> None:
    assert eval_interval(benchmark, round_, gbs) == wanted


def test_quality_left_at_the_target() -> None:
    assert quality_margin(3.29, 3.3, lower_is_better=True) == pytest.approx(0.01 / 3.3)
    assert quality_margin(0.71, 0.72, lower_is_better=False) == pytest.approx(-0.01 / 0.72)
    assert "beyond the target 0.925" in (quality_sentence("llama2_70b_lora", "v5.1", 0.92) or "")
    assert "short of the target 0.720" in (quality_sentence("bert", "v5.0", 0.70) or "")
    assert quality_sentence("stable_diffusion", "v5.0", 80.0) is None


def test_a_run_is_set_against_its_target() -> None:
    time = run_of([1.0] * 8)
    run = Run(Path("result_0.txt"), True, "success", 1.0, 185_988, 3.29, 4, 1, time=time)
    lines = explain(run, benchmark="llama31_8b", round_="v5.1")
    assert lines[:-1] == explain(time)
    assert lines[-1] == "Last validation log perplexity 3.29: 0.3 % beyond the target 3.3."
    assert explain(Run(Path("x"), False, "unreadable", None, None, None, None, None)) == []


def test_energy_sentence() -> None:
    lines = explain(run_of([1.0] * 8), convergence(185_988), 12_288, Energy(3.6e6, 9_105, 8, "power logs"))
    assert "Energy 1 kWh, 9.105 kW on average over 8 runs." in lines
