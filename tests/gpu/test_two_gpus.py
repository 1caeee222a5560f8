"""Layouts over NCCL against one GPU, through the command line. None of this has been run on GPUs yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import timetrial, tiny
from timetrial.results.summary import read_lines

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")

STEPS = 20


def curve(out: Path, nproc: int, plan: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    done = timetrial(
        "train", "llama31_8b", "--nproc", nproc, "--plan", f"precision=bf16,{plan}", "--max-steps", STEPS, "--out", out,
        *tiny("model.n_kv_heads=2", "model.dim=64", "data.seq_len=64", "plan.mbs=1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(row["loss"], row["grad_norm"]) for row in read_lines(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return curve(tmp_path_factory.mktemp("alone") / "run", 1, "dp=1")


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2", "tp=2", "cp=2", "pp=2", "dp=2,graph=true", "tp=2,graph=true", "cp=2,graph=true",
        "dp=2,recompute=full,graph=true", "dp=2,compile=true", "tp=2,compile=true", "tp=2,compile=true,async_tp=true",
    ],
)  # fmt: skip
def test_two_gpus_train_as_one(plan: str, alone: list[tuple[float, float]], tmp_path: Path) -> None:
    found = curve(tmp_path / "run", 2, plan)
    assert len(found) == STEPS
    for (loss, norm), (loss_alone, norm_alone) in zip(found, alone, strict=True):
        assert abs(loss - loss_alone) < 2e-2
        assert abs(norm - norm_alone) < 5e-2 * norm_alone


def test_a_graph_on_one_gpu_trains_as_without(alone: list[tuple[float, float]], tmp_path: Path) -> None:
    found = curve(tmp_path / "run", 1, "dp=1,graph=true")
    for (loss, _), (loss_alone, _) in zip(found, alone, strict=True):
        assert abs(loss - loss_alone) < 2e-2
