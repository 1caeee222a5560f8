"""Traces against what can be counted by hand: products, collectives, bytes, what is kept for the backward pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache as remember
from pathlib import Path

import pytest

from timetrial.config import Lora, Plan, RunConfig, replace
from timetrial.errors import UserError
from timetrial.models.llama.config import LlamaConfig
from timetrial.predict import cache
from timetrial.predict.events import LayerTrace, Op, dumps, flops, loads
from timetrial.predict.trace import trace_layers
from timetrial.workloads.workload import resolve

TOKENS = 8192
BF16, FLOAT = 2, 4


def config_of(workload: str, **plan: object) -> RunConfig:
    config = resolve(workload, "official")
    return replace(config, plan=replace(config.plan, **plan))


@remember
def traced(workload: str, kind: str = "cuda", **plan: object) -> dict[str, LayerTrace]:
    return trace_layers(config_of(workload, **plan), kind)


def matrices(model: LlamaConfig) -> dict[str, int]:
    """Elements of a block's matrices by their name in it."""
    return {
        name.removeprefix("layers.0."): out * inputs
        for name, (out, inputs) in model.linears().items()
        if name.startswith("layers.0.")
    }


def sums(trace: LayerTrace) -> Counter[tuple[str, str]]:
    """FLOP of the matrix products by phase and role."""
    found: Counter[tuple[str, str]] = Counter()
    for op in trace.ops:
        if op.kind == "matmul":
            found[op.phase, op.role] += flops(op)
    return found


def of_kind(trace: LayerTrace, kind: str, *phases: str) -> list[Op]:
    return [op for op in trace.ops if op.kind == kind and (not phases or op.phase in phases)]


@pytest.mark.parametrize("workload", ["llama31_8b", "llama31_405b"])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (8, 1), (4, 2), (1, 4)])
def test_a_block_multiplies_each_matrix_three_times(workload: str, tp: int, cp: int) -> None:
    block = traced(workload, tp=tp, cp=cp)["block"]
    once = 2 * sum(matrices(config_of(workload).model).values()) * TOKENS // (tp * cp)
    assert sums(block) == {("forward", "fprop"): once, ("backward", "dgrad"): once, ("backward", "wgrad"): once}
    for op in of_kind(block, "matmul"):
        assert op.module in matrices(config_of(workload).model)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (8, 1), (4, 2), (1, 4)])
def test_attention_is_half_of_the_square_over_all_ranks(tp: int, cp: int) -> None:
    """A ring's first block is causal, each later one half a square of its tokens: together cp^2 / 2 of them, shared."""
    model = config_of("llama31_405b").model
    block = traced("llama31_405b", tp=tp, cp=cp)["block"]
    for phase, products in (("forward", 2), ("backward", 5)):
        ops = of_kind(block, "attention", phase)
        assert len(ops) == cp
        assert [op.role for op in ops] == [f"{phase} causal", *[phase] * (cp - 1)]
        assert sum(map(flops, ops)) == products * TOKENS**2 * model.dim // (tp * cp)


@pytest.mark.parametrize("tp", [1, 4])
def test_the_head_multiplies_three_times_too(tp: int) -> None:
    model = config_of("llama31_8b").model
    found = sums(traced("llama31_8b", tp=tp)["head"])
    once = 2 * TOKENS * model.vocab_size * model.dim // tp
    # where a rank has the whole vocabulary the forward pass makes the gradients at once
    backward = "forward" if tp == 1 else "backward"
    assert found == {("forward", "fprop"): once, (backward, "dgrad"): once, (backward, "wgrad"): once}


def test_a_pipelines_loss_gets_logits() -> None:
    assert sums(traced("llama31_8b", pp=2, gbs=8)["head"])["backward", "wgrad"] > 0
    assert traced("llama31_8b", pp=2, gbs=8)["block"] == traced("llama31_8b")["block"]


def test_full_recomputation_runs_the_block_again_up_to_its_last_product() -> None:
    """What the last product gives is nobody's input in the backward pass, and torch stops before it."""
    sizes = matrices(config_of("llama31_405b").model)
    block = traced("llama31_405b", tp=4, recompute="full")["block"]
    again = 2 * (sum(sizes.values()) - sizes["feed_forward.w2"]) * TOKENS // 4
    assert sums(block)["recompute", "fprop"] == again
    assert len(of_kind(block, "attention", "recompute")) == 1
    assert [op.name for op in of_kind(block, "collective", "recompute")] == [
        "all_gather",
        "reduce_scatter",
        "all_gather",
    ]
    assert block.only("forward") == traced("llama31_405b", tp=4)["block"].only("forward")
    assert block.saved == block.inputs
    assert block.saved_bytes == TOKENS // 4 * 16_384 * BF16


def test_selective_recomputation_makes_no_product_again() -> None:
    block = traced("llama31_405b", tp=4, recompute="selective")["block"]
    assert not of_kind(block, "matmul", "recompute")
    assert not of_kind(block, "attention", "recompute")
    assert of_kind(block, "elementwise", "recompute")
    assert block.saved_bytes < traced("llama31_405b", tp=4)["block"].saved_bytes


