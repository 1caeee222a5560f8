"""What must hold of any prediction, whatever the constants: on a handful of plans on H100 and GB200."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from timetrial.config import Plan
from timetrial.predict import answer, cache, placement, predict
from timetrial.predict.constants import load as load_constants
from timetrial.predict.kernels import Layer
from timetrial.predict.memory import Memory
from timetrial.predict.request import Request
from timetrial.predict.step import Step, predict_step
from timetrial.systems.stack import Stack
from timetrial.systems.system import System

Case = tuple[str, str, int, str]
"""Workload, system, accelerators, plan."""

PLANS: dict[str, Case] = {
    "8b": ("llama31_8b", "h100-sxm", 64, "mbs=1,gbs=256,zero=1"),
    "8b zero 2": ("llama31_8b", "h100-sxm", 64, "mbs=1,gbs=256,zero=2"),
    "8b zero 3": ("llama31_8b", "h100-sxm", 64, "mbs=1,gbs=256,zero=3"),
    "8b shards in a node": ("llama31_8b", "h100-sxm", 64, "mbs=1,gbs=256,zero=3,shard=8"),
    "8b shards in two nodes": ("llama31_8b", "h100-sxm", 64, "mbs=1,gbs=256,zero=3,shard=16"),
    "8b plain": ("llama31_8b", "h100-sxm", 64, "mbs=1,gbs=256,zero=1,shard=1"),
    "8b tp cp": ("llama31_8b", "h100-sxm", 64, "tp=2,cp=2,mbs=1,gbs=64,zero=1"),
    "405b": ("llama31_405b", "h100-sxm", 512, "tp=8,pp=8,vp=8,mbs=1,gbs=512"),
    "405b zero 3": ("llama31_405b", "h100-sxm", 512, "tp=8,pp=8,mbs=1,gbs=512,zero=3"),
    "405b zero 3 in shards": ("llama31_405b", "h100-sxm", 512, "tp=8,pp=8,mbs=1,gbs=512,zero=3,shard=2"),
    "405b zero bubble": ("llama31_405b", "h100-sxm", 512, "tp=8,pp=8,mbs=1,gbs=512,schedule=zb"),
    "8b rack": ("llama31_8b", "gb200-nvl72", 144, "mbs=1,gbs=288,zero=1"),
    "8b rack zero 3": ("llama31_8b", "gb200-nvl72", 144, "mbs=1,gbs=288,zero=3"),
    "8b rack shards in a rack": ("llama31_8b", "gb200-nvl72", 144, "mbs=1,gbs=288,zero=3,shard=72"),
    "405b rack": ("llama31_405b", "gb200-nvl72", 1024, "tp=4,pp=8,vp=8,cp=2,mbs=1,gbs=1024,order=tp-cp-pp-dp"),
    "405b rack zero 3": ("llama31_405b", "gb200-nvl72", 1024, "tp=4,pp=8,cp=2,mbs=1,gbs=1024,zero=3,shard=16"),
}


def asked(case: Case, more: str = "") -> Request:
    workload, system, accelerators, plan = case
    return answer.request_of(workload, system, accelerators, plan=plan + more)


@lru_cache(64)
def compiled(case: Case, more: str) -> tuple[Request, System, Stack, dict[str, Layer]]:
    """All that a step's price does not change."""
    request = asked(case, more)
    system = predict.system_of(request)
    stack = predict.stack_of(request, system)
    return request, system, stack, predict.compiled(request, stack, cache.layers(request.config))


def step(case: Case, change: Callable[[System], System] | None = None, more: str = "") -> Step:
    """The step on the system as it is, or as `change` makes it."""
    request, system, stack, layers = compiled(case, more)
    system = change(system) if change else system
    pricing = predict.pricing_of(request, system, stack, load_constants())
    return predict_step(request.config, layers, system, pricing)


def memory_of(case: Case, more: str) -> Memory:
    return answer.memory_of(predict.predict(asked(case, more)))


# ---- size ----------------------------------------------------------------------------------------

