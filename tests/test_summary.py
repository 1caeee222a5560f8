"""What result.json says of a run: its figures, and whether it may be called an MLPerf result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from timetrial.config import RunConfig, override
from timetrial.data.tokenfile import Meta, Part, write_meta
from timetrial.results import mllog, official_data, summary
from timetrial.workloads.workload import resolve

C4_FILE = 356_318
"""Documents of one C4 training file; some have one less."""
MINI = resolve("llama31_8b", "mini")


def write(directory: Path, source: str, **splits: list[tuple[str, int]]) -> Path:
    """Descriptions of token files that hold these (part, documents)."""
    for split, parts in splits.items():
        (directory / split).mkdir(parents=True)
        made = tuple(Part(name, documents, tokens=documents * 400, sha256={}) for name, documents in parts)
        write_meta(directory / split, Meta(source, "tokenizer", "0" * 64, 128_256, "rebuild", made))
    return directory


def c4_files(count: int, documents: int = C4_FILE) -> list[tuple[str, int]]:
    return [(f"{768 + i:05d}", documents) for i in range(count)]


def official(name: str, data: Path) -> RunConfig:
    return override(resolve(name, "official"), "data.path", str(data))


VALIDATION = [("validation", 91_205)]
EN_6, EN_7 = (f"c4-train.en_{i}_text_document" for i in (6, 7))


@pytest.mark.parametrize(
    ("name", "train", "heldout", "expected"),
    [
        ("llama31_8b", c4_files(128), VALIDATION, []),
        ("llama31_8b", c4_files(256, C4_FILE - 1), VALIDATION, []),
        ("llama31_8b", [(EN_6, 128 * C4_FILE)], VALIDATION, []),
        ("llama31_8b", [(EN_7, 128 * C4_FILE)], VALIDATION, ["0 of 128 whole C4 training files"]),
        ("llama31_8b", c4_files(1), VALIDATION, ["1 of 128 whole C4 training files"]),
        ("llama31_8b", [*c4_files(127), ("00895", 1000)], VALIDATION, ["127 of 128 whole C4 training files"]),
        ("llama31_8b", c4_files(128), [("validation", 1024)], ["1,024 of 91,205 C4 validation documents"]),
        ("llama31_405b", c4_files(256), VALIDATION, []),
        ("llama31_405b", c4_files(128), VALIDATION, ["128 of 256 whole C4 training files"]),
        ("llama31_405b", [(EN_6, 128 * C4_FILE), (EN_7, 128 * C4_FILE)], VALIDATION, []),
        ("llama31_405b", [(EN_6, 128 * C4_FILE)], VALIDATION, ["128 of 256 whole C4 training files"]),
        ("llama2_70b_lora", [("train", 3901)], [("validation", 173)], []),
        ("llama2_70b_lora", [("train", 200)], [("validation", 173)], ["200 of 3,901 train sequences"]),
        ("llama2_70b_lora", [("train", 3901)], [("validation", 172)], ["172 of 173 heldout sequences"]),
    ],
)
def test_what_lacks_in_the_data_is_told(
    name: str, train: list[tuple[str, int]], heldout: list[tuple[str, int]], expected: list[str], tmp_path: Path
) -> None:
    config = official(name, write(tmp_path / "data", "any", train=train, heldout=heldout))
    assert official_data.gaps(config) == expected
    text = mllog.notice(config)
    assert (text is None) == (not expected)
    assert all(gap in str(text) for gap in expected)


def test_data_of_which_nothing_is_known_is_no_official_data(tmp_path: Path) -> None:
    config = resolve("llama31_8b", "official")
    assert official_data.gaps(config) == ["no data"]
    assert official_data.gaps(official("llama31_8b", tmp_path)) == ["data that cannot be read"]
    assert official_data.gaps(override(config, "data.source", "sotu")) == ["data source sotu"]


@pytest.mark.parametrize("status", ["success", "aborted", "stopped"])
def test_only_an_official_run_on_all_data_that_succeeded_is_a_result(status: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", "c4", train=c4_files(128), heldout=VALIDATION)
    part = write(tmp_path / "part", "c4", train=c4_files(2), heldout=VALIDATION)
    good = summary.summarize(official("llama31_8b", whole), *run(), status)
    assert good["mlperf_result"] is (status == "success")
    assert ("not an MLPerf result" in good["notice"]) == (status != "success")
    changed = override(official("llama31_8b", whole), "model.n_layers", "2")
    for config in (MINI, official("llama31_8b", part), changed):
        result = summary.summarize(config, *run(), status)
        assert result["mlperf_result"] is False
        assert "not an MLPerf result" in result["notice"]


# ---- figures -------------------------------------------------------------------------------------

STEP_S = (9.0, 2.0, 2.0, 1.0, 1.0, 3.0)
"""The first three are not in the median."""


def run(evaluation_s: float = 4.0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics and evaluations of six steps of 8 samples, with an evaluation after the third and the last."""
    metrics: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    elapsed = 0.0
    for index, seconds in enumerate(STEP_S, 1):
        elapsed += seconds
        metrics.append(
            {"step": index, "samples": 8 * index, "step_time_s": seconds, "mfu": None, "elapsed_s": elapsed,
             "phases": {"data": 0.5}}
        )  # fmt: skip
        if index in (3, 6):
            elapsed += evaluation_s
            evaluations.append({"step": index, "samples": 8 * index, "value": 4.0, "elapsed_s": elapsed})
    return metrics, evaluations


def test_throughput_of_a_step_and_of_the_run() -> None:
    result = summary.summarize(MINI, *run(), "success")
    assert result["tokens_per_s"] == 8 * 128 / 1.0
    assert result["tokens_per_s_overall"] == 6 * 8 * 128 / (18.0 + 4.0)  # one evaluation before the last step
    table = summary.table(result, {})
    assert "1,024 tokens/s in a step (median), 279 overall" in table


def test_time_to_train_is_that_of_a_run_that_reached_its_target() -> None:
    success = summary.summarize(MINI, *run(), "success")
    assert success["time_to_train_s"] == success["elapsed_s"] == 26.0  # to the end of the last evaluation
    assert "time to train     26.0 s" in summary.table(success, {})
    for status in ("aborted", "stopped"):
        missed = summary.summarize(MINI, *run(), status)
        assert (missed["status"], missed["time_to_train_s"], missed["elapsed_s"]) == (status, None, 26.0)
        table = summary.table(missed, {})
        assert "time to train" not in table
        assert "ran for           26.0 s" in table
    metrics, evaluations = run()
    assert summary.summarize(MINI, metrics, evaluations[:1], "stopped")["elapsed_s"] == 22.0


def test_a_run_without_a_step_has_no_figures() -> None:
    result = summary.summarize(MINI, [], [], "stopped")
    assert (result["steps"], result["samples"], result["elapsed_s"]) == (0, 0, 0.0)
    assert result["tokens_per_s"] is result["tokens_per_s_overall"] is result["time_to_train_s"] is None
    assert "- in a step (median), - overall" in summary.table(result, {})
