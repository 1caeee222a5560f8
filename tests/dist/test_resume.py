"""A run saved under one plan and taken up under another: the same bits before the next step, one rank's curve after.

The chain has a pipeline whose first stage holds the embedding alone, and so lacks the optimizer's second
group; hybrid sharding, of which each shard lies on two ranks; and, at the end, one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from layouts import CLIP, GBS, MODEL, config_of, engine_of, samples, share, whole
from world import run_world

from timetrial.config import Optim, Plan
from timetrial.errors import UserError
from timetrial.optim import adamw
from timetrial.parallel.engine import Engine
from timetrial.train.checkpoint import Checkpointer
from timetrial.train.state import load_state, run_state

SHALLOW = replace(MODEL, n_layers=2)
OPTIM = Optim(base_lr=3e-3, end_lr=3e-3, eps=1e-5, weight_decay=0.1)
STEPS = 3
"""under each plan"""
CHAIN = {
    "pp, embedding alone": Plan(pp=4),
    "hsdp": Plan(dp=4, shard=2),
    "hsdp of replicas x tp, zero 1": Plan(dp=2, tp=2, shard=1, zero=1),
    "hsdp over cp": Plan(dp=2, cp=2, shard=2, order="dp-cp-tp-pp"),
    "pp again": Plan(pp=4, order="pp-tp-cp-dp"),
}
LOSS = 2e-6
"""As in test_layouts.py."""


@dataclass
class Part:
    """What a rank saw of the run under one plan."""

    before: dict[str, torch.Tensor]
    """Weights and moments, whole, as they were taken up; empty at the start."""
    after: dict[str, torch.Tensor]
    losses: list[float]


def go_on(plan: Plan, directory: Path, first: int, last: int) -> Part:
    """Steps `first` to `last` - 1 from the newest checkpoint, and one at the end."""
    config = config_of(replace(plan, gbs=GBS, precision="fp32"), model=SHALLOW)
    engine = engine_of(config)
    optimizer = adamw.build(engine.parameters_named(), OPTIM, fused=True)
    with Checkpointer(directory) as checkpoints:
        restored = load_state(checkpoints, engine, optimizer)
        assert (restored.step if restored else 0) == first
        part = Part(everything(engine, optimizer) if restored else {}, {}, [])
        for step in range(first, last):
            batch = samples(step)
            total = int((batch["labels"] >= 0).sum())
            loss = engine.train_step(share(batch, engine, config.plan), total)
            part.losses.append(engine.reduce_sums(loss).item() / total)
            engine.clip_grad_norm(CLIP)
            optimizer.step()
            optimizer.zero_grad()
        part.after = everything(engine, optimizer)
        checkpoints.save(last, run_state(engine, optimizer))
        checkpoints.wait()
    return part


def everything(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in engine.parameters_named():
        found[name] = whole(p.detach())
        found |= {f"{name}.{key}": whole(value) for key, value in optimizer.state[p].items()}
    return found


def run_chain(directory: Path) -> list[Part]:
    return [go_on(plan, directory, i * STEPS, (i + 1) * STEPS) for i, plan in enumerate(CHAIN.values())]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "checkpoints"


@pytest.fixture(scope="module")
def chain(directory: Path) -> list[list[Part]]:
    """By plan, then by rank; then one rank goes on."""
    ranks = run_world(run_chain, 4, directory)
    steps = len(CHAIN) * STEPS
    return [*(list(parts) for parts in zip(*ranks, strict=True)), [go_on(Plan(), directory, steps, steps + STEPS)]]


def union(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for state in states:
        for name, value in state.items():
            assert value.equal(found.setdefault(name, value)), f"ranks disagree on {name}"
    return found


def test_every_plan_takes_up_the_bits_that_the_one_before_left(chain: list[list[Part]]) -> None:
    for i in range(len(chain) - 1):
        left, taken = union([part.after for part in chain[i]]), union([part.before for part in chain[i + 1]])
        assert len(left) == 4 * len(dict(config_of(Plan(), model=SHALLOW).model.create().named_parameters()))
        assert left.keys() == taken.keys()
        assert all(left[name].equal(taken[name]) for name in left)
    assert set(chain[0][0].after) == {f"embed.weight{key}" for key in ("", ".step", ".exp_avg", ".exp_avg_sq")}


def test_the_curve_is_that_of_one_rank(chain: list[list[Part]], tmp_path: Path) -> None:
    undisturbed = go_on(Plan(), tmp_path / "checkpoints", 0, (len(CHAIN) + 1) * STEPS)
    for rank in range(4):
        losses = [loss for parts in chain for loss in parts[rank % len(parts)].losses]
        assert losses == pytest.approx(undisturbed.losses, abs=LOSS)
    assert undisturbed.losses[-1] < undisturbed.losses[0] - 100 * LOSS


def test_replicas_write_a_shard_once(tmp_path: Path) -> None:
    """Two copies of two shards take the room of two shards."""
    run_world(go_on, 2, Plan(dp=2), tmp_path / "one", 0, 1)
    run_world(go_on, 4, Plan(dp=4, shard=2), tmp_path / "two", 0, 1)
    one, two = (sum(file.stat().st_size for file in (tmp_path / copies).rglob("*.distcp")) for copies in ("one", "two"))
    assert one > 3 * 4 * SHALLOW.n_params()  # weights and two moments, float32
    assert two == pytest.approx(one, rel=0.02)


def test_a_checkpoint_with_numbered_groups_is_refused_in_one_line(tmp_path: Path) -> None:
    """As runs wrote them before their groups had names."""
    engine = engine_of(config_of(Plan(gbs=GBS, precision="fp32"), model=SHALLOW))
    optimizer = adamw.build(engine.parameters_named(), OPTIM)
    state = run_state(engine, optimizer)
    groups = state["optimizer"]["groups"]
    assert list(groups) == ["decay", "no_decay"]
    state["optimizer"]["groups"] = {str(i): group for i, group in enumerate(groups.values())}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        with pytest.raises(UserError, match=r"it has no optimizer.groups.decay.weight_decay") as caught:
            load_state(checkpoints, engine, optimizer)
    assert "\n" not in str(caught.value)
