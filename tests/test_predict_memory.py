"""Bytes of an accelerator: against counted schedules, the engine's own figures and published runs."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import pytest

from timetrial.config import Plan, RunConfig, replace
from timetrial.errors import UserError
from timetrial.predict import actions, answer, cache, predict
from timetrial.predict.events import LayerTrace, Op, Weight
from timetrial.predict.keep import kept, temporaries
from timetrial.predict.memory import Layer, Memory, MemoryPolicy, engine, in_flight, measure, memory, policy
from timetrial.predict.published import LLAMA3_405B
from timetrial.predict.request import Request, request
from timetrial.predict.rows import read
from timetrial.systems import stack, system
from timetrial.workloads.workload import find, resolve

FACTS = Path(__file__).parents[2] / "shared" / "facts"
BARE = MemoryPolicy(fixed_bytes=0, fragmentation=0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb", "zbv"])
def test_micro_batches_in_flight_are_those_of_the_action_tables(schedule: str) -> None:
    seen = 0
    for pp in (2, 3, 4, 8):
        for vp in (1, 2, 3, 8):
            for micro_batches in (pp - 1, pp, pp + 1, 2 * pp, 2 * pp + 1, 4 * pp, 36):
                plan = Plan(pp=pp, vp=vp, gbs=micro_batches, schedule=schedule)
                try:
                    tables = actions.table(plan)
                except UserError:
                    continue
                for rank, table in enumerate(tables):
                    assert in_flight(plan, rank) == most_alive(table, pp, vp), (plan, rank)
                    seen += 1
    assert seen > 100


def most_alive(table: list[actions.Action], pp: int, vp: int) -> list[int]:
    """Micro batches alive by stage when most are, counted action by action."""
    alive, most = [0] * vp, [0] * vp
    for action in table:
        if action.kind == "F":
            alive[action.stage // pp] += 1
            most = max(most, list(alive), key=sum)
        elif action.kind in ("B", "W"):
            alive[action.stage // pp] -= 1
    return most


def op(kind: str, name: str, phase: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
    return Op(kind=kind, name=name, phase=phase, module="", reads=reads, writes=writes)


TRACE = LayerTrace(
    kind="block",
    ops=(
        op("elementwise", "to_copy", "forward", (0,), (1,)),  # the input in float32, for the norm's backward pass
        op("elementwise", "mul", "forward", (1,), (2,)),
        op("collective", "all_gather", "forward", (2,), (3,)),
        op("matmul", "mm", "forward", (3, 9), (4,)),
        op("elementwise", "silu", "forward", (4,), (5,)),
        op("matmul", "mm", "forward", (5, 9), (6,)),
        op("matmul", "mm", "backward", (7, 9), (8,)),
        op("matmul", "mm", "backward", (7, 5), (10,)),  # gradient of a weight
        op("elementwise", "silu_backward", "backward", (8, 4), (11,)),
        op("matmul", "mm", "backward", (11, 3), (12,)),
        op("elementwise", "norm_backward", "backward", (11, 1), (13,)),
    ),
    tensor_bytes={0: 10, 1: 20, 2: 10, 3: 80, 4: 40, 5: 40, 6: 10, 7: 10, 8: 40, 9: 5, 10: 5, 11: 40, 12: 5, 13: 10},
    weights=(Weight("w", (10, 10), True), Weight("norm", (10,), True)),
    inputs=(0,),
    outputs=(6,),
    saved=(1, 3, 4, 5),
    precision="bf16",
)


def test_what_software_keeps() -> None:
    eager, fused = kept(TRACE, fused=False), kept(TRACE, fused=True)
    assert (eager.operands, eager.attention, eager.other, eager.gated) == (120, 0, 20, 40)
    assert eager.total == TRACE.saved_bytes
    # the gathered operand goes back to its shard (10), the float32 copy to the input (10); w's output stays (40)
    assert (fused.operands, fused.attention, fused.other, fused.gated) == (50, 0, 10, 40)


def test_temporaries_are_counted_while_they_live() -> None:
    assert temporaries(TRACE, fused=True) == 80, "both gradients around silu"
    assert temporaries(TRACE, fused=False) == 80
    alone = replace(TRACE, ops=(*TRACE.ops[:8], op("wait", "wait", "backward", (8,), ())))
    assert temporaries(alone, fused=False) == 45, "a weight's gradient is there for a moment"
    assert temporaries(alone, fused=True) == 40


def block(**changes: int) -> dict[str, Layer]:
    """Layers by formula: 1,000 weights a block, 500 at each end; 100 bytes kept of a micro batch."""
    keep = kept(TRACE, fused=False)
    one = Layer(matrices=1000, frozen=0, vectors=0, trained=1000, kept=keep, working=7, passed=3)
    end = replace(one, matrices=500, trained=500)
    return {"embed": end, "block": replace(one, **changes), "head": end}


def test_state_by_zero_stage() -> None:
    def of(zero: int, **changes: int) -> Memory:
        return memory(Plan(dp=4, gbs=16, zero=zero, **changes), 8, block(), BARE)

    first, second, third = (of(zero).peak for zero in (1, 2, 3))
    assert (first.weights, first.gradients, first.optimizer) == (2 * 9000, 2 * 9000, 12 * 9000 / 4)
    assert (second.weights, second.gradients) == (2 * 9000, 2 * 9000 / 4 + 2 * 2000)
    assert (third.weights, third.optimizer) == (2 * 3000, 12 * 9000 / 4)
    assert of(1, shard=2).peak.optimizer == 12 * 9000 / 2
    assert of(1, shard=1).peak.optimizer == 12 * 9000


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    layers = block(matrices=10, frozen=990, trained=10)
    found = memory(Plan(dp=4, gbs=16, zero=1), 8, layers, replace(BARE, frozen_bytes=1.0)).peak
    assert found.gradients == 2 * (8 * 10 + 1000)
    assert found.optimizer == 12 * (8 * 10 + 1000) / 4
    assert found.weights == 8 * (990 * 1 + 10 * 2) + 1000 * 2


def test_stages_of_a_pipeline() -> None:
    found = memory(Plan(pp=4, gbs=8), 6, block(), BARE)
    assert [rank.weights for rank in found.ranks] == [2 * 1500, 2 * 2000, 2 * 2000, 2 * 1500]
    keep = kept(TRACE, fused=False).total
    assert [rank.activations for rank in found.ranks] == [4 * 2 * keep, 3 * 2 * keep, 2 * 2 * keep, 2 * keep]
    assert found.fullest in (0, 1)


def test_low_precision_shrinks_operands_alone() -> None:
    half = replace(BARE, operand_share=0.5)
    whole, low = (memory(Plan(), 1, block(), p).peak.activations for p in (BARE, half))
    assert whole - low == 3 * 60


def test_policies_of_stacks() -> None:
    ngc = stack.load("ngc25.04")
    fp8, bf16 = policy(ngc, ngc.recipe("fp8")), policy(ngc, ngc.recipe("bf16"))
    assert (fp8.weight_bytes, fp8.copy_bytes, fp8.operand_share, fp8.frozen_bytes) == (2.0, 0.0, 0.5, 1.0)
    assert (bf16.weight_bytes, bf16.copy_bytes, bf16.operand_share, bf16.frozen_bytes) == (2.0, 0.0, 1.0, 2.0)
    assert policy(ngc, ngc.recipe("fp8"), "fp8").attention_share == 0.5


def test_verdicts() -> None:
    found = memory(Plan(), 8, block(), BARE)
    used, activations = found.peak.used, found.peak.activations
    assert found.verdict(used).text == "fits"
    assert found.verdict(used - activations / 2).possible
    assert found.verdict(used - activations / 2).over == activations / 2
    assert not found.verdict(used - activations).possible
    assert "out of memory" in found.verdict(1000.0).text


@pytest.mark.parametrize(
    "plan", [Plan(dp=4, gbs=32), Plan(dp=2, cp=2, gbs=8, zero=1), Plan(dp=4, gbs=4, zero=1), Plan()]
)
@pytest.mark.parametrize("name", ["llama31_8b", "llama2_70b_lora"])
def test_the_engine_s_own_figures(plan: Plan, name: str) -> None:
    """`train --dry-run` counts the same without traces; blocks that pass by are counted here in addition."""
    dryrun = pytest.importorskip("timetrial.train.dryrun")
    from timetrial.train.build import empty_model

    config = replace(resolve(name, "mini"), plan=replace(plan, precision="bf16"))
    theirs = dryrun.bytes_per_rank(config, empty_model(config))
    layers = measure(cache.layers(config, "cpu"), fused=False)
    ours = memory(config.plan, config.model.n_layers, layers, engine(config.plan)).peak
    assert ours.optimizer == pytest.approx(theirs.weights + theirs.optimizer, rel=1e-3)
    assert ours.weights == pytest.approx(theirs.in_use, rel=1e-3)
    passing = 2 * layers["block"].trained * 4
    assert theirs.gradients - 1 <= ours.gradients <= theirs.gradients + passing + 1


def proxy() -> RunConfig:
    """62 layers of 405B on 128 H100 (NVIDIA dgxc-benchmarking v25.04.01)."""
    config = find("llama31_405b").official("v5.0", 128)
    plan = Plan(tp=8, cp=2, pp=4, vp=8, dp=2, gbs=128)
    return replace(config, model=replace(LLAMA3_405B, n_layers=62), plan=plan)


def test_a_published_peak() -> None:
    """Logged: 44.27e9 bytes allocated between steps, 70.83e9 reserved at the peak. Predicted 44.6 and 66.7."""
    config, ngc = proxy(), stack.load("ngc25.04")
    layers = measure(cache.layers(config), fused=True)
    found = memory(config.plan, 62, layers, policy(ngc, ngc.recipe("fp8"))).peak
    assert found.weights + found.gradients + found.optimizer == pytest.approx(44.27e9, rel=0.02)
    assert found.total == pytest.approx(70.83e9, rel=0.10)


def test_a_plan_costs_less_than_a_millisecond() -> None:
    layers, plan = block(), Plan(tp=4, pp=16, vp=8, dp=4, gbs=1536)
    start = time.perf_counter()
    for _ in range(20):
        memory(plan, 126, layers, BARE)
    assert (time.perf_counter() - start) / 20 < 2e-3, "about 0.3 ms; twice that on a busy machine"


def of_request(wanted: Request) -> tuple[Memory, float]:
    """A published row's memory, on the stack of its round or release; and its accelerator's."""
    hardware = system.find(wanted.system)
    vendor = "amd" if hardware.accelerator.generation.startswith("cdna") else "nvidia"
    software = stack.for_release(wanted.hints.release) or stack.for_round(wanted.round or "v5.1", vendor)
    recipe = software.recipe(wanted.recipe if wanted.recipe in software.recipes else "bf16")
    layers = measure(cache.layers(wanted.config), software.fuse)
    rules = policy(software, recipe, wanted.attention)
    found = memory(wanted.plan, wanted.config.model.n_layers, layers, rules)
    return found, hardware.accelerator.memory_bytes


@pytest.mark.parametrize(("name", "without"), [("llm_step_times.csv", 0.82), ("vendor_step_times.csv", 0.88)])
def test_no_published_row_is_called_out_of_memory(name: str, without: float) -> None:
    """Every row ran. Most fit as they are told; the others are 70B adapters on one accelerator, by 2 to 6 %, and 70B
    under FSDP with micro batches of 2, whose presets offload 40 of 80 layers (Megatron-Bridge
    scripts/performance/configs/llama). Two rows of adapters say that they pretrain: their FLOP per token tell."""
    if not (FACTS / name).exists():
        pytest.skip("published tables are not here")
    rows = [row for row in read(FACTS / name).rows if row.wanted is not None]
    with (FACTS / name).open(newline="") as file:
        cells = list(csv.DictReader(file))
    lines = {number: row for number, row in enumerate(cells, 2)}
    fitting = 0
    for row in rows:
        wanted = row.wanted
        assert wanted is not None
        values = lines[row.line]
        if values.get("tflops_gpu") and values["tok_s_gpu"]:
            per_token = 1e12 * float(values["tflops_gpu"]) / float(values["tok_s_gpu"])
            if per_token < 5 * wanted.config.model.n_params():
                wanted = request({**values, "task": "lora"})
        found, available = of_request(wanted)
        verdict = found.verdict(available)
        assert verdict.possible, (row.line, verdict.text)
        fitting += not verdict.over
    assert fitting / len(rows) >= without


def test_gated_inputs_go_to_eight_bits_only_where_they_would_not_fit_otherwise() -> None:
    """LoRA of v5.0 on eight B200: FP8_ACT=1 there, and none on GB300, whose memory takes them whole."""
    tight, wide = (
        predict.predict(answer.request_of("llama2_70b_lora", name, 8, plan="gbs=8", round_="v5.1"))
        for name in ("b200-sxm", "gb300-nvl72")
    )
    small, whole = answer.memory_of(tight), answer.memory_of(wide)
    assert small.stashed
    assert not whole.stashed
    halved = 80 * 2 * 28_672 * 8192 * 2 / 2  # half of both of SwiGLU's inputs, bf16, of 80 blocks and 8,192 tokens
    assert whole.peak.activations - small.peak.activations == pytest.approx(halved, rel=0.01)
    verdict = small.verdict(tight.system.accelerator.memory_bytes)
    assert verdict.over == 0
    assert "eight bits" in verdict.text