def test_what_a_block_keeps_for_its_backward_pass() -> None:
    """Counted by hand from the model's code, bytes a token; the norms keep their float32 input and its product."""
    model = config_of("llama31_8b").model
    kv = model.n_kv_heads * model.head_dim
    norm = FLOAT * model.dim + FLOAT + BF16 * model.dim  # x in float32, 1 / rms, what the weight is multiplied with
    attention = BF16 * model.dim + BF16 * (2 * model.dim + 2 * kv) + FLOAT * model.n_heads  # x; q, k, v, out; lse
    ffn = BF16 * model.dim + 4 * BF16 * model.ffn_dim  # x; w1 x, silu, w3 x, their product
    block = traced("llama31_8b")["block"]
    assert block.saved_bytes == pytest.approx(
        TOKENS * (2 * norm + attention + ffn), rel=1e-5
    )  # flash keeps a few bytes


def test_tensor_parallelism_gathers_and_scatters_tokens() -> None:
    block = traced("llama31_405b", tp=4)["block"]
    whole = TOKENS * 16_384 * BF16
    found = [(op.phase, op.name, op.module, op.axis, op.bytes) for op in of_kind(block, "collective")]
    assert found == [
        ("forward", "all_gather", "attention", "tp", whole),
        ("forward", "reduce_scatter", "attention.wo", "tp", whole),
        ("forward", "all_gather", "feed_forward", "tp", whole),
        ("forward", "reduce_scatter", "feed_forward.w2", "tp", whole),
        ("backward", "all_gather", "feed_forward.w2", "tp", whole),
        ("backward", "reduce_scatter", "feed_forward", "tp", whole),
        ("backward", "all_gather", "attention.wo", "tp", whole),
        ("backward", "reduce_scatter", "attention", "tp", whole),
    ]
    layers = traced("llama31_405b", tp=4)
    ends = {kind: [(op.name, op.bytes) for op in of_kind(layers[kind], "collective")] for kind in ("embed", "head")}
    assert ends == {
        "embed": [("reduce_scatter", whole), ("all_gather", whole)],
        "head": [
            ("all_gather", whole),
            ("all_reduce", TOKENS * FLOAT),
            ("all_reduce", 2 * TOKENS * FLOAT),
            ("reduce_scatter", whole),
        ],
    }


def test_every_collective_is_waited_for_before_its_result_is_read() -> None:
    for trace in traced("llama31_405b", tp=4, cp=2, recompute="full").values():
        running: set[int] = set()
        for op in trace.ops:
            if op.kind == "wait":
                running -= set(op.reads)
                continue
            assert not running & set(op.reads), op
            if op.kind == "collective":
                running |= set(op.writes)
        assert not running


def test_a_ring_passes_keys_and_values_round() -> None:
    cp, model = 4, config_of("llama31_405b").model
    block = traced("llama31_405b", tp=2, cp=cp)["block"]
    both = 2 * (TOKENS // cp) * model.n_kv_heads // 2 * model.head_dim
    ring = [op for op in of_kind(block, "collective") if op.axis == "cp"]
    sent = Counter((op.phase, op.bytes) for op in ring if op.name == "send")
    assert sent == {
        ("forward", both * BF16): cp - 1,
        ("backward", both * BF16): cp - 1,
        ("backward", both * FLOAT): cp,  # their gradients, which come home
    }
    assert sent == Counter((op.phase, op.bytes) for op in ring if op.name == "receive")


def test_frozen_weights_have_no_weight_gradients() -> None:
    config = config_of("llama2_70b_lora", tp=4)
    layers = traced("llama2_70b_lora", tp=4)
    base = 2 * sum(matrices(config.model).values()) * TOKENS // 4
    found: Counter[str] = Counter()
    for op in of_kind(layers["block"], "matmul"):
        if op.module.endswith(".base") or op.module.startswith("feed_forward"):
            found[op.role] += flops(op)
    assert found == {"fprop": base, "dgrad": base}
    trained = {w.name: (w.shape, w.axis_sum) for w in layers["block"].weights if w.trained}
    assert trained == {
        "attention.wq.lora_a": ((16, 8192), "tp"),
        "attention.wq.lora_b": ((2048, 16), ""),
        "attention.wk.lora_b": ((256, 16), ""),
        "attention.wv.lora_b": ((256, 16), ""),
        "attention.wo.lora_a": ((16, 2048), ""),
        "attention.wo.lora_b": ((8192, 16), "tp"),
    }
    wgrads = [op.module for op in of_kind(layers["block"], "matmul") if op.role == "wgrad"]
    assert len(wgrads) == len(trained)
    assert not layers["embed"].only("backward")
    assert not [op for op in of_kind(layers["head"], "matmul") if op.role == "wgrad"]


def test_weights_are_this_ranks_part() -> None:
    layers = traced("llama31_405b", tp=4, cp=2)
    model = config_of("llama31_405b").model
    elements = {kind: sum(_size(w.shape) for w in trace.weights if not w.axis_sum) for kind, trace in layers.items()}
    assert elements == {
        "embed": model.vocab_size * model.dim // 4,
        "block": sum(matrices(model).values()) // 4,
        "head": model.vocab_size * model.dim // 4,
    }
    assert [w.name for t in layers.values() for w in t.weights if w.axis_sum] == [
        "attention_norm.weight",
        "ffn_norm.weight",
        "norm.weight",
    ]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def test_tensors_are_named_by_their_memory() -> None:
    """All that is read was made before, came in, or is a weight, a table or a gradient; and has a size."""
    for trace in traced("llama31_405b", tp=4, cp=2).values():
        made: set[int] = set(trace.inputs)
        foreign: set[int] = set()
        for op in trace.ops:
            assert set(op.reads) | set(op.writes) <= set(trace.tensor_bytes)
            assert len(set(op.reads)) == len(op.reads)
            foreign |= set(op.reads) - made
            made |= set(op.writes)
        few = len(trace.weights) + 6  # cos, sin, the output's gradient, flash attention's states
        assert len(foreign) <= few
        assert set(trace.saved) <= set(trace.tensor_bytes)


def test_a_plan_of_many_ranks_traces_as_its_tp_and_cp_alone() -> None:
    many = traced("llama31_405b", tp=8, cp=2, pp=16, dp=512, gbs=8192, vp=1)
    few = traced("llama31_405b", tp=8, cp=2)
    assert many == few


def test_a_mapping_that_cannot_be_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="key/value heads"):
        trace_layers(config_of("llama31_405b", tp=64))
    with pytest.raises(UserError, match="does not split into"):
        trace_layers(config_of("llama31_405b", cp=3))
    with pytest.raises(UserError, match="flash attention"):
        trace_layers(config_of("llama31_405b", cp=2, precision="fp32"))


