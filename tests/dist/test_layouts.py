"""N ranks equal one rank: every axis alone on two ranks, hybrid sharding on four, mixed layouts on eight in two orders.

Tolerances. All of it is float32, and layouts only reorder sums: over channels (tp), keys (cp), samples
(dp, micro batches). What a reordering does is measured here on one rank, by another micro batch size
(`test_reordering_on_one_rank_sets_the_scale`): 5e-7 on losses of 4.6, which is one unit in the last
place. Layouts get a few of these: 2e-6 on losses, 2e-6 relative on gradient norms, 2e-6 on whole
gradients and 1e-5 on weights after all steps (relative L2 per parameter; Adam divides by the root of a
second moment and so amplifies). A gradient that weighs ranks wrongly is off by more than a thousand
times that (`test_tolerance_sees_a_mean_of_means`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from layouts import CLIP, GBS, MODEL, Curve, config_of, engine_of, samples, share, train
from world import run_world

from timetrial.config import AXES, Lora, Plan
from timetrial.models.llama.config import LlamaConfig
from timetrial.parallel.mesh import Mesh

LOSS = 2e-6
NORM = 2e-6
GRAD = 2e-6
WEIGHT = 1e-5

PATIENCE_S = 600
"""For a world of many cases on a busy machine."""

TIED = replace(MODEL, tied=True)
ADAPTERS = Lora(rank=4, alpha=8.0, dropout=0.0, targets=("wqkv", "wo", "w1", "w2"))
# inputs that are whole on every tensor-parallel rank, and two that are split over them
DROPPING = replace(ADAPTERS, dropout=0.3)


@dataclass(frozen=True)
class Case:
    """One layout, and the one-rank run that it must equal."""

    plan: Plan
    steps: int = 20
    adapters: Lora | None = None
    model: LlamaConfig = MODEL

    @property
    def reference(self) -> Case:
        plan = Plan(mbs=self.plan.mbs, precision=self.plan.precision)
        return Case(plan, self.steps, self.adapters, self.model)

    def run(self) -> Curve:
        return train(self.plan, self.steps, self.adapters, self.model)


def plan(precision: str = "fp32", **settings: object) -> Plan:
    return Plan(precision=precision, **settings)  # type: ignore[arg-type]


ON_TWO = {
    "dp": Case(plan(dp=2, mbs=2)),
    "dp, zero 2": Case(plan(dp=2, mbs=2, zero=2), 4),
    "dp, zero 1": Case(plan(dp=2, mbs=2, zero=1)),
    "tp": Case(plan(tp=2, mbs=2)),
    "cp": Case(plan(cp=2, mbs=2)),
    "pp 1f1b": Case(plan(pp=2, mbs=2)),
    "pp interleaved": Case(plan(pp=2, vp=2)),
    "pp zero bubble": Case(plan(pp=2, mbs=2, schedule="zb")),
    "pp v-shaped zero bubble": Case(plan(pp=2, vp=2, schedule="zbv")),
    "dp, recompute full": Case(plan(dp=2, mbs=2, recompute="full"), 4),
    "tp, recompute selective": Case(plan(tp=2, mbs=2, recompute="selective"), 4),
    "cp, recompute selective": Case(plan(cp=2, mbs=2, recompute="selective"), 4),
    "pp, recompute full": Case(plan(pp=2, mbs=2, recompute="full"), 4),
    "pp zero bubble, recompute full": Case(plan(pp=2, mbs=2, schedule="zb", recompute="full"), 4),
    "dp, tied head": Case(plan(dp=2, mbs=2), 4, model=TIED),
    "tp, tied head": Case(plan(tp=2, mbs=2), 4, model=TIED),
    "dp, adapters": Case(plan(dp=2, mbs=2), 4, ADAPTERS),
    "tp, adapters": Case(plan(tp=2, mbs=2), 4, ADAPTERS),
    "tp, adapters with dropout": Case(plan(tp=2, mbs=2), 4, DROPPING),
    "tp, adapters with dropout, recompute full": Case(plan(tp=2, mbs=2, recompute="full"), 4, DROPPING),
    "cp, adapters": Case(plan(cp=2, mbs=2), 4, ADAPTERS),
    "pp, adapters": Case(plan(pp=2, vp=2), 4, ADAPTERS),
    "pp zero bubble, adapters": Case(plan(pp=2, mbs=2, schedule="zb"), 4, ADAPTERS),
}

# groups of two that share shards, two of them
ON_FOUR = {
    "hsdp": Case(plan(dp=4, shard=2)),
    "hsdp, zero 2": Case(plan(dp=4, shard=2, zero=2), 4),
    "hsdp, zero 1": Case(plan(dp=4, shard=2, zero=1)),
    "hsdp of replicas": Case(plan(dp=4, shard=1), 4),
    "hsdp over cp": Case(plan(dp=2, cp=2, shard=2, mbs=2, order="dp-cp-tp-pp"), 4),
    "hsdp, adapters": Case(plan(dp=4, shard=2), 4, ADAPTERS),
    "hsdp, tied head": Case(plan(dp=4, shard=2), 4, model=TIED),
    "hsdp, recompute full": Case(plan(dp=4, shard=2, recompute="full"), 4),
    "hsdp, recompute selective": Case(plan(dp=4, shard=2, zero=1, recompute="selective"), 4),
    "pp dp, zero 3": Case(plan(pp=2, dp=2, zero=3)),
    "pp dp, zero 2": Case(plan(pp=2, dp=2, zero=2), 4),
    "pp of replicas": Case(plan(pp=2, dp=2, shard=1, vp=2), 4),
}

# six layouts, two orders each: strides between neighbours differ in all of them. Few micro batches, for many ranks
# share few cores; what more of them do is held on fewer ranks.
ON_EIGHT = {
    f"{name}, {order}": Case(replace(layout, order=order), adapters=adapters, model=replace(MODEL, n_layers=layout.pp))
    for name, layout, adapters, other in (
        ("dp tp cp", plan(dp=2, tp=2, cp=2, mbs=4), None, "cp-dp-tp-pp"),
        ("dp tp pp", plan(dp=2, tp=2, pp=2, vp=2, mbs=2), None, "tp-cp-pp-dp"),
        ("dp cp pp", plan(dp=2, cp=2, pp=2, schedule="zb", mbs=2), None, "tp-cp-pp-dp"),
        ("tp cp pp", plan(tp=2, cp=2, pp=2, mbs=4), ADAPTERS, "pp-cp-tp-dp"),
        ("hsdp tp", plan(dp=4, shard=2, tp=2, mbs=2), None, "dp-tp-cp-pp"),
        ("hsdp cp pp", plan(dp=2, cp=2, shard=2, pp=2, zero=3, mbs=2), None, "pp-dp-cp-tp"),
    )
    for order in (Plan().order, other)
}

COMPILED = {
    axis: Case(plan(**{axis: 2}, mbs=4, compile=True), 3, model=replace(MODEL, n_layers=1))
    for axis in ("dp", "tp", "cp")
}


def run_all(cases: dict[str, Case]) -> dict[str, Curve]:
    return {name: case.run() for name, case in cases.items()}


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Curve]]:
    return run_world(run_all, 2, ON_TWO, timeout_s=PATIENCE_S)


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Curve]]:
    return run_world(run_all, 4, ON_FOUR, timeout_s=PATIENCE_S)


@pytest.fixture(scope="module")
def on_eight() -> list[dict[str, Curve]]:
    return run_world(run_all, 8, ON_EIGHT, timeout_s=PATIENCE_S)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Curve]]:
    return run_world(run_all, 2, COMPILED, timeout_s=PATIENCE_S)


@pytest.fixture(scope="module")
def one_rank() -> dict[Case, Curve]:
    """One-rank runs, made once each."""
    return {}


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_equal_one(name: str, on_two: list[dict[str, Curve]], one_rank: dict[Case, Curve]) -> None:
    compare(ON_TWO[name], [curves[name] for curves in on_two], one_rank)


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_equal_one(name: str, on_four: list[dict[str, Curve]], one_rank: dict[Case, Curve]) -> None:
    compare(ON_FOUR[name], [curves[name] for curves in on_four], one_rank)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_equal_plain_ones(
    name: str, compiled: list[dict[str, Curve]], one_rank: dict[Case, Curve]
) -> None:
    compare(COMPILED[name], [curves[name] for curves in compiled], one_rank)


def test_the_two_orders_of_a_layout_are_two() -> None:
    strides = [
        [Mesh.of(case.plan).stride(axis) for axis in AXES if getattr(case.plan, axis) > 1] for case in ON_EIGHT.values()
    ]
    assert all(one != other for one, other in zip(strides[::2], strides[1::2], strict=True))


@pytest.mark.parametrize("name", ON_EIGHT)
def test_eight_ranks_equal_one(name: str, on_eight: list[dict[str, Curve]], one_rank: dict[Case, Curve]) -> None:
    compare(ON_EIGHT[name], [curves[name] for curves in on_eight], one_rank)


def compare(case: Case, ranks: list[Curve], one_rank: dict[Case, Curve]) -> None:
    reference = case.reference
    if reference not in one_rank:
        one_rank[reference] = reference.run()
    one = one_rank[reference]
    assert one.losses[-1] < one.losses[0] or case.steps < 10, "the run must learn, else equal curves say little"
    assert min(one.norms) > CLIP or case.adapters, "every step is to be clipped"
    for rank in ranks:
        assert rank.losses == pytest.approx(one.losses, abs=LOSS)
        assert rank.norms == pytest.approx(one.norms, rel=NORM)
        assert rank.evals == pytest.approx(one.evals, abs=LOSS)
        for name, grad in rank.first_grads.items():
            assert distance(grad, one.first_grads[name]) < GRAD, f"gradient of {name}"
        for name, weight in rank.weights.items():
            assert distance(weight, one.weights[name]) < WEIGHT, f"weight {name}"
    exported = ranks[0].exported
    assert set(exported) == set(one.weights)
    assert all(distance(exported[name], one.weights[name]) < WEIGHT for name in exported)
    assert not any(rank.exported for rank in ranks[1:])
    held = {name for rank in ranks for name in rank.weights}
    trained = {name for rank in ranks for name in rank.first_grads}
    assert held == set(one.weights)
    assert trained == set(one.first_grads)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|"""
    return ((a - b).norm() / b.norm()).item()


