"""The stack's pass makes of a trace the kernels that record runs execute."""

from __future__ import annotations

from collections import Counter

import pytest

from timetrial.config import Plan, RunConfig, replace
from timetrial.predict import cache, fuse
from timetrial.predict.events import LayerTrace, Op, flops
from timetrial.predict.kernels import Kernel, Layer, compile_layer
from timetrial.systems import stack as stacks
from timetrial.workloads.workload import resolve


def traces(workload: str, **degrees: int) -> dict[str, LayerTrace]:
    config: RunConfig = resolve(workload, "official")
    plan = Plan(precision="bf16", mbs=1, gbs=degrees.get("dp", 1) * 64, zero=1, **degrees)
    return cache.layers(replace(config, plan=plan))


@pytest.fixture(scope="module")
def big() -> LayerTrace:
    return traces("llama31_405b", tp=4, cp=2)["block"]


@pytest.fixture(scope="module")
def lora() -> LayerTrace:
    return traces("llama2_70b_lora", dp=8)["block"]


def made(trace: LayerTrace, stack: str = "ngc25.04", recipe: str = "fp8", context: str = "ring") -> Layer:
    of = stacks.load(stack)
    return compile_layer(trace, of, of.recipe(recipe), "bf16", context)


def shapes(layer: Layer, role: str) -> list[tuple[int, ...]]:
    return [k.shape for k in layer.kernels if k.kind == "matmul" and k.role == role]


def work(kernels: tuple[Kernel, ...]) -> int:
    return sum(flops(Op(k.kind, "", k.phase, "", shape=k.shape, role=k.role)) for k in kernels if k.shape)


