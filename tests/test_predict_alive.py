"""Memory on this machine: glibc's heap by hand, and the walk over traces against what a real step allocates."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from timetrial.config import Plan, RunConfig, replace
from timetrial.optim import adamw
from timetrial.parallel import parallelize
from timetrial.parallel.engine import NoTimer
from timetrial.predict.alive import threads_bytes, walk
from timetrial.predict.alive_program import program
from timetrial.predict.calibrate_layers import Size
from timetrial.predict.calibrate_ranks import batches_of, never_falling
from timetrial.predict.heap import Heap
from timetrial.predict.trace import trace_layers
from timetrial.train.build import InitialValues, empty_model
from timetrial.train.step import Step

BIG = 1 << 20
SMALL = Size(128, 448, 4, 128, 4)


def test_a_hole_between_neighbours_is_too_small_for_the_next_tensor_of_its_size() -> None:
    heap = Heap()
    first, _ = heap.take(BIG), heap.take(BIG)
    before = heap.peak
    heap.free(first)
    assert heap.take(BIG) != first
    assert heap.peak > before + BIG
    assert heap.take(BIG - 4096) == first, "a smaller one fits"


def test_holes_side_by_side_are_one() -> None:
    heap = Heap()
    taken = [heap.take(BIG) for _ in range(3)]
    before = heap.peak
    heap.free(taken[0])
    heap.free(taken[1])
    assert heap.take(2 * BIG - 4096) == taken[0]
    assert heap.peak == before


def test_small_objects_keep_holes_apart_until_they_go() -> None:
    def grown(pin: str, gone: bool) -> int:
        heap = Heap()
        taken = [heap.take(BIG, pin) for _ in range(4)]
        for address in taken[:3]:
            heap.free(address)
        if gone:
            heap.unpin(pin)
        before = heap.peak
        heap.take(2 * BIG)
        return heap.peak - before

    assert grown("", gone=False) == 0
    assert grown("forward", gone=True) == 0
    assert grown("forward", gone=False) > BIG


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    heap, taken = Heap(), dict[int, int]()
    for n in range(200):
        size = 1000 + 977 * (n * n % 37)
        taken[heap.take(size, "step" if n % 3 else "")] = size
        if n % 2:
            address = sorted(taken)[n * 7 % len(taken)]
            heap.free(address)
            del taken[address]
    ordered = sorted(taken)
    assert all((address + 16) % 64 == 0 for address in ordered)
    assert all(a + 16 + taken[a] <= b + 16 for a, b in pairwise(ordered))


def allocated(config: RunConfig) -> int:
    """The most bytes that one step of a real engine has allocated at once beyond what was there before."""
    torch.set_num_threads(1)
    engine = parallelize.build(config, empty_model(config), InitialValues(config, None))
    step = Step(engine, adamw.build(engine.parameters_named(), config.optim, fused=True), 1.0)
    batches = batches_of(config)
    step(batches, 1e-4, NoTimer())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(batches, 1e-4, NoTimer())
    events = profile.profiler.kineto_results.events()
    now = most = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("changes", "adapters"),
    [
        ({}, False),
        ({}, True),
        ({"gbs": 12}, False),
        ({"recompute": "full"}, False),
        ({"recompute": "selective"}, False),
        ({"precision": "bf16"}, False),
    ],
)
def test_the_walk_is_what_a_step_allocates(changes: dict[str, object], adapters: bool) -> None:
    config = replace(SMALL, adapters=adapters).config(4)
    config = replace(config, plan=replace(config.plan, **changes))
    found = walk(trace_layers(config, "cpu"), config.plan, 4)
    ours = found.live - found.kinds["optimizer"]
    assert ours == pytest.approx(allocated(config), rel=0.10)
    assert found.heap >= found.live


def test_state_is_weights_and_moments_of_what_is_trained() -> None:
    config = SMALL.config(2)
    found = walk(trace_layers(config, "cpu"), config.plan, 2)
    assert found.kinds["optimizer"] == 3 * 4 * config.model.n_params()
    assert walk(trace_layers(config, "cpu"), config.plan, 2, state=False).kinds["optimizer"] == 0


def test_every_trained_weight_of_a_block_gets_a_gradient() -> None:
    for config in (SMALL.config(2), replace(SMALL, adapters=True).config(2)):
        for kind, trace in trace_layers(config, "cpu").items():
            found = program(trace)
            assert len(found.gradients) == sum(weight.trained for weight in trace.weights), kind
            assert (found.outgoing is None) == (kind == "embed")


def test_sharding_and_stages() -> None:
    config = SMALL.config(4)
    traces = trace_layers(config, "cpu")
    alone = walk(traces, config.plan, 4)
    sharded = walk(traces, Plan(dp=2, mbs=4, gbs=8, precision="fp32", zero=1), 4)
    assert sharded.kinds["optimizer"] == pytest.approx(alone.kinds["optimizer"] / 2, rel=0.01)
    third = walk(traces, Plan(dp=2, mbs=4, gbs=8, precision="fp32", zero=3), 4)
    assert third.kinds["weights"] < sharded.kinds["weights"]
    first, last = (walk(traces, Plan(pp=2, mbs=4, gbs=16, precision="fp32"), 4, rank) for rank in (0, 1))
    assert first.kinds["activations"] > last.kinds["activations"], "one more micro batch in flight"


def test_gloo_s_threads_copy_the_largest_call() -> None:
    assert threads_bytes([]) == 0
    assert threads_bytes([100, 1000]) == 4000


def test_disturbed_calls_are_no_longer_than_larger_ones() -> None:
    assert never_falling([[1, 9.0], [2, 3.0], [4, 5.0]]) == [[1, 3.0], [2, 3.0], [4, 5.0]]
