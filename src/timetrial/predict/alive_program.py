"""A layer's trace as memory sees it: what each operator makes, and what nobody needs after it.

A trace (`events.py`) says what operators read and write and what is saved for the backward pass. From that follows
when a tensor comes and goes, which of the results are gradients of weights and which one is the input's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from timetrial.predict.events import LayerTrace, Op

FLOAT = 4
"""bytes"""


@dataclass(frozen=True)
class Piece:
    """What one operator does to memory."""

    phase: str
    """As in events.Op; "" where autograd does not see the operator."""
    makes: tuple[int, ...]
    """Tensor ids."""
    drops: tuple[int, ...]
    """Tensor ids that it is the last to touch."""
    scratch: tuple[int, ...]
    """Bytes that are there while it runs."""


@dataclass(frozen=True)
class Program:
    """A layer's trace as memory sees it. Tensors by trace id."""

    forward: tuple[Piece, ...]
    """In order."""
    backward: tuple[Piece, ...]
    """What is computed again with it, in order."""
    bytes: Mapping[int, int]
    """Tensor id -> bytes."""
    saved: frozenset[int]
    """What lives until the backward pass."""
    input: int
    """The activations that come in."""
    output: int
    """Those that go out."""
    incoming: frozenset[int]
    """The gradient of the output, under all ids that it has."""
    gradients: frozenset[int]
    """Of weights."""
    outgoing: int | None
    """The gradient of the input; None where it has none."""


def program(trace: LayerTrace) -> Program:
    """What `trace` does to memory."""
    forward = [op for op in trace.ops if op.phase == "forward"]
    backward = [op for op in trace.ops if op.phase != "forward"]
    seen = {i for op in forward for i in (*op.reads, *op.writes)}
    written = {i for op in trace.ops for i in op.writes}
    saved, stays = frozenset(trace.saved), {*trace.saved, *trace.outputs}
    incoming = frozenset(i for op in backward for i in op.reads if i not in seen | written | saved)
    made: set[int] = set(trace.inputs)
    ahead = _pieces(forward, made, [i for i in made if i not in stays], stays, trace)
    results = _results(backward)
    sizes = Counter(FLOAT * math.prod(w.shape) for w in trace.weights if w.trained)
    passed = trace.tensor_bytes.get(trace.inputs[0], 0)
    outgoing = next((i for i in reversed(results) if trace.tensor_bytes.get(i, 0) == passed), None)
    gradients = set()
    for i in results:
        if i != outgoing and sizes[trace.tensor_bytes.get(i, 0)] > 0:
            sizes[trace.tensor_bytes[i]] -= 1
            gradients.add(i)
    keep = gradients | ({outgoing} if outgoing is not None else set())
    back = _pieces(backward, {*saved, *incoming}, [*saved, *incoming], keep, trace)
    return Program(
        forward=ahead,
        backward=back,
        bytes=trace.tensor_bytes,
        saved=saved,
        input=trace.inputs[0],
        output=trace.outputs[0],
        incoming=incoming,
        gradients=frozenset(gradients),
        outgoing=outgoing,
    )


def _pieces(
    ops: list[Op], known: set[int], drop: Iterable[int], keep: Iterable[int], trace: LayerTrace
) -> tuple[Piece, ...]:
    """What each of `ops` makes, and which of that and of what was `known` and is to `drop` it is the last to touch."""
    last: dict[int, int] = {}
    for n, op in enumerate(ops):
        for i in (*op.reads, *op.writes):
            last[i] = n
    for n, op in enumerate(ops):
        if op.module == "loss" and op.role == "fprop":  # logits have a name until the next chunk's (`head.py`)
            ends = [m for m, o in enumerate(ops) if m > n and o.module == "loss" and o.role == "fprop"]
            last |= dict.fromkeys(op.writes, min(ends, default=len(ops) - 1))
    ends_at: dict[int, list[int]] = {}
    for i, n in last.items():
        ends_at.setdefault(n, []).append(i)
    here, stays, exist = set(drop), set(keep), set(known)
    inside = _functions(trace)
    found = []
    for n, op in enumerate(ops):
        makes = tuple(i for i in dict.fromkeys(op.writes) if i not in exist)
        exist |= set(makes)
        here |= set(makes) - stays
        drops = tuple(i for i in ends_at.get(n, ()) if i in here - stays)
        here -= set(drops)
        # attention lays its operands out anew
        scratch = tuple(trace.tensor_bytes.get(i, 0) for i in op.reads) if op.kind == "attention" else ()
        phase = "" if op.module in inside else op.phase
        found.append(Piece(phase, makes, drops, scratch))
    return tuple(found)


def _functions(trace: LayerTrace) -> set[str]:
    """Modules that send from within one function of autograd's, which sees none of their operators: rings, and the loss
    of a vocabulary that is split (`parallel/context.py`, `loss.py`)."""
    sends = {op.module for op in trace.ops if op.kind == "collective"}
    return {module for module in sends if module.endswith("core") or module == "loss"}


def _results(ops: list[Op]) -> list[int]:
    """What is written and read by none after that, in order."""
    touched: dict[int, bool] = {}
    for op in ops:
        for i in op.reads:
            touched.pop(i, None)
        for i in op.writes:
            touched.pop(i, None)
            touched[i] = True
    return list(touched)