def test_json_keeps_a_trace() -> None:
    for trace in traced("llama2_70b_lora", tp=4).values():
        assert loads(dumps(trace)) == trace


def test_a_cpus_ways_are_its_own() -> None:
    block = traced("llama31_8b", kind="cpu", mbs=1)["block"]
    assert block.tensor_bytes[block.inputs[0]] == TOKENS * 4096 * FLOAT
    assert sums(block) == sums(traced("llama31_8b")["block"])


# ---- the cache -----------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "timetrial" / "traces"


def test_a_trace_is_kept_and_a_damaged_one_made_anew(directory: Path) -> None:
    config = config_of("llama31_8b", tp=2)
    made = cache.layers(config)
    (path,) = directory.iterdir()
    for damage in (b"", b"{", path.read_bytes()[:-20], path.read_bytes().replace(b"forward", b"backward", 1)):
        whole = path.read_bytes()
        path.write_bytes(damage)
        cache._layers.cache_clear()
        assert cache.layers(config) == made
        assert path.read_bytes() == whole
    assert list(directory.iterdir()) == [path]


def test_the_key_is_what_decides_a_trace(directory: Path) -> None:
    base = config_of("llama31_8b", tp=2)
    for same in ({"dp": 4}, {"pp": 4}, {"gbs": 64}, {"order": "dp-tp-cp-pp"}, {"zero": 2}):
        assert cache.essence(replace(base, plan=replace(base.plan, **same))) == cache.essence(base)
    for other in ({"tp": 4}, {"cp": 2}, {"mbs": 2}, {"recompute": "full"}, {"precision": "fp32"}):
        assert cache.essence(replace(base, plan=replace(base.plan, **other))) != cache.essence(base)
    assert cache.essence(replace(base, lora=Lora())) != cache.essence(base)
    assert cache.essence(replace(base, data=replace(base.data, seq_len=4096))) != cache.essence(base)
    one = replace(base, plan=Plan())
    assert cache.essence(one) != cache.essence(replace(one, plan=Plan(pp=2)))


def test_a_kept_trace_is_read_at_once_and_without_torch(directory: Path) -> None:
    cache.layers(config_of("llama31_8b", tp=2))
    code = """
import json, sys, time
from timetrial.config import replace
from timetrial.predict import cache
from timetrial.workloads.workload import resolve
config = resolve("llama31_8b", "official")
config = replace(config, plan=replace(config.plan, tp=2))
start = time.perf_counter()
cache.layers(config)
print(json.dumps(["torch" in sys.modules, time.perf_counter() - start]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    torch_came, seconds = json.loads(result.stdout)
    assert not torch_came
    assert seconds < 0.2  # some 10 ms on an idle machine


def test_a_trace_does_not_grow_with_the_sequence() -> None:
    """The loss goes by chunks of tokens, of which a long sequence has many thousands."""
    config = config_of("llama31_8b")
    sizes = (2**20, 10**8)
    long = [trace_layers(replace(config, data=replace(config.data, seq_len=n))) for n in sizes]
    for kind in ("embed", "block", "head"):
        assert len(long[0][kind].ops) == len(long[1][kind].ops)
    assert len(long[0]["head"].ops) < 5000
    for tokens, traces in zip(sizes, long, strict=True):
        products = of_kind(traces["head"], "matmul")
        assert sum(map(flops, products)) == 6 * tokens * config.model.dim * config.model.vocab_size