def test_a_block_has_the_four_products_of_fused_layers(big: LayerTrace) -> None:
    layer = made(big)
    tokens, dim, ffn, heads = 4096, 16_384, 53_248 // 4, (16_384 + 2 * 1024) // 4
    assert shapes(layer, "fprop") == [
        (1, tokens, heads, dim),
        (1, tokens, dim, dim // 4),
        (1, tokens, 2 * ffn, dim),
        (1, tokens, dim, ffn),
    ]
    assert sorted(shapes(layer, "dgrad")) == sorted((1, m, k, n) for _, m, n, k in shapes(layer, "fprop"))
    assert sorted(shapes(layer, "wgrad")) == sorted((1, n, k, m) for _, m, n, k in shapes(layer, "fprop"))


@pytest.mark.parametrize(("stack", "context"), [("ngc25.04", "ring"), ("ngc25.04", "heads"), ("engine", "ring")])
def test_no_work_is_lost_or_made_up(big: LayerTrace, stack: str, context: str) -> None:
    layer = made(big, stack, "bf16", context)
    wanted = sum(big.flops.values())
    # a ring's blocks leave out the corners of the causal square's diagonal; exchanged heads halve the whole of it
    assert work(layer.kernels) == pytest.approx(wanted, rel=1e-9)


def test_collectives_carry_the_low_format_where_products_read_it(big: LayerTrace) -> None:
    sizes = {}
    for recipe in ("bf16", "fp8"):
        kernels = made(big, recipe=recipe).kernels
        sizes[recipe] = Counter((k.role, k.bytes) for k in kernels if k.part == "tp")
    whole = 4096 * 16_384 * 2
    # forward two, backward two of gradients and two gathered again for weights' gradients
    assert sizes["bf16"] == {("all_gather", whole): 6, ("reduce_scatter", whole): 4}
    assert sizes["fp8"] == {("all_gather", whole // 2): 6, ("reduce_scatter", whole): 4}


def test_fusing_keeps_the_order_of_a_record_run_and_moves_fewer_bytes(big: LayerTrace) -> None:
    fused, eager = made(big, recipe="bf16"), made(big, "engine", "bf16")
    names = [k.part if k.kind != "matmul" else k.role for k in fused.only("forward") if k.part != "cp"]
    assert names == [
        "other", "tp", "fprop", "other", "other", "attention", "attention", "other", "fprop", "tp",
        "other", "tp", "fprop", "other", "fprop", "tp", "other",
    ]  # fmt: skip
    moved = [sum(k.bytes for k in layer.kernels if k.kind == "memory") for layer in (fused, eager)]
    assert moved[0] < moved[1] / 3
    assert len(fused.kernels) < len(eager.kernels) / 2


def test_low_precision_keeps_less_and_casts_what_no_kernel_makes(big: LayerTrace) -> None:
    bf16, fp8, fp4 = (made(big, "ngc25.09", recipe) for recipe in ("bf16", "fp8", "nvfp4"))
    assert fp4.saved_bytes < fp8.saved_bytes < bf16.saved_bytes
    formats = {k.format for k in fp8.kernels if k.kind == "matmul"}
    assert formats == {"fp8"}
    assert not any(k.part == "cast" for k in bf16.kernels)


def test_the_head_stays_in_bf16() -> None:
    head = made(traces("llama31_8b", tp=1)["head"])
    assert {k.format for k in head.kernels if k.kind == "matmul"} == {"bf16"}


def test_adapters_are_thin_products_in_bf16_and_frozen_weights_have_no_gradients(lora: LayerTrace) -> None:
    layer = made(lora)
    thin = [k for k in layer.kernels if k.kind == "matmul" and min(k.shape[1:]) == 16]
    wide = [k for k in layer.kernels if k.kind == "matmul" and min(k.shape[1:]) > 16]
    assert {k.format for k in thin} == {"bf16"}
    assert {k.format for k in wide} == {"fp8"}
    assert {k.role for k in wide} == {"fprop", "dgrad"}
    assert layer.trained == 557_056 < layer.weights


def test_a_stack_that_does_not_fuse_adapters_moves_more(lora: LayerTrace) -> None:
    apart, together = (
        sum(k.bytes for k in made(lora, stack).kernels if k.kind == "memory") for stack in ("ngc25.04", "ngc25.09")
    )
    assert apart > 1.15 * together


def test_exchanged_heads_attend_over_the_whole_sequence() -> None:
    block = traces("llama2_70b_lora", cp=8)["block"]
    layer = made(block, context="heads")
    attention = [k for k in layer.kernels if k.kind == "attention"]
    assert [(k.shape, k.role) for k in attention] == [
        ((1, 8, 1, 8192, 8192, 128), "forward causal"),
        ((1, 8, 1, 8192, 8192, 128), "backward causal"),
    ]
    q, kv = 1024 * 8192 * 2, 1024 * 1024 * 2
    exchanges = [k.bytes for k in layer.kernels if k.role == "all_to_all"]
    assert exchanges == [q, kv, kv, q, q, q, kv, kv]
    assert not any(k.role in ("send", "receive") for k in layer.kernels)


def test_heads_that_do_not_divide_stay_a_ring(big: LayerTrace) -> None:
    four = traces("llama31_405b", tp=8, cp=2)["block"]  # one key/value head a rank
    assert made(four, context="heads") == made(four, context="ring")


def test_full_recomputation_runs_the_forward_kernels_again() -> None:
    config = resolve("llama31_8b", "official")
    plan = Plan(precision="bf16", mbs=1, gbs=64, zero=1, recompute="full")
    layer = made(cache.layers(replace(config, plan=plan))["block"])
    forward, again = ([k.shape for k in layer.only(phase) if k.kind == "matmul"] for phase in ("forward", "recompute"))
    assert again == forward[:-1], "torch stops when all that the backward pass reads is there"


def test_copies_are_read_through() -> None:
    ops = [
        Op("elementwise", "silu", "forward", "", reads=(1,), writes=(2,)),
        Op("elementwise", "clone", "forward", "", reads=(2,), writes=(3,)),
        Op("matmul", "mm", "forward", "w", reads=(3, 9), writes=(4,), shape=(1, 256, 256, 256), role="fprop"),
    ]
    trace = LayerTrace("block", tuple(ops), dict.fromkeys((1, 2, 3, 4), 8), (), (1,), (4,), (), "bf16")
    kept = fuse.simplified(trace, fuse.constants(trace), exchange_heads=False)
    assert [(op.name, op.reads) for op in kept] == [("silu", (1,)), ("mm", (2, 9))]
