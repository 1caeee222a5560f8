"""Bytes of an accelerator at the peak of a training step, by kind and pipeline rank, from traces and a plan.

State. Weights as products take them lie on every data-parallel rank (ZeRO stages 1 and 2) or are gathered
block by block (3); gradients lie whole until the step ends (1) or in shards (2, 3); master weights and
moments always lie in shards (Rajbhandari et al. 2020, arXiv:1910.02054). That is what Megatron's distributed
optimizer and this engine do alike (`parallel/fsdp.py`); they differ in bytes per element (`MemoryPolicy`).
Frozen weights have neither gradients nor moments.

Activations. A rank's peak is where its warm-up of forward passes ends and the first backward pass runs: what a
micro batch leaves alive in a stage, times the micro batches in flight there, by the tables of
`predict/actions.py`, and the temporaries of one layer's backward pass. What a layer leaves alive is its trace's
`saved`; software that fuses keeps less of it (`measure`).

Beside that: the accelerator's context and communication library (assumed), and a share for fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from timetrial.config import Plan
from timetrial.parallel.plan import split_layers, stage_rank
from timetrial.predict.events import LayerTrace
from timetrial.predict.keep import Kept, kept, temporaries
from timetrial.systems.stack import Recipe, Stack

GIB = 2**30
KEPT_AT_LEAST = 0.25
"""Of activations that cannot be offloaded or recomputed away: inputs of blocks, and the block that runs. The most that
a published run offloads is 92 of 126 blocks (NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs/llama: 405B on
GB200)."""


@dataclass(frozen=True)
class MemoryPolicy:
    """Bytes per element and habits of one kind of training software."""

    weight_bytes: float = 2.0
    """Of one weight in use, of a block's matrices."""
    other_weight_bytes: float = 2.0
    """Of one weight in use, of embedding, head and vectors."""
    copy_bytes: float = 0.0
    """Of low-precision copies of one weight of a block's matrices, beside `weight_bytes`."""
    frozen_bytes: float = 2.0
    """Of one frozen weight of a block's matrices, copies with it."""
    gradient_bytes: float = 2.0
    """Of one gradient as it is added up over micro batches."""
    gradient_buffer: bool = True
    """Whether stage 1 keeps gradients whole even where a step has one micro batch."""
    master_bytes: float = 4.0
    """Of one master weight, sharded."""
    moment_bytes: float = 8.0
    """Of both AdamW moments of one weight, sharded."""
    frozen_master: bool = False
    """Whether frozen weights have master weights too."""
    fused: bool = True
    """Whether elementwise results are made again from what products keep, and gathered tensors gathered again."""
    operand_share: float = 1.0
    """Bytes of what is kept for weight-gradient products, as a share of the trace's: 0.5 for fp8."""
    gated_bits: bool = False
    """Whether SwiGLU's inputs are kept in eight bits where they would not fit otherwise."""
    attention_share: float = 1.0
    """The same of what is kept for attention's backward pass."""
    fixed_bytes: float = 2.0 * GIB
    """Context, kernels and the communication library's buffers (assumed)."""
    fragmentation: float = 0.10
    """Of activations and temporaries, reserved by the allocator beyond what is used (assumed)."""


def engine(plan: Plan) -> MemoryPolicy:
    """What this package's own engine does, as `train/dryrun.py` counts it: weights are kept in float32 shards, and
    used as gathered copies in the format of products."""
    bf16 = plan.precision == "bf16"
    used = 2.0 if bf16 else 4.0 if plan.dp * plan.cp > 1 else 0.0
    return MemoryPolicy(
        weight_bytes=used,
        other_weight_bytes=used,
        frozen_bytes=used,
        gradient_bytes=4.0,
        gradient_buffer=False,
        frozen_master=True,
        fused=False,
    )


def policy(stack: Stack, recipe: Recipe, attention: str = "bf16") -> MemoryPolicy:
    """What `stack` does when its linear layers run by `recipe`, attention in bf16 or fp8.

    Products in low precision take weights and their transposes, a copy each; where the master weight is cast
    once a step there is no bf16 weight beside them. Frozen weights then lie there once, and are turned where a
    product needs that: 70B of them and their activations on one accelerator leave room for no second copy.
    Operands of weight gradients are kept as they are read.
    """
    low = recipe.bytes < 2
    return MemoryPolicy(
        weight_bytes=2 * recipe.bytes if low and recipe.weights_low else 2.0,
        copy_bytes=2 * recipe.bytes if low and not recipe.weights_low else 0.0,
        frozen_bytes=recipe.bytes if low and recipe.weights_low else 2.0 + (2 * recipe.bytes if low else 0.0),
        gradient_bytes=stack.gradient_bytes,
        fused=stack.fuse,
        operand_share=recipe.bytes / 2 if low and "wgrad" in recipe.roles else 1.0,
        attention_share=0.5 if attention == "fp8" else 1.0,
        gated_bits=low and stack.stash,
    )


