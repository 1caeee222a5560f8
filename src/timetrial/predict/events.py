"""What a trace is: the operators and collectives of one layer on one rank, in order, with what they move.

A trace holds shapes and dependences, no times. It says what the model code asks for; what a machine's
software makes of it (fusion, low precision) is the stack's pass, what it costs is the price's.

Dependences are by tensor ids. A view has the id of what it is a view of, an in-place result that of its
input; an id's bytes are those of the memory, counted once.

Torch-free: traces are made by `trace.py`, stored as JSON and read without torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("forward", "recompute", "backward")
KINDS = ("matmul", "attention", "elementwise", "collective", "wait")


@dataclass(frozen=True)
class Op:
    """One kernel-sized piece of work, as the model code asks for it."""

    kind: str
    """matmul, attention, elementwise (everything bound by memory), collective, or wait (for a collective)."""
    name: str
    """The operator: mm, bmm, silu, flash_attention, all_gather, reduce_scatter, all_reduce, all_to_all, send ..."""
    phase: str
    """forward, recompute (forward work done again in the backward pass) or backward."""
    module: str
    """Path inside the layer of the module whose code asked for it: "attention.wq", "ffn_norm"; "" is the layer."""
    reads: tuple[int, ...] = ()
    """Tensor ids, each once."""
    writes: tuple[int, ...] = ()
    """Tensor ids."""
    shape: tuple[int, ...] = ()
    """matmul: (batch, m, n, k). attention: (batch, heads, kv_heads, tokens, kv_tokens, head_dim). Else empty."""
    role: str = ""
    """matmul: fprop, dgrad (gradient of the input), wgrad (of the weight), or product (no weight among its operands).
    attention: forward or backward, followed by " causal" where half of the square is masked."""
    axis: str = ""
    """collective: the plan's axis whose group it runs over: tp, cp, ep, dp, pp."""
    bytes: int = 0
    """collective: of the whole tensor, as `parallel/record.py` counts them. Otherwise 0."""


@dataclass(frozen=True)
class Weight:
    """One parameter of the layer as this rank holds it before any sharding over data-parallel ranks."""

    name: str
    """Inside the layer: "attention.wq.weight"."""
    shape: tuple[int, ...]
    """Of this rank's part under tp and ep."""
    trained: bool
    axis_sum: str = ""
    """Axis over which its gradient is summed besides data parallelism: tp for norms under sequence parallelism."""


@dataclass(frozen=True)
class LayerTrace:
    """One layer's work on one rank: forward, then (recompute and) backward."""

    kind: str
    """embed, block, head, or another kind of layer that the model has."""
    ops: tuple[Op, ...]
    """In the order in which they are asked for."""
    tensor_bytes: Mapping[int, int]
    """Memory of each tensor id, bytes, at the dtypes of `precision`."""
    weights: tuple[Weight, ...]
    inputs: tuple[int, ...]
    """Tensor ids of the activations that come in."""
    outputs: tuple[int, ...]
    """Tensor ids of the activations that go out."""
    saved: tuple[int, ...]
    """Tensor ids that live from the forward to the backward pass, weights not counted."""
    precision: str
    """What the trace was made in: bf16 or fp32."""

    def only(self, *phases: str) -> tuple[Op, ...]:
        """The operators of some phases, in order."""
        return tuple(op for op in self.ops if op.phase in phases)

    @property
    def saved_bytes(self) -> int:
        """Activations that one micro batch leaves alive until its backward pass, bytes."""
        return sum(self.tensor_bytes[i] for i in self.saved)

    @property
    def flops(self) -> dict[str, int]:
        """FLOP of matrix products and attention by phase; causal attention counted as half of the square."""
        total = dict.fromkeys(PHASES, 0)
        for op in self.ops:
            total[op.phase] += flops(op)
        return total


def flops(op: Op) -> int:
    """FLOP of one operator, 0 where it is bound by memory or a network.

    Attention: forward two products, backward five (the scores are made again), halved when causal.
    """
    if op.kind == "matmul":
        batch, m, n, k = op.shape
        return 2 * batch * m * n * k
    if op.kind == "attention":
        batch, heads, _, tokens, kv_tokens, head_dim = op.shape
        products = 5 if op.role.startswith("backward") else 2
        square = 2 * products * batch * heads * tokens * kv_tokens * head_dim
        return square // 2 if op.role.endswith("causal") else square
    return 0


def dumps(trace: LayerTrace) -> str:
    """As JSON, one line."""
    return json.dumps(dataclasses.asdict(trace), separators=(",", ":"))


def loads(text: str) -> LayerTrace:
    """The reverse of `dumps`. Raises ValueError or KeyError on what it did not write."""
    values: dict[str, Any] = json.loads(text)
    tuples = ("inputs", "outputs", "saved")
    return LayerTrace(
        kind=values["kind"],
        ops=tuple(_op(op) for op in values["ops"]),
        tensor_bytes={int(i): n for i, n in values["tensor_bytes"].items()},
        weights=tuple(Weight(**{**w, "shape": tuple(w["shape"])}) for w in values["weights"]),
        precision=values["precision"],
        **{name: tuple(values[name]) for name in tuples},
    )


def _op(values: dict[str, Any]) -> Op:
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return Op(**fields)