def test_reordering_on_one_rank_sets_the_scale() -> None:
    one, other = train(plan(mbs=1), 20), train(plan(mbs=8), 20)
    loss = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    norm = max(abs(a / b - 1) for a, b in zip(one.norms, other.norms, strict=True))
    weight = max(distance(one.weights[name], other.weights[name]) for name in one.weights)
    assert 0 < loss < LOSS
    assert 0 < norm < NORM
    assert 0 < weight < WEIGHT


def test_tolerance_sees_a_mean_of_means() -> None:
    """Samples count different numbers of tokens, so a mean over samples of their means is another gradient."""
    right = train(plan(), 1).first_grads
    config = config_of(replace(plan(), gbs=GBS))
    engine = engine_of(config)
    for batch in share(samples(0), engine, config.plan):
        engine.train_step([batch], GBS * int((batch["labels"] >= 0).sum()))
    for name, p in engine.parameters_named():
        assert p.grad is not None
        assert distance(p.grad, right[name]) > 1000 * GRAD


def test_bf16_layouts_agree_as_far_as_bf16_does() -> None:
    """Rounding to 8 bits flips where sums differ by a last place of 24, so bf16 runs part by its own step.

    A rounding is 2^-9 relative at most; norms of whole gradients average over many.
    """
    cases = {axis: Case(plan("bf16", **{axis: 2}, mbs=2), 4) for axis in ("dp", "tp", "cp", "pp")}
    one, exact = train(plan("bf16", mbs=2), 4), train(plan(mbs=2), 4)
    rounding = max(abs(a - b) for a, b in zip(one.losses, exact.losses, strict=True))
    assert rounding > 100 * LOSS, "bf16 must be at work"
    for curves in run_world(run_all, 2, cases):
        for name, curve in curves.items():
            assert curve.losses == pytest.approx(one.losses, abs=1e-3), name
            assert curve.norms == pytest.approx(one.norms, rel=4e-3), name
