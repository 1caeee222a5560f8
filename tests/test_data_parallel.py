"""What data-parallel ranks wait for: by hand, against the calls of a step, and on real placements."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest

from timetrial.config import Plan, replace
from timetrial.predict import answer, cache, memory, network, placement, predict
from timetrial.predict.actions import table
from timetrial.predict.constants import Constants
from timetrial.predict.constants import load as load_constants
from timetrial.predict.data_parallel import Call, DataParallel, Unit, Waits, calls, units
from timetrial.predict.kernels import Layer
from timetrial.predict.price import LayerSeconds, Pricing, Seconds
from timetrial.predict.quick import quick_s
from timetrial.predict.schedule import Durations, lay
from timetrial.predict.step import kind_seconds, passes, predict_step

BARE = {"dp_overlap": 0.0, "contention": 0.0}
"""Constants under which nothing hides."""


@lru_cache(64)
def prices(plan: str, gpus: int, system: str = "h100-sxm", workload: str = "llama31_8b", bare: bool = True) -> Any:
    """(request, prices of its data-parallel communication, layers, pricing, system)."""
    asked = answer.request_of(workload, system, gpus, plan=plan)
    machine = predict.system_of(asked)
    stack = predict.stack_of(asked, machine)
    layers = predict.compiled(asked, stack, cache.layers(asked.config))
    constants = Constants({**load_constants().values, **(BARE if bare else {})})
    pricing = predict.pricing_of(asked, machine, stack, constants)
    made = DataParallel(asked.config.plan, machine, pricing, layers, kind_seconds(passes(layers, pricing), pricing))
    return asked, made, layers, pricing, machine


def step_of(plan: str, gpus: int, *args: Any, **more: Any) -> Any:
    asked, _, layers, pricing, machine = prices(plan, gpus, *args, **more)
    return predict_step(asked.config, layers, machine, pricing)


# ---- by hand -------------------------------------------------------------------------------------


class ByHand(DataParallel):
    """A gather takes a second for a weight, a reduce-scatter two, an all-reduce of shards 0.5."""

    separate = False

    @property
    def apart(self) -> bool:
        return self.separate

    def _seconds(self, kind: str, group: str, size: float) -> float:
        return {"all_gather": 1.0, "reduce_scatter": 2.0, "all_reduce": 0.5}[kind] * size


def by_hand(zero: int, block_s: tuple[float, float], ends_s: tuple[float, float] = (0.0, 0.0), **plan: int) -> ByHand:
    """A block has one weight; the embedding and the head have five each. Seconds are forward and backward."""
    pricing, machine = prices("mbs=1,gbs=64,zero=3", 64)[3:]
    layers = {"block": Layer("block", (), 0, 1, 1)} | {k: Layer(k, (), 0, 5, 5) for k in ("embed", "head")}
    each = {"block": block_s, "embed": ends_s, "head": ends_s}
    seconds: Mapping[str, LayerSeconds] = {
        kind: LayerSeconds(*(Seconds({"matmul": way}) for way in both)) for kind, both in each.items()
    }
    stack = dataclasses.replace(pricing.stack, parameter_bytes=1.0, gradient_bytes=1.0)
    fit = dataclasses.replace(pricing.fitted, dp_overlap=1.0)
    own: Pricing = dataclasses.replace(pricing, stack=stack, fitted=fit)
    return ByHand(Plan(dp=4, gbs=8, zero=zero, **plan), machine, own, layers, seconds)


def test_nothing_hides_beside_no_work() -> None:
    waits = by_hand(3, (0.0, 0.0)).waits(3, True, True)
    assert (waits.forward, waits.backward) == (10 + 3 * 1, 3 * 1 + 3 * 2)
    assert waits.between == 20
    assert waits.reduce == 20 + 0.5 * 10 / 4 + 0.5 * 3 / 4  # shards of four


def test_each_block_hides_the_next_ones_gather_and_the_last_ones_reduction() -> None:
    waits = by_hand(3, (0.5, 2.5)).waits(3, True, True)
    assert waits.forward == 10 + 1 + 2 * (1 - 0.5)
    # the last block's gather; beside blocks 1, 1 + 2 and 2 seconds of sending; the first block's reduction
    assert waits.backward == 1 + 0 + (1 + 2 - 2.5) + 0 + 2
    assert by_hand(3, (5.0, 9.0), (1.0, 2.0)).waits(3, True, True) == Waits(
        forward=10.0, backward=0.0, between=20 - (2 * 1.0 + 3 * 5.0 - 3), reduce=20 + 0.5 * 10 / 4
    )


def test_stages_of_zero_differ_in_what_goes_out_for_each_micro_batch() -> None:
    one, two, three = (by_hand(zero, (0.5, 2.5)).waits(2, True, False) for zero in (1, 2, 3))
    assert (one.forward, one.backward, one.between, one.gather) == (0, 0, 0, 7)
    assert one.reduce == 2 * 7 + 0.5 * 7 / 4
    assert (two.forward, two.gather) == (0, 7)
    assert two.backward == 0 + 2  # one block beside the other; the first beside nothing
    assert three.forward == 5 + 1 + (1 - 0.5)
    assert three.gather == 0


def test_replicas_over_another_network_hide_beside_the_rest() -> None:
    shares, alone = by_hand(1, (0.5, 2.5)), by_hand(1, (0.5, 2.5))
    alone.separate = True
    # of 10 + 3 weights: 26 s to reduce, 13 / 4 x 0.5 s to sum shards; four buckets, the last one's sum on its own
    assert shares.waits(3, True, True).reduce == 26 + 1.625
    assert alone.waits(3, True, True).reduce == 26 + 1.625 / 4
    shares, alone = by_hand(3, (0.5, 2.5)), by_hand(3, (0.5, 2.5))
    alone.separate = True
    assert shares.waits(3, True, True).reduce == 20 + 1.25 + 0.375
    assert alone.waits(3, True, True).reduce == 20 + 1.25


def test_stages_without_blocks_or_ends() -> None:
    made = by_hand(3, (0.5, 2.5))
    assert made.waits(0, True, False).forward == 5
    middle = made.waits(2, False, False)
    assert (middle.forward, middle.between) == (1 + 0.5, 0)
    assert middle.reduce == 2 * 0.5 / 4  # gathers and reductions leave the replicas' sums nothing to hide beside


def test_one_rank_sends_nothing() -> None:
    made = prices("tp=8,mbs=1,gbs=8", 8)[1]
    assert made.waits(32, True, True) == Waits()
    assert calls(Plan(tp=8, gbs=8), 32, Unit(5, 5), Unit(7, 7)) == []


# ---- against the calls of a step -----------------------------------------------------------------


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("shard", [0, 1, 8, 16])
def test_where_nothing_hides_a_step_waits_for_all_calls(zero: int, shard: int) -> None:
    """`calls` are those that real ranks issue (tests/dist/test_trace_ranks.py): so this is what is priced."""
    asked, _, layers, pricing, machine = prices(f"mbs=1,gbs=256,zero={zero},shard={shard}", 64)
    plan, blocks = asked.config.plan, asked.config.model.n_layers
    sizes = {"all_gather": pricing.stack.parameter_bytes}
    expected = 0.0
    sent = calls(plan, blocks, *units(layers, blocks, True, True))
    if zero == 2 and shard != 1:  # what is gathered once a step goes in one message
        once = [call.elements * call.times for call in sent if call.kind == "all_gather"]
        sent = [call for call in sent if call.kind != "all_gather"] + [Call("all_gather", "shard", sum(once), 1)]
    for call in sent:
        size = sizes.get(call.kind, pricing.stack.gradient_bytes) * call.elements
        seconds = network.collective_s(call.kind, size, placement.lie(plan, machine, call.group), machine).seconds
        expected += call.times * seconds / pricing.fitted.network
    found = step_of(f"mbs=1,gbs=256,zero={zero},shard={shard}", 64).parts["dp"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_groups_of_one_rank_have_no_calls() -> None:
    kinds = {call.kind for call in calls(Plan(dp=4, shard=1, gbs=8), 2, Unit(6, 6), Unit(8, 8))}
    assert kinds == {"all_reduce"}
    kinds = {call.kind for call in calls(Plan(dp=4, gbs=8), 2, Unit(6, 6), Unit(8, 8))}
    assert kinds == {"all_gather", "reduce_scatter"}


def test_frozen_weights_are_gathered_where_they_are_sharded_and_never_reduced() -> None:
    block, ends = Unit(100, 4), Unit(50, 0)
    assert calls(Plan(dp=2, gbs=4, zero=3), 3, block, ends) == [
        Call("all_gather", "shard", 100, 3 * 2 * 2),
        Call("reduce_scatter", "shard", 4, 3 * 2),
        Call("all_gather", "shard", 50, 2),
    ]
    assert calls(Plan(dp=2, gbs=4, zero=1), 3, block, ends) == [
        Call("all_gather", "shard", 4, 3),
        Call("reduce_scatter", "shard", 4, 3),
    ]


# ---- on real placements --------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp", "dp-tp-cp-pp", "cp-pp-tp-dp"])
def test_one_shard_group_is_all_of_dp_and_cp(order: str) -> None:
    asked, _, _, _, machine = prices("mbs=1,gbs=64,zero=3", 64)
    plan = replace(asked.config.plan, tp=2, cp=3, pp=4, dp=6, order=order)
    assert placement.lie(plan, machine, "shard") == placement.lie(plan, machine, "dp-cp")


def test_another_network_for_replicas() -> None:
    """A node of shards and replicas over nodes; not where shards leave the node, nor without replicas."""
    found = {n: prices(f"mbs=1,gbs=64,zero=3,shard={n}", 64)[1].apart for n in (1, 4, 8, 16, 64)}
    assert found == {1: False, 4: True, 8: True, 16: False, 64: False}


def test_shard_groups_over_more_nodes_cost_more() -> None:
    for system, sizes in (("h100-sxm", (2, 4, 8, 16, 32, 64, 128)), ("gb200-nvl72", (4, 16, 64, 128, 256, 512))):
        gpus = sizes[-1]
        found = [prices(f"mbs=1,gbs={gpus},zero=3,shard={n}", gpus, system)[1].waits(32, True, True) for n in sizes]
        for a, b in itertools.pairwise(found):
            assert a.forward < b.forward
            assert a.backward < b.backward


def test_replicas_over_more_nodes_cost_more() -> None:
    found = [step_of(f"mbs=1,gbs={n},zero=1,shard=8", n).parts["dp"] for n in (8, 16, 32, 64, 128, 256)]
    assert all(a < b for a, b in itertools.pairwise(found))


def test_a_shard_group_in_a_rack_is_cheaper_than_one_over_racks() -> None:
    """Gathers for every micro batch stay on NVLink, and shards are summed between racks once a step."""
    inside, across = (step_of(f"mbs=1,gbs=576,zero=3,shard={n}", 144, "gb200-nvl72", bare=False) for n in (72, 144))
    assert inside.parts["dp"] < across.parts["dp"]
    assert inside.seconds < across.seconds


def test_orders_put_shard_groups_where_they_say() -> None:
    """With dp slowest the nearest ranks of a shard group lie a whole pipeline apart."""
    near, far = (
        prices(f"tp=4,pp=8,mbs=1,gbs=512,zero=3,shard=4,order={order}", 512, "gb200-nvl72", "llama31_405b")[1]
        for order in ("tp-cp-dp-pp", "tp-cp-pp-dp")
    )
    assert near.lies["shard"].inside
    assert not far.lies["shard"].inside
    assert near.waits(16, False, False).forward < 0.5 * far.waits(16, False, False).forward


def test_plain_data_parallelism_sums_whole_gradients_and_gathers_nothing() -> None:
    waits = prices("mbs=1,gbs=64,zero=1,shard=1", 64)[1].waits(32, True, True)
    full = prices("mbs=1,gbs=64,zero=1", 64)[1].waits(32, True, True)
    assert waits.gather == 0
    assert waits.reduce > full.reduce > 0


def test_a_pipeline_gathers_for_every_micro_batch() -> None:
    plan = "tp=8,pp=8,mbs=1,gbs=512,order=tp-cp-pp-dp"
    one, two, three = (
        step_of(f"{plan},zero={zero}", 512, "h100-sxm", "llama31_405b", bare=False) for zero in (1, 2, 3)
    )
    assert one.seconds < two.seconds < three.seconds
    assert one.parts["dp"] < two.parts["dp"] < three.parts["dp"]
    assert not any(one.durations.forward_data_s + one.durations.backward_data_s + two.durations.forward_data_s)
    assert all(three.durations.forward_data_s)
    near = step_of(f"{plan},zero=3,shard=2", 512, "h100-sxm", "llama31_405b", bare=False)
    assert near.seconds < three.seconds


def test_evaluations_gather_too() -> None:
    one, three = (step_of(f"mbs=1,gbs=64,zero={zero}", 64).evaluation_s for zero in (1, 3))
    assert three > one


# ---- in a pipeline -------------------------------------------------------------------------------


def test_waits_of_passes_by_hand() -> None:
    plan = Plan(pp=2, gbs=2)
    durations = Durations((1.0, 1.0), (2.0, 2.0), forward_data_s=(0.5, 0.25), backward_data_s=(0.125, 0.75))
    timeline = lay(table(plan), durations)
    # F0 on both ranks, B0 of the last, then its F1 and B1, and B1 of the first
    assert timeline.seconds == 1.5 + 1.25 + 2.75 + 1.25 + 2.75 + 2.125
    for rank, waits in zip(timeline.ranks, (2 * 0.625, 2 * 1.0), strict=True):
        assert (rank.busy_s, rank.exposed_data_s, rank.tail_s) == (6, waits, 0)
        assert rank.busy_s + rank.bubble_s + rank.exposed_sends_s + rank.exposed_data_s == timeline.seconds
    first = sorted((i for i in timeline.intervals if i.rank == 0 and i.end <= 1.5), key=lambda i: i.start)
    assert [(i.stream, i.kind, i.micro_batch, i.start, i.end) for i in first] == [
        ("data", "gather", 0, 0, 0.5),
        ("compute", "F", 0, 0.5, 1.5),
    ]


@pytest.mark.parametrize("plan", [Plan(pp=2, gbs=4), Plan(pp=4, gbs=11), Plan(pp=8, gbs=9)])
def test_with_waits_streams_do_one_thing_at_a_time_and_add_up(plan: Plan) -> None:
    n = plan.pp
    waits = tuple(0.1 * (i + 1) for i in range(n))
    data = {"gather_s": (0.7,) * n, "reduce_s": (1.3,) * n, "forward_data_s": waits, "backward_data_s": waits[::-1]}
    timeline = lay(table(plan), Durations((1.0,) * n, (2.0,) * n, link_s=(0.2,) * (n - 1), **data))
    for rank, account in enumerate(timeline.ranks):
        for stream in ("compute", "send", "data"):
            found = sorted((i.start, i.end) for i in timeline.intervals if (i.rank, i.stream) == (rank, stream))
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(found))
        assert account.busy_s == pytest.approx(3.0 * plan.gbs)
        parts = (account.busy_s, account.bubble_s, account.exposed_sends_s, account.exposed_data_s)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(timeline.seconds)


@pytest.mark.parametrize("plan", [Plan(pp=4, gbs=16), Plan(pp=8, gbs=24), Plan(pp=2, gbs=9), Plan(pp=4, gbs=5)])
@pytest.mark.parametrize("odd", [1.0, 3.0])
def test_the_formula_counts_waits_of_passes(plan: Plan, odd: float) -> None:
    n = plan.pp
    waits = (0.4,) * (n - 1) + (0.4 * odd,)
    durations = Durations((1.0,) * n, (2.0,) * n, link_s=(0.1,) * (n - 1), forward_data_s=waits, backward_data_s=waits)
    assert quick_s(plan, durations) == pytest.approx(lay(table(plan), durations, trace=False).seconds, rel=0.03)


# ---- memory --------------------------------------------------------------------------------------


def state(plan: Plan) -> memory.RankMemory:
    layers = predict.compiled(*_asked())
    measured = {
        kind: memory.Layer(x.weights, 0, 0, x.trained, memory.Kept(0, 0, 0), 0, 0) for kind, x in layers.items()
    }
    return memory.memory(plan, 32, measured, memory.MemoryPolicy()).peak


@lru_cache(1)
def _asked() -> Any:
    asked = answer.request_of("llama31_8b", "h100-sxm", 64, plan="mbs=1,gbs=64")
    return asked, predict.stack_of(asked, predict.system_of(asked)), cache.layers(asked.config)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_shard_is_that_of_its_group(zero: int) -> None:
    """Replicas share nothing: 64 ranks in groups of 8 hold what 8 ranks hold."""
    plan = Plan(dp=64, gbs=128, zero=zero)
    shards = [state(replace(plan, shard=n)) for n in (1, 8, 64)]
    assert shards[1] == state(replace(plan, dp=8, gbs=16))
    assert shards[0].optimizer == 8 * shards[1].optimizer == 64 * shards[2].optimizer
    for a, b in itertools.pairwise(shards):
        assert a.total > b.total
        assert a.gradients >= b.gradients
    trained = sum(
        x.trained for kind, x in predict.compiled(*_asked()).items() for _ in range(32 if kind == "block" else 1)
    )
    policy = memory.MemoryPolicy()
    assert shards[1].optimizer == pytest.approx(trained * (policy.master_bytes + policy.moment_bytes) / 8)