@dataclass(frozen=True)
class Layer:
    """What one layer of a kind needs on one rank, before sharding over data-parallel ranks."""

    matrices: int
    """Elements of trained weights with two axes or more."""
    frozen: int
    """Elements of frozen weights with two axes or more."""
    vectors: int
    """Elements of the others."""
    trained: int
    """Elements of all that are trained."""
    kept: Kept
    """What one micro batch leaves alive until its backward pass."""
    working: int
    """Peak of temporaries in the backward pass (with what it computes again), bytes."""
    passed: int
    """What one micro batch hands on, bytes."""

    @property
    def elements(self) -> int:
        """Of all weights."""
        return self.matrices + self.frozen + self.vectors


def measure(traces: Mapping[str, LayerTrace], fused: bool) -> dict[str, Layer]:
    """What each kind of layer needs. Some milliseconds: done once per traces, not per plan."""
    return {kind: _measure(trace, fused) for kind, trace in traces.items()}


def _measure(trace: LayerTrace, fused: bool) -> Layer:
    sizes = [(math.prod(w.shape), len(w.shape) > 1, w.trained) for w in trace.weights]
    return Layer(
        matrices=sum(n for n, matrix, trained in sizes if matrix and trained),
        frozen=sum(n for n, matrix, trained in sizes if matrix and not trained),
        vectors=sum(n for n, matrix, _ in sizes if not matrix),
        trained=sum(n for n, _, trained in sizes if trained),
        kept=kept(trace, fused),
        working=temporaries(trace, fused),
        passed=sum(trace.tensor_bytes.get(i, 0) for i in trace.outputs),
    )


@dataclass(frozen=True)
class RankMemory:
    """Bytes of an accelerator of one pipeline rank at its peak."""

    weights: float
    """In use, low-precision copies with them."""
    gradients: float
    optimizer: float
    """Master weights and moments of this rank's shard."""
    activations: float
    """Left alive by the micro batches in flight."""
    working: float
    """Temporaries of one layer's backward pass, and what pipeline stages receive ahead."""
    fixed: float
    """Context and communication library."""
    fragmentation: float
    """Reserved and not used."""

    @property
    def used(self) -> float:
        """Without what is reserved and not used."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working + self.fixed

    @property
    def total(self) -> float:
        return self.used + self.fragmentation


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits into memory."""

    possible: bool
    """False where no handling of activations makes it fit."""
    over: float
    """Bytes of activations that must be offloaded to the host or recomputed beyond the plan; 0 where all fit."""
    text: str
    """For people."""


@dataclass(frozen=True)
class Memory:
    """Of a run."""

    ranks: tuple[RankMemory, ...]
    """By pipeline rank."""
    stashed: bool = False
    """With SwiGLU's inputs in eight bits, since they would not fit otherwise."""

    @property
    def fullest(self) -> int:
        """The pipeline rank that needs most."""
        return max(range(len(self.ranks)), key=lambda r: self.ranks[r].total)

    @property
    def peak(self) -> RankMemory:
        """That rank's bytes."""
        return self.ranks[self.fullest]

    def verdict(self, memory_bytes: float) -> Verdict:
        """Whether every rank's bytes, fragmentation not counted, fit into an accelerator's memory of that size."""
        over = max(rank.used - memory_bytes for rank in self.ranks)
        if over <= 0:
            return Verdict(True, 0.0, "fits with SwiGLU's inputs kept in eight bits" if self.stashed else "fits")
        # an allocator gives back what it reserves, and software offloads or recomputes; it must keep the state, and
        # one layer in many of what is left alive
        possible = all(rank.used - (1 - KEPT_AT_LEAST) * rank.activations <= memory_bytes for rank in self.ranks)
        gib = f"{over / GIB:.1f} GiB"
        if possible:
            how = "offloaded or recomputed, which the step does not count"
            return Verdict(True, over, f"fits only if {gib} of activations are {how}")
        return Verdict(False, over, f"out of memory by {gib}, offloaded activations or not")


def memory(
    plan: Plan, n_layers: int, layers: Mapping[str, Layer], policy: MemoryPolicy, capacity: float = math.inf
) -> Memory:
    """Bytes by pipeline rank of a model of `n_layers` blocks under `plan`. `layers`: of `measure`.

    `capacity`: of an accelerator, bytes; where it is passed, a policy that may keeps SwiGLU's inputs in eight bits.
    Closed forms, well below a millisecond.
    """
    stages: list[list[list[str]]] = [[] for _ in range(plan.pp)]
    blocks = [[0] * plan.vp for _ in range(plan.pp)]
    for index, (embedding, part, head) in enumerate(split_layers(n_layers, plan.pp * plan.vp)):
        rank = stage_rank(index, plan)
        blocks[rank][len(stages[rank])] = len(part)
        stages[rank].append(["embed"] * embedding + ["head"] * head)

    def found(stashed: bool) -> Memory:
        ranks = range(plan.pp)
        return Memory(
            tuple(_rank(plan, r, blocks[r], stages[r], layers, policy, stashed) for r in ranks), stashed=stashed
        )

    whole = found(False)
    if policy.gated_bits and whole.peak.used > capacity:
        return found(True)
    return whole


