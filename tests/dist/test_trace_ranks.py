"""What traces say a step sends, against what real ranks send in one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import GBS, MODEL, config_of, engine_of, samples, share
from torch.distributed.fsdp import MixedPrecisionPolicy
from world import run_world

from timetrial.config import Lora, Plan, RunConfig
from timetrial.parallel import fsdp, parallelize
from timetrial.parallel.engine import NoTimer
from timetrial.parallel.mesh import Mesh
from timetrial.parallel.plan import split_layers, stage_rank
from timetrial.parallel.record import Collective, Recorder
from timetrial.precision import bf16
from timetrial.predict import data_parallel
from timetrial.predict.collectives import step_collectives
from timetrial.predict.events import LayerTrace
from timetrial.predict.kernels import Layer
from timetrial.predict.trace import trace_layers
from timetrial.train.step import Step

SMALL = replace(MODEL, n_layers=2)
DEEP = replace(MODEL, n_layers=4)
ODD = replace(MODEL, dim=36, n_heads=6, n_kv_heads=3, ffn_dim=70, vocab_size=97, n_layers=2)
"""Nothing of it divides by four."""
ADAPTERS = Lora(rank=3, dropout=0.1, targets=("wqkv", "wo"))

FLOAT, SCALAR = 4, 8
"""bytes"""

Case = tuple[Plan, Lora | None, Any]


def case(lora: Lora | None = None, model: Any = SMALL, **plan: Any) -> Case:
    return Plan(gbs=GBS, precision="fp32", **plan), lora, model


TWO = {
    "dp, zero 3": case(dp=2, mbs=2),
    "dp, zero 2": case(dp=2, mbs=2, zero=2),
    "dp, zero 1": case(dp=2, mbs=2, zero=1),
    "dp, deep": case(dp=2, mbs=2, model=DEEP),
    "dp, tied": case(dp=2, mbs=4, model=replace(SMALL, tied=True)),
    "dp, adapters": case(ADAPTERS, dp=2, mbs=2),
    "tp": case(tp=2, mbs=4),
    "tp, recompute full": case(tp=2, mbs=4, recompute="full"),
    "tp, recompute selective": case(tp=2, mbs=4, recompute="selective"),
    "tp, adapters": case(ADAPTERS, tp=2, mbs=4),
    "cp": case(cp=2, mbs=4),
    "cp, recompute full": case(cp=2, mbs=4, recompute="full"),
    "pp": case(pp=2, mbs=2),
    "pp, deep": case(pp=2, mbs=1, model=DEEP),
}
FOUR = {
    "dp, nothing divides": case(dp=4, mbs=2, model=ODD),
    "shards of two": case(dp=4, shard=2, mbs=1),
    "shards of two, zero 1": case(dp=4, shard=2, mbs=1, zero=1),
    "shards of two, zero 2": case(dp=4, shard=2, mbs=1, zero=2),
    "shards of two, deep": case(dp=4, shard=2, mbs=1, model=DEEP),
    "shards over cp": case(cp=2, dp=2, shard=2, mbs=2),
    "shards over dp": case(cp=2, dp=2, shard=2, mbs=2, order="dp-cp-tp-pp"),
    "replicas alone": case(dp=4, shard=1, mbs=1),
    "tp, dp": case(tp=2, dp=2, mbs=2),
    "tp, dp, zero 1": case(tp=2, dp=2, mbs=2, zero=1),
    "tp, dp, adapters": case(ADAPTERS, tp=2, dp=2, mbs=2),
    "cp of four": case(cp=4, mbs=4),
    "pp, dp": case(pp=2, dp=2, mbs=2, model=DEEP),
    "pp, dp, zero 2": case(pp=2, dp=2, mbs=2, zero=2, model=DEEP),
    "pp, dp, zero 3": case(pp=2, dp=2, mbs=1, zero=3, model=DEEP),
    "pp of four": case(pp=4, mbs=1, model=DEEP),
}
EIGHT = {
    "tp, cp, dp": case(tp=2, cp=2, dp=2, mbs=2),
    "tp, cp, dp, another order": case(tp=2, cp=2, dp=2, mbs=4, order="dp-cp-tp-pp"),
    "tp, pp, dp": case(tp=2, pp=2, dp=2, mbs=2),
    "tp, cp, pp": case(tp=2, cp=2, pp=2, mbs=2, recompute="full"),
    "tp, pp, dp, adapters": case(ADAPTERS, tp=2, pp=2, dp=2, mbs=2),
    "pp, shards of two": case(pp=2, dp=4, shard=2, mbs=1, model=DEEP),
    "pp, shards of two, zero 2": case(pp=2, dp=4, shard=2, mbs=1, zero=2, model=DEEP),
    "pp, shards of two, zero 3": case(pp=2, dp=4, shard=2, mbs=1, zero=3, model=DEEP),
    "pp, shards of two, zero 3, dp last": case(pp=2, dp=4, shard=2, mbs=1, zero=3, model=DEEP, order="tp-cp-pp-dp"),
    "tp, shards of two": case(tp=2, dp=4, shard=2, mbs=1),
    "pp, dp of four, zero 3": case(pp=2, dp=4, mbs=1, zero=3),
}
MANY_STAGES = {
    "interleaved": case(pp=2, vp=2, tp=2, mbs=4, model=DEEP),
    "interleaved, dp": case(pp=2, vp=2, dp=2, mbs=2, model=DEEP),
    "zb": case(pp=2, schedule="zb", tp=2, mbs=4, model=DEEP),
    "zbv": case(pp=2, vp=2, schedule="zbv", dp=2, mbs=2, model=DEEP),
    "zbv, recompute full": case(pp=2, vp=2, schedule="zbv", tp=2, mbs=4, model=DEEP, recompute="full"),
}
PRICED = {
    name: (plan, lora, model)
    for name, (plan, lora, model) in (TWO | FOUR | EIGHT).items()
    if plan.dp * plan.cp > 1 and lora is None and model is not ODD and not model.tied
}
"""Without padding to whole rows of a shard, and without one weight for two layers."""
WORLDS = {2: TWO, 4: FOUR | MANY_STAGES, 8: EIGHT}
HALF = {
    "tp, dp, bf16": case(tp=2, dp=2, mbs=2),
    "tp, dp, bf16, zero 1": case(tp=2, dp=2, mbs=2, zero=1),
    "tp, dp, bf16, zero 1, one micro batch": case(tp=2, dp=2, mbs=4, zero=1),
    "tp, dp, bf16, adapters": case(ADAPTERS, tp=2, dp=2, mbs=2),
}
"""As on a GPU: parameters gathered and used in bfloat16, gradients summed in float32."""


def configured(case: Case) -> RunConfig:
    plan, lora, model = case
    return config_of(plan, lora, model)


def record(cases: dict[str, Case]) -> dict[str, list[Collective]]:
    """The calls of one whole step of each case, the second: the first also makes connections."""
    calls = {}
    for name, one in cases.items():
        config = configured(one)
        engine = engine_of(config)
        trained = [p for _, p in engine.parameters_named() if p.requires_grad]
        step = Step(engine, torch.optim.AdamW(trained, lr=1e-3), clip_norm=1.0)
        micro_batches = share(samples(0), engine, config.plan)
        step.work(micro_batches, torch.tensor(100.0, dtype=torch.float64), NoTimer())
        with Recorder() as recorder:
            step.work(micro_batches, torch.tensor(100.0, dtype=torch.float64), NoTimer())
        calls[name] = recorder.calls
    return calls


def record_as_on_a_gpu(cases: dict[str, Case]) -> dict[str, list[Collective]]:
    """`record` with FSDP and the products as they are on a GPU. In a process that ends with it."""
    fsdp.mixed_precision = lambda *_: MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # type: ignore[assignment]
    parallelize.choose = lambda model, plan, _: bf16.convert(model, "cuda")  # type: ignore[assignment]
    return record({name: (replace(plan, precision="bf16"), *rest) for name, (plan, *rest) in cases.items()})


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[list[Collective]]]:
    """Case -> the calls of each rank."""
    found = {}
    for size, cases in WORLDS.items():
        ranks = run_world(record, size, cases)
        found |= {name: [calls[name] for calls in ranks] for name in cases}
    return found


@pytest.fixture(scope="module")
def traces() -> dict[str, dict[str, LayerTrace]]:
    return {name: trace_layers(configured(one), "cpu") for cases in WORLDS.values() for name, one in cases.items()}


def predicted(name: str, rank: int, traces: dict[str, dict[str, LayerTrace]]) -> list[Collective]:
    one = next(cases[name] for cases in WORLDS.values() if name in cases)
    calls = step_collectives(traces[name], configured(one), rank, "cpu")
    return [Collective(call.kind, call.ranks, call.bytes) for call in calls]


@pytest.mark.parametrize("name", [*TWO, *FOUR, *EIGHT])
def test_every_rank_sends_what_its_traces_say_in_that_order(
    name: str, recorded: dict[str, list[list[Collective]]], traces: dict[str, dict[str, LayerTrace]]
) -> None:
    for rank, calls in enumerate(recorded[name]):
        assert calls, name
        assert calls == predicted(name, rank, traces)


@pytest.mark.parametrize("name", MANY_STAGES)
def test_other_schedules_send_the_same_in_another_order(
    name: str, recorded: dict[str, list[list[Collective]]], traces: dict[str, dict[str, LayerTrace]]
) -> None:
    for rank, calls in enumerate(recorded[name]):
        assert Counter(calls) == Counter(predicted(name, rank, traces))


@pytest.mark.parametrize("name", PRICED)
def test_what_is_priced_is_what_ranks_send(
    name: str, recorded: dict[str, list[list[Collective]]], traces: dict[str, dict[str, LayerTrace]]
) -> None:
    """`data_parallel.calls` counts gathers, reduce-scatters and all-reduces of shards as they happen."""
    plan, _, model = PRICED[name]
    sizes = {kind: sum(math.prod(w.shape) for w in trace.weights) for kind, trace in traces[name].items()}
    layers = {kind: Layer(kind, (), 0, n, n) for kind, n in sizes.items()}
    mesh = Mesh.of(plan)
    for rank, calls in enumerate(recorded[name]):
        shards, replicas = (
            tuple(next(group for group in groups if rank in group))
            for groups in (mesh.shard_groups(), mesh.replicate_groups())
        )
        of = {"all_gather": shards, "reduce_scatter": shards, "all_reduce": replicas}
        sent = Counter(call for call in calls if of.get(call.kind) == call.ranks and call.bytes > SCALAR)
        expected: Counter[Collective] = Counter()
        for index, (embed, blocks, head) in enumerate(split_layers(model.n_layers, plan.pp * plan.vp)):
            if stage_rank(index, plan) == mesh.coordinates(rank)["pp"]:
                unit = data_parallel.units(layers, len(blocks), embed, head)
                for call in data_parallel.calls(plan, len(blocks), *unit):
                    expected[Collective(call.kind, of[call.kind], FLOAT * call.elements)] += call.times
        assert sent == expected


def test_bfloat16_halves_what_is_gathered_and_used() -> None:
    ranks = run_world(record_as_on_a_gpu, 4, HALF)
    for name, (plan, *rest) in HALF.items():
        config = configured((replace(plan, precision="bf16"), *rest))
        layers = trace_layers(config, "cuda")
        for rank, calls in enumerate(ranks):
            found = [(call.kind, call.ranks, call.bytes) for call in calls[name]]
            assert found == [(c.kind, c.ranks, c.bytes) for c in step_collectives(layers, config, rank, "cuda")], name


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_an_axis_sends_what_the_layers_traces_hold(
    axis: str, recorded: dict[str, list[list[Collective]]], traces: dict[str, dict[str, LayerTrace]]
) -> None:
    """Embedding, blocks, head, then backward through them in reverse: the assembly adds sums alone to these axes."""
    name = "tp, cp, dp"
    layers, plan = traces[name], EIGHT[name][0]
    expected: list[tuple[str, int]] = []
    order = ["embed", "block", "block", "head"]
    for phases, kinds in ((("forward",), order), (("recompute", "backward"), order[::-1])):
        for kind in kinds:
            ops = [op for op in layers[kind].only(*phases) if op.kind == "collective" and op.axis == axis]
            expected += [(op.name, op.bytes) for op in ops if op.name != "all_reduce"]
    assert expected
    for rank, calls in enumerate(recorded[name]):
        group = tuple(Mesh.of(plan).group(rank, axis))
        found = [(call.kind, call.bytes) for call in calls if call.ranks == group and call.kind != "all_reduce"]
        assert found == expected * plan.grad_accumulation_steps