LADDERS: list[tuple[str, str, str, tuple[int, ...]]] = [
    ("llama31_8b", "h100-sxm", "mbs=1,gbs=1024,zero=1", (8, 32, 128, 512, 1024)),
    ("llama31_8b", "h100-sxm", "mbs=1,gbs=1024,zero=2", (8, 32, 128, 512, 1024)),
    ("llama31_8b", "h100-sxm", "mbs=1,gbs=1024,zero=3", (8, 16, 32, 128, 512, 1024)),
    ("llama31_8b", "h100-sxm", "mbs=1,gbs=1024,zero=3,shard=8", (8, 16, 32, 128, 512, 1024)),
    ("llama31_8b", "gb200-nvl72", "mbs=1,gbs=1152,zero=3,shard=4", (8, 36, 72, 144, 288, 1152)),
    ("llama31_405b", "h100-sxm", "tp=8,pp=8,vp=8,mbs=1,gbs=1024", (64, 128, 512, 2048, 8192)),
    ("llama31_405b", "gb200-nvl72", "tp=4,pp=8,vp=8,cp=2,mbs=1,gbs=1152,order=tp-cp-pp-dp", (64, 128, 576, 2304, 9216)),
    ("llama31_405b", "gb200-nvl72", "tp=4,pp=8,cp=2,mbs=1,gbs=1152,zero=3", (64, 128, 576, 2304, 9216)),
]


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda x: f"{x[0]} {x[2]}")
def test_more_accelerators_never_make_each_of_them_faster(ladder: tuple[str, str, str, tuple[int, ...]]) -> None:
    workload, system, plan, sizes = ladder
    seconds = [step((workload, system, n, plan)).seconds for n in sizes]
    for (n, a), (m, b) in itertools.pairwise(zip(sizes, seconds, strict=True)):
        assert 1 / (m * b) <= 1 / (n * a) * (1 + 1e-3), f"{m} accelerators against {n}"
        assert b < a


@pytest.mark.parametrize(
    ("workload", "system", "accelerators", "plan"),
    [
        ("llama31_8b", "h100-sxm", 64, "gbs=512,zero=1"),
        ("llama31_8b", "h100-sxm", 64, "tp=4,gbs=512,zero=3"),
        ("llama31_8b", "gb200-nvl72", 64, "gbs=512,zero=1"),
        ("llama31_405b", "h100-sxm", 512, "tp=8,pp=8,vp=8,gbs=512"),
        ("llama31_405b", "gb200-nvl72", 512, "tp=8,pp=8,vp=8,gbs=512"),
        ("llama2_70b_lora", "h100-sxm", 8, "tp=4,gbs=16"),
    ],
)
def test_larger_micro_batches_never_take_more_launch_time(
    workload: str, system: str, accelerators: int, plan: str
) -> None:
    case = (workload, system, accelerators, plan)
    launches = [step(case, more=f",mbs={mbs}").parts["launch"] for mbs in (1, 2, 4, 8)]
    assert launches == sorted(launches, reverse=True)
    assert launches[-1] > 0


# ---- networks ------------------------------------------------------------------------------------


def scale_up(system: System, rate: float, latency: float = 1.0) -> System:
    up = system.scale_up
    return replace(
        system,
        scale_up=replace(
            up,
            bytes_per_s=rate * up.bytes_per_s,
            peer_bytes_per_s=rate * up.peer_bytes_per_s,
            latency_s=latency * up.latency_s,
        ),
    )


def scale_out(system: System, rate: float, latency: float = 1.0) -> System:
    out = system.scale_out
    return replace(
        system, scale_out=replace(out, bytes_per_s=rate * out.bytes_per_s, latency_s=latency * out.latency_s)
    )


CHANGES: dict[str, tuple[Callable[[System], System], int]] = {
    "scale-up x 2": (lambda s: scale_up(s, 2), -1),
    "scale-up x 8": (lambda s: scale_up(s, 8), -1),
    "scale-up / 2": (lambda s: scale_up(s, 0.5), 1),
    "scale-out x 2": (lambda s: scale_out(s, 2), -1),
    "scale-out x 8": (lambda s: scale_out(s, 8), -1),
    "scale-out / 2": (lambda s: scale_out(s, 0.5), 1),
    "latencies / 2": (lambda s: scale_out(scale_up(s, 1, 0.5), 1, 0.5), -1),
    "latencies x 2": (lambda s: scale_out(scale_up(s, 1, 2), 1, 2), 1),
    "both x 2": (lambda s: scale_out(scale_up(s, 2), 2), -1),
    "both / 2": (lambda s: scale_out(scale_up(s, 0.5), 0.5), 1),
}
"""What it is -> the changed system, and which way a step may move."""


@pytest.mark.parametrize("name", PLANS)
def test_faster_links_never_slow_a_step_and_slower_ones_never_speed_it(name: str) -> None:
    case = PLANS[name]
    plain = step(case).seconds
    found = {change: step(case, make).seconds for change, (make, _) in CHANGES.items()}
    for change, (_, sign) in CHANGES.items():
        assert sign * (found[change] - plain) >= -1e-9 * plain, change
    assert found["both x 2"] < plain < found["both / 2"]
    assert found["scale-up x 8"] <= found["scale-up x 2"]
    assert found["scale-out x 8"] <= found["scale-out x 2"]


