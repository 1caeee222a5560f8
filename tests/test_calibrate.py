"""Calibrations: what is written is read, what is damaged is refused, and a tiny machine predicts from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from timetrial.config import Plan
from timetrial.errors import UserError
from timetrial.predict import calibrate_write
from timetrial.predict.calibrate import Effort, calibrate
from timetrial.predict.calibrate_layers import Samples, Size, time_layers
from timetrial.predict.events import flops
from timetrial.predict.local import eager_layer, heap_share, local_memory, part_of_a_lane, predict_local
from timetrial.predict.trace import trace_layers
from timetrial.systems import stack, system
from timetrial.systems.points import parse
from timetrial.systems.rates import Rates

SMALL = Size(32, 64, 2, 16, 1)
EFFORT = Effort(
    layers=(SMALL,),
    products=((32, 32, 32), (64, 32, 32)),
    attention=((1, 2, 16, 16),),
    memory=(1 << 10, 1 << 14),
    optimizer=(1000, 4000),
    collectives=(64, 4096),
    beside=(SMALL,),
    repeats=1,
    steps=2,
    patterns=("one",),
    ranks=False,
)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    said: list[str] = []
    path = calibrate(tmp_path_factory.mktemp("local"), EFFORT, say=said.append)
    assert any("products" in line for line in said)
    return path


@pytest.fixture
def content(local: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(local.with_suffix(".json").read_text())
    return found


TWO = {
    "beside": {"2": {"matmul": 1.5, "attention": 1.5, "elementwise": 2.0}},
    "collectives": {
        kind: {"2": [[64, 100.0], [1 << 20, 1000.0]]}
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange", "send")
    },
}


@pytest.fixture
def two(local: Path, content: dict[str, Any]) -> tuple[system.System, Rates]:
    alone = system.load(local)
    made = replace(alone, node=system.Node(2), scale_up=replace(alone.scale_up, domain=2))
    return made, Rates.measured(made, content | TWO)


def test_a_calibration_is_read_as_a_system(local: Path, content: dict[str, Any]) -> None:
    found = system.load(local)
    assert found.name == "local"
    assert found.accelerator.generation == "cpu"
    assert found.scale_out.kind == "none"
    assert "accelerator.tdp_w" in found.assumed
    rates = Rates.load(found)
    assert rates.eager is not None
    assert rates.eager.idle(1) > 50 << 20
    assert rates.matmul_s("fp32", 32, 32, 32) > 0
    assert {"silu", "mul", "embedding", "log_softmax"} <= set(rates.eager.operators)
    assert content["notes"]["seconds"] > 0


def test_the_default_place_is_where_local_is_looked_for(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="timetrial calibrate"):
        system.load("local")
    folder = system.local_path().parent
    folder.mkdir(parents=True)
    for name in ("local.toml", "local.json"):
        (folder / name).write_bytes((local.parent / name).read_bytes())
    assert system.load("local").rates == str(folder / "local.json")


def test_a_place_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):
        calibrate(tmp_path / "file" / "below", EFFORT, say=lambda text: None)


def test_each_kernel_of_a_layer_gets_the_time_between_two_ticks() -> None:
    ticks = count()
    samples = Samples()
    time_layers(SMALL, 1, samples, clock=lambda: float(next(ticks)), depth=1)
    traces = trace_layers(SMALL.config(), "cpu")
    products = sum(op.kind == "matmul" for trace in traces.values() for op in trace.ops)
    assert samples.totals()["matmul"] == products
    assert samples.totals()["attention"] == 2
    assert samples.elementwise["silu"] == {2 * 16 * 64 * 4: [1.0]}


def test_calls_of_nearly_one_size_are_one_point() -> None:
    assert calibrate_write.binned({1000: [1e-6], 1040: [3e-6], 8000: [9e-6]}) == [[1020, 2.0], [8000, 9.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": {"one": [-1.0, 0.0]}}, "host.one"),
        ({"host": {"tp": [1.0, 0.0]}}, "host.one is missing"),
        ({"host": {"one": [1.0, 0.0], "ring": [1.0, 0.0]}}, "no layout"),
        ({"beside": {"1": {}}}, "a number from 2"),
        ({"beside": {"2": {"matmul": 1.0}}}, "elementwise"),
        ({"beside": {"2": {"matmul": 0.5, "attention": 1.0, "elementwise": 1.0}}}, "beside.2.matmul"),
        ({"beside": []}, "no object"),
        ({"idle_bytes": 7}, "idle_bytes"),
        ({"idle_bytes": {"several": 7}}, "idle_bytes.one is missing"),
        ({"reserved": {"one": -0.1}}, "reserved.one"),
        ({"reserved": {"one": 0.1, "two": 0.1}}, "reserved.two"),
        ({"optimizer": []}, "optimizer"),
        ({"elementwise": {"silu": [[0, 1.0]]}}, "silu"),
        ({"matmul": {}}, "matmul"),
    ],
)
def test_nonsense_is_refused_with_its_name(content: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(content | change, "mine.json")


def test_a_damaged_file_is_refused(local: Path, tmp_path: Path) -> None:
    (tmp_path / "local.toml").write_bytes(local.read_bytes())
    (tmp_path / "local.json").write_bytes(local.with_suffix(".json").read_bytes()[:-40])
    with pytest.raises(UserError, match="no JSON"):
        Rates.load(system.load(tmp_path / "local.toml"))


def test_a_kernel_for_each_operator_and_all_their_flop() -> None:
    trace = trace_layers(SMALL.config(), "cpu")["block"]
    layer = eager_layer(trace)
    assert len(layer.kernels) == len(trace.ops)
    products = [k for k in layer.kernels if k.kind == "matmul"]
    assert sum(2 * b * m * n * k for b, m, n, k in (p.shape for p in products)) == sum(
        flops(op) for op in trace.ops if op.kind == "matmul"
    )
    assert {k.role for k in layer.kernels if k.kind == "memory"} >= {"silu", "silu_backward", "rsqrt"}


def test_a_step_is_the_sum_of_its_parts_and_each_block_adds_the_same(local: Path) -> None:
    two, four, six = (predict_local(SMALL.config(n), system.load(local), trace_layers)[0] for n in (2, 4, 6))
    assert two.seconds == pytest.approx(sum(two.parts.values()))
    for part in ("matmul", "attention", "other", "launch"):
        assert six.parts[part] - four.parts[part] == pytest.approx(four.parts[part] - two.parts[part])
    assert six.parts["matmul"] > four.parts["matmul"]
    assert six.parts["fixed"] == two.parts["fixed"]
    assert two.parts["dp"] == 0.0


def test_twice_the_micro_batches_take_twice_the_layers(local: Path) -> None:
    machine = system.load(local)
    once, _ = predict_local(SMALL.config(2), machine, trace_layers)
    twice, _ = predict_local(SMALL.config(2, Plan(mbs=1, gbs=2, precision="fp32")), machine, trace_layers)
    assert twice.micro_batches == 2
    assert twice.parts["matmul"] == pytest.approx(2 * once.parts["matmul"])
    assert twice.parts["optimizer"] == once.parts["optimizer"]


@pytest.mark.parametrize("axis", ["dp", "tp", "cp", "pp"])
def test_two_ranks_over_each_axis(two: tuple[system.System, Rates], axis: str) -> None:
    machine, rates = two
    plan = Plan(mbs=2, gbs=4, precision="fp32", **{axis: 2})
    size = Size(32, 64, 4, 32, 2)
    step, layers = predict_local(size.config(2, plan), machine, trace_layers, rates)
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert (step.timeline is not None) == (axis == "pp")
    assert step.parts["dp"] > 0 or axis in ("tp", "pp")
    if axis in ("tp", "cp"):
        assert step.parts[axis] > 0
        assert any(k.kind == "collective" for k in layers["block"].kernels)


def test_kernels_beside_others_take_the_measured_factor(two: tuple[system.System, Rates]) -> None:
    machine, rates = two
    size = Size(32, 64, 2, 16, 2)
    alone, _ = predict_local(SMALL.config(2), machine, trace_layers, rates)
    lanes, _ = predict_local(replace(size.config(2), lanes=2), machine, trace_layers, rates)
    assert lanes.parts["matmul"] == pytest.approx(1.5 * alone.parts["matmul"])


def test_a_lane_computes_its_part_of_each_micro_batch() -> None:
    assert part_of_a_lane(Plan(mbs=5, gbs=10), 2) == Plan(mbs=3, gbs=6)


def test_more_ranks_than_cores_and_systems_without_calibration_are_refused(local: Path) -> None:
    plan = Plan(dp=256, mbs=1, gbs=256, precision="fp32")
    with pytest.raises(UserError, match="use fewer"):
        predict_local(SMALL.config(2, plan), system.load(local), trace_layers)
    with pytest.raises(UserError, match="timetrial calibrate"):
        predict_local(SMALL.config(2), system.load("h100-sxm"), trace_layers)


def test_memory_counts_an_idle_rank_and_what_training_adds(local: Path, content: dict[str, Any]) -> None:
    machine = system.load(local)
    config = SMALL.config(2)
    used = local_memory(config, machine, trace_layers).peak.used
    assert used > content["idle_bytes"]["one"] + 16 * config.model.n_params()


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        (Plan(), 0.1),
        (Plan(gbs=2), 0.2),
        (Plan(recompute="full", gbs=2), 0.3),
        (Plan(dp=2, gbs=2), 0.4),
        (Plan(dp=2, gbs=4), 0.2),
        (Plan(recompute="selective"), 0.1),
    ],
)
def test_the_heap_is_taken_from_the_way_of_running_that_shapes_it_most(
    local: Path, content: dict[str, Any], plan: Plan, share: float
) -> None:
    measured = {"one": 0.1, "accumulating": 0.2, "full": 0.3, "several": 0.4}
    eager = Rates.measured(system.load(local), content | {"reserved": measured}).eager
    assert eager is not None
    assert heap_share(eager, plan) == share


def test_the_stack_of_processors_has_no_constant_of_its_own() -> None:
    engine = stack.for_round("v6.0", "cpu")
    assert engine.name == "engine"
    assert not engine.fuse
    assert engine.overlaps == ()
    assert engine.constants["speed"] == engine.constants["memory"] == engine.constants["network"] == 1.0
