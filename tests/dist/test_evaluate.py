"""Evaluation under a plan against one rank, and against the mean written out."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layouts import GBS, config_of, engine_of, model_of, samples
from world import run_world

from timetrial.config import Evaluation, Plan, RunConfig
from timetrial.data.samples import IGNORE
from timetrial.errors import RunFailed
from timetrial.train.evaluate import evaluate

COUNT = 5
"""Held-out samples: neither a multiple of the micro batch nor of the ranks."""
PLANS = {
    "one": Plan(mbs=2, precision="fp32"),
    "pp": Plan(pp=2, mbs=2, precision="fp32"),
    "pp interleaved": Plan(pp=2, vp=2, mbs=2, precision="fp32"),
    "pp v-shaped": Plan(pp=2, vp=2, mbs=2, schedule="zbv", precision="fp32"),
    "dp": Plan(dp=2, mbs=2, precision="fp32"),
    "tp": Plan(tp=2, mbs=2, precision="fp32"),
    "cp": Plan(cp=2, mbs=2, precision="fp32"),
}


class HeldOut:
    """Samples of very different numbers of counted tokens, from none to all."""

    def __init__(self) -> None:
        batch = samples(-1, COUNT)
        self.tokens, self.labels = batch["tokens"].numpy(), batch["labels"].numpy().copy()
        self.labels[0, :-1] = IGNORE  # one counted token
        self.labels[3] = IGNORE

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


def config(plan: Plan, average: str) -> RunConfig:
    evaluation = Evaluation("loss", 1.0, every_samples=1, samples=COUNT, average=average)
    return replace(config_of(replace(plan, gbs=GBS)), evaluation=evaluation)


def values(names: list[str]) -> dict[tuple[str, str], float]:
    torch.set_num_threads(1)
    found = {}
    for name in names:
        for average in ("tokens", "sequences"):
            run = config(PLANS[name], average)
            found[name, average] = evaluate(engine_of(run), HeldOut(), run)
    return found


@pytest.fixture(scope="module")
def on_two() -> list[dict[tuple[str, str], float]]:
    return run_world(values, 2, [name for name in PLANS if name != "one"])


def written_out(average: str) -> float:
    heldout, run = HeldOut(), config(PLANS["one"], average)
    model = model_of(run).double()
    with torch.no_grad():
        logits = model(torch.from_numpy(heldout.tokens))
    labels = torch.from_numpy(heldout.labels)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    counted = (labels != IGNORE).sum(dim=1)
    if average == "tokens":
        return float(losses.sum() / counted.sum())
    return float((losses.sum(dim=1) / counted)[counted > 0].mean())


@pytest.mark.parametrize("average", ["tokens", "sequences"])
def test_one_rank_gives_the_mean_written_out(average: str) -> None:
    assert values(["one"])["one", average] == pytest.approx(written_out(average), rel=1e-6)
    assert abs(written_out("tokens") - written_out("sequences")) > 1e-2  # else nothing is told apart


@pytest.mark.parametrize("average", ["tokens", "sequences"])
@pytest.mark.parametrize("name", [name for name in PLANS if name != "one"])
def test_every_plan_gives_one_ranks_value(name: str, average: str, on_two: list[dict[Any, float]]) -> None:
    for rank in on_two:
        assert rank[name, average] == pytest.approx(written_out(average), rel=1e-6)


def stub(*losses: float, counted: int = 3) -> Any:
    """An engine that gives these losses."""
    left = iter(losses)
    return SimpleNamespace(
        device=torch.device("cpu"), dp_rank=0, dp_size=1, reduce_sums=lambda x: x,
        eval_loss=lambda batch: (torch.tensor(next(left)), torch.tensor(counted)),
    )  # fmt: skip


def test_a_loss_that_is_not_a_number_is_not_counted_as_zero() -> None:
    run = config(PLANS["one"], "sequences")
    assert math.isnan(evaluate(stub(1.0, 2.0, math.nan, 1.0, 1.0), HeldOut(), run))
    assert math.isinf(evaluate(stub(1.0, 2.0, math.inf, 1.0, 1.0), HeldOut(), run))


@pytest.mark.parametrize("average", ["tokens", "sequences"])
def test_a_held_out_set_without_labels_ends_the_run(average: str) -> None:
    run = config(PLANS["one"], average)
    with pytest.raises(RunFailed, match="none of the 5 held-out samples has a counted token"):
        evaluate(stub(*[0.0] * COUNT, counted=0), HeldOut(), run)