# ---- order ---------------------------------------------------------------------------------------

RACKS = [
    (512, "tp=4,pp=8,vp=8,mbs=1,gbs=512"),
    (512, "tp=8,pp=4,vp=4,mbs=1,gbs=512"),
    (1024, "tp=4,pp=8,vp=8,cp=2,mbs=1,gbs=1024"),
    (2304, "tp=8,pp=9,mbs=1,gbs=1152"),
    (2496, "tp=4,pp=8,vp=8,cp=2,mbs=1,gbs=1248"),
]
"""Whole pipelines fill a rack's domain, as far as a job takes it."""


@pytest.mark.parametrize(("accelerators", "plan"), RACKS)
def test_data_parallel_last_is_no_worse_where_racks_hold_whole_pipelines(accelerators: int, plan: str) -> None:
    """It keeps messages in the rack and takes gradients out of it: a tie where messages are few."""
    case = ("llama31_405b", "gb200-nvl72", accelerators, plan)
    plans = [asked(case, f",order={order}").config.plan for order in ("tp-cp-dp-pp", "tp-cp-pp-dp")]
    system = predict.system_of(asked(case))
    assert [placement.lie(plan, system, "edge").inside for plan in plans] == [False, True]
    first, last = (step(case, more=f",order={p.order}") for p in plans)
    assert last.seconds <= 1.005 * first.seconds
    assert last.parts["pp"] < 0.3 * first.parts["pp"]
    assert last.parts["dp"] >= first.parts["dp"]


def test_data_parallel_last_gains_nothing_where_pipelines_straddle_racks() -> None:
    """64 ranks of a pipeline, and 72 of each rack in the job: every order sends over the border of racks."""
    case = ("llama31_405b", "gb200-nvl72", 2304, "tp=4,pp=8,vp=8,cp=2,mbs=1,gbs=1152")
    first, last = (step(case, more=f",order={order}") for order in ("tp-cp-dp-pp", "tp-cp-pp-dp"))
    assert last.parts["pp"] == pytest.approx(first.parts["pp"], rel=0.05)
    assert 1.0 < last.seconds / first.seconds < 1.01


def test_shards_of_each_micro_batch_should_not_leave_the_rack() -> None:
    """With sharded parameters in a pipeline, data parallelism last gathers over the network out for every pass."""
    case = ("llama31_405b", "gb200-nvl72", 1024, "tp=4,pp=8,cp=2,mbs=1,gbs=1024,zero=3,shard=16")
    first, last = (step(case, more=f",order={order}") for order in ("tp-cp-dp-pp", "tp-cp-pp-dp"))
    assert first.seconds < last.seconds


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        ("llama31_8b", "h100-sxm", 64, "mbs=1,gbs=256"),
        ("llama31_8b", "gb200-nvl72", 64, "tp=2,cp=2,mbs=1,gbs=64"),
        ("llama31_405b", "h100-sxm", 512, "tp=8,pp=8,mbs=1,gbs=512"),
        ("llama31_405b", "gb200-nvl72", 1024, "tp=4,pp=8,cp=2,mbs=1,gbs=1024"),
    ],
)
def test_each_stage_of_zero_takes_less_memory(case: Case) -> None:
    """Replicas alone are stage 0."""
    stages = [memory_of(case, more) for more in (",zero=1,shard=1", ",zero=1", ",zero=2", ",zero=3")]
    for before, after in itertools.pairwise(stages):
        for rank, other in zip(before.ranks, after.ranks, strict=True):
            assert rank.used - rank.activations >= other.used - other.activations
            if before.stashed == after.stashed:  # else what a stage saves is taken by activations kept whole
                assert rank.activations == other.activations
                assert rank.total >= other.total
    assert [one.stashed for one in stages] == sorted((one.stashed for one in stages), reverse=True)
    assert stages[0].peak.optimizer > stages[1].peak.optimizer == stages[3].peak.optimizer
    assert stages[1].peak.gradients > stages[2].peak.gradients == stages[3].peak.gradients
    assert stages[2].peak.weights > stages[3].peak.weights


def test_fewer_replicas_take_less_memory() -> None:
    case = ("llama31_8b", "h100-sxm", 64, "mbs=1,gbs=256")
    for zero in (1, 2, 3):
        sizes = [memory_of(case, f",zero={zero},shard={n}").peak.total for n in (1, 2, 8, 64)]
        assert all(a > b for a, b in itertools.pairwise(sizes))


def test_plans_of_the_table_are_different_plans() -> None:
    plans: list[Plan] = [asked(case).config.plan for case in PLANS.values()]
    assert len({(case[1], plan) for case, plan in zip(PLANS.values(), plans, strict=True)}) == len(PLANS)