def in_flight(plan: Plan, rank: int) -> list[int]:
    """Micro batches alive in each of a pipeline rank's stages when most are, the one running among them.

    1F1B: as many as ranks follow, and itself. Interleaved: all that the warm-up runs through each stage, in
    turns of pp micro batches, and one. Zero bubble: as 1F1B or interleaved, and those whose weight gradients
    wait, one for each rank before. ZB-V: 2 pp over both stages, more in the first on early ranks.
    """
    m = plan.grad_accumulation_steps
    if plan.pp == 1:
        return [1]
    if plan.schedule == "zbv":
        first = min(m, 2 * (plan.pp - rank) - 1 + rank)
        return [first, min(m, rank + 1)]
    split = plan.schedule == "zb"
    if plan.vp == 1 and not split:
        return [min(m, plan.pp - rank)]
    rounds = max(1, m // plan.pp)
    in_round = m // rounds
    ahead = (plan.vp - 1) * in_round + (1 if split else 2) * (plan.pp - 1 - rank) + 1 + (rank if split else 0)
    alive = min(ahead, m * plan.vp)
    turns, rest = divmod(alive, in_round)
    return [
        in_round * (turns // plan.vp + (turns % plan.vp > chunk)) + (rest if turns % plan.vp == chunk else 0)
        for chunk in range(plan.vp)
    ]


def _rank(
    plan: Plan,
    rank: int,
    blocks: list[int],
    ends: list[list[str]],
    layers: Mapping[str, Layer],
    policy: MemoryPolicy,
    stashed: bool,
) -> RankMemory:
    block = layers["block"]
    others = [layers[kind] for chunk in ends for kind in chunk]
    n = sum(blocks)
    weights = n * _weights(block, policy, low=True) + sum(_weights(layer, policy, low=False) for layer in others)
    trained = n * block.trained + sum(layer.trained for layer in others)
    elements = n * block.elements + sum(layer.elements for layer in others)
    shard, zero = plan.shard_size, plan.zero_stage if plan.dp * plan.cp > 1 else 1
    gradients = trained * policy.gradient_bytes
    in_turn = min(n, 2)  # the block that runs and the one fetched ahead, or reduced behind
    several = policy.gradient_buffer or plan.pp > 1 or plan.grad_accumulation_steps > 1
    if plan.dp * plan.cp > 1 and (zero > 1 or not several):
        gradients = min(gradients, gradients / shard + in_turn * block.trained * policy.gradient_bytes)
    if zero == 3:
        used = in_turn * _weights(block, policy, low=True) + sum(_weights(x, policy, low=False) for x in others)
        weights = min(weights, used)
    masters = elements if policy.frozen_master else trained
    optimizer = (masters * policy.master_bytes + trained * policy.moment_bytes) / shard
    if zero == 3 and not policy.frozen_master:
        optimizer += (elements - trained) * policy.other_weight_bytes / shard
    alive = in_flight(plan, rank)
    activations = sum(
        count * (part * _kept(block, policy, stashed) + sum(_kept(layers[kind], policy, stashed) for kind in chunk))
        for count, part, chunk in zip(alive, blocks, ends, strict=True)
    )
    working = max((layer.working for layer in [*others, *([block] if n else [])]), default=0)
    received = 0 if plan.pp == 1 else 4 * block.passed  # one sent and one received, forward and backward
    return RankMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        working=working + received,
        fixed=policy.fixed_bytes,
        fragmentation=policy.fragmentation * (activations + working),
    )


def _weights(layer: Layer, policy: MemoryPolicy, low: bool) -> float:
    """Bytes of a layer's weights in use; `low` where its matrices follow the recipe."""
    if not low:
        return layer.elements * policy.other_weight_bytes
    trained = layer.matrices * (policy.weight_bytes + policy.copy_bytes)
    return trained + layer.frozen * policy.frozen_bytes + layer.vectors * policy.other_weight_bytes


def _kept(layer: Layer, policy: MemoryPolicy, stashed: bool) -> float:
    """Bytes that one micro batch leaves alive in a layer."""
    kept = layer.kept
    gated = kept.gated * (0.5 if stashed else 1.0)
    return kept.operands * policy.operand_share + kept.attention * policy.attention_share + gated + kept.other
