"""What a layer keeps between its forward and its backward pass, and what it needs beside that, from its trace.

A trace has what eager code keeps. Software that fuses keeps less: a gathered tensor is gathered again from
its shard, and what is elementwise is computed again inside the kernel that reads it, from tensors that are kept
anyway (Korthikanti et al. 2022, arXiv:2205.05198, section 4; NVIDIA/TransformerEngine keeps so). Operands of
products and of attention are kept as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from timetrial.predict.events import LayerTrace, Op


@dataclass(frozen=True)
class Kept:
    """Bytes of one micro batch by what reads them again."""

    operands: int
    """Weight-gradient products, and nothing else but elementwise work: low precision shrinks these."""
    attention: int
    """Attention."""
    other: int
    """Elementwise work alone."""
    gated: int = 0
    """Elementwise work alone, of what products made: SwiGLU's inputs."""

    @property
    def total(self) -> int:
        return self.operands + self.attention + self.other + self.gated


def kept(trace: LayerTrace, fused: bool) -> Kept:
    """What `trace` keeps; less than its `saved` where `fused`."""
    readers: dict[int, set[str]] = {}
    for op in trace.ops:
        if op.phase != "forward":
            for i in op.reads:
                readers.setdefault(i, set()).add(op.kind)
    saved = {i: readers.get(i, set()) for i in trace.saved}
    sizes = {i: trace.tensor_bytes[i] for i in saved}
    if fused and not any(op.phase == "recompute" for op in trace.ops):
        saved, sizes = _fused(trace, saved)
    products = {i for op in trace.ops if op.phase == "forward" and op.kind == "matmul" for i in op.writes}
    operands = attention = other = gated = 0
    for i, kinds in saved.items():
        if "attention" in kinds:
            attention += sizes[i]
        elif "matmul" in kinds:
            operands += sizes[i]
        elif i in products:
            gated += sizes[i]
        else:
            other += sizes[i]
    return Kept(operands, attention, other, gated)


def _fused(trace: LayerTrace, saved: dict[int, set[str]]) -> tuple[dict[int, set[str]], dict[int, int]]:
    """Tensors that are left to keep: id -> what reads them; and their bytes."""
    makers: dict[int, Op] = {}
    for op in trace.ops:
        if op.phase == "forward":
            for i in op.writes:
                makers.setdefault(i, op)
    left: dict[int, set[str]] = {}
    sizes: dict[int, int] = {}

    def keep(i: int, kinds: set[str], size: int) -> None:
        left.setdefault(i, set()).update(kinds)
        sizes[i] = size

    elementwise: list[int] = []
    for i, kinds in saved.items():
        maker = makers.get(i)
        while maker is not None and maker.name.startswith("all_gather") and maker.reads:
            i = maker.reads[0]
            maker = makers.get(i)
        size = trace.tensor_bytes[i]
        if maker is not None and maker.kind == "elementwise" and not kinds & {"matmul", "attention"}:
            elementwise.append(i)
        else:
            keep(i, kinds, size)
    for i in elementwise:
        if i in left:
            continue
        best = trace.tensor_bytes[i]
        if makers[i].name.startswith("bernoulli"):
            keep(i, set(), best // 2)  # a mask: a byte an element, not two
            continue
        sources = _sources(i, makers, left, best, trace)
        for source in sources:
            if source not in left:
                keep(source, set(), trace.tensor_bytes[source])
    return left, sizes


def _sources(i: int, makers: dict[int, Op], left: dict[int, set[str]], limit: int, trace: LayerTrace) -> set[int]:
    """The cheapest of: tensor `i` itself, or what it is made of elementwise, going back as long as that is less.

    Tensors that are kept anyway cost nothing; weights, which have no maker and are no input, neither.
    """
    if i in left:
        return {i}
    maker = makers.get(i)
    if maker is None or maker.kind != "elementwise" or not maker.reads or i in maker.reads:
        return {i}
    found: set[int] = set()
    for read in maker.reads:
        if read in makers or read in trace.inputs:
            found |= _sources(read, makers, left, trace.tensor_bytes[read], trace)
    new = sum(trace.tensor_bytes[s] for s in found if s not in left)
    return found if found and new < limit else {i}


def temporaries(trace: LayerTrace, fused: bool) -> int:
    """Peak bytes of what the backward pass, with what it computes again, makes and drops.

    What is never read again (gradients of weights, of the input) is handed on at once, and where `fused` is added
    to its buffer by the product that makes it.
    """
    saved = set(trace.saved)
    ops = [op for op in trace.ops if op.phase != "forward"]
    last: dict[int, int] = {}
    for n, op in enumerate(ops):
        for i in op.reads:
            last[i] = n
    alive: set[int] = set()
    now = peak = 0
    for n, op in enumerate(ops):
        for i in op.writes:
            if i not in saved and i not in alive and not (fused and i not in last):
                alive.add(i)
                now += trace.tensor_bytes.get(i, 0)
        peak = max(peak, now)
        for i in {*op.reads, *op.writes}:
            if i in alive and last.get(i, -1) <= n:
                alive.discard(i)
                now -= trace.tensor_bytes.get(i, 0)
    return peak
