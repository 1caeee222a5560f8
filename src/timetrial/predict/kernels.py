"""The stack's pass: from the operators that model code asks for to the kernels that a machine's software runs.

Three things that eager operators do not show:

- *Fusion.* Neighbouring operators bound by memory become one kernel, which reads what it does not make and
  writes what is used elsewhere. What a backward kernel wants of a forward one is made again from that one's
  own inputs, unless a product has to keep it anyway (the cut a fusing compiler makes).
- *Low precision.* An operand of a product in another format is cast once: in the kernel that makes it where
  there is one, else in a kernel of its own; twice over where the backward pass wants it transposed.
- *Weights.* They lie ready in the format of their products; casts of weights alone are not run.

What a stack does is data (`systems/stacks/*.toml`); this file is the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from timetrial.predict.events import LayerTrace, Op
from timetrial.systems.stack import Recipe, Stack

HEAVY = ("matmul", "attention", "collective")


@dataclass(frozen=True)
class Kernel:
    """One launch on the device, or one collective."""

    kind: str
    """matmul, attention, memory (bound by memory bandwidth) or collective."""
    part: str
    """Of the breakdown: matmul, attention, other, cast, or a collective's axis."""
    phase: str
    """forward, recompute or backward."""
    module: str
    """Whose work it is, inside the layer."""
    format: str = "bf16"
    """Of a product's operands: bf16, fp8, mxfp8, nvfp4, mxfp4, fp32."""
    shape: tuple[int, ...] = ()
    """As in events.Op."""
    role: str = ""
    """As in events.Op; of a collective its kind: all_gather, reduce_scatter ..."""
    bytes: int = 0
    """memory: read and written; collective: of the whole tensor."""


@dataclass(frozen=True)
class Layer:
    """What one layer costs to run, without times."""

    kind: str
    kernels: tuple[Kernel, ...]
    """In order: forward, recompute, backward."""
    saved_bytes: int
    """Activations kept from the forward to the backward pass of one micro batch."""
    weights: int
    """Elements of parameters on one rank, before sharding over data-parallel ranks."""
    trained: int
    """Those of them that are trained."""

    def only(self, *phases: str) -> tuple[Kernel, ...]:
        """The kernels of some phases, in order."""
        return tuple(k for k in self.kernels if k.phase in phases)


def compile_layer(trace: LayerTrace, stack: Stack, recipe: Recipe, attention_format: str) -> Layer:
    """The kernels that `stack` makes of a trace whose linear layers run in `recipe`."""
    flow = _Flow(trace, stack, recipe, attention_format)
    flow.run()
    return Layer(
        kind=trace.kind,
        kernels=tuple(flow.kernels),
        saved_bytes=flow.saved_bytes(),
        weights=sum(_size(w.shape) for w in trace.weights),
        trained=sum(_size(w.shape) for w in trace.weights if w.trained),
    )


class _Flow:
    """One walk over a trace, keeping what is where in which format."""

    def __init__(self, trace: LayerTrace, stack: Stack, recipe: Recipe, attention_format: str) -> None:
        self.trace, self.stack, self.recipe, self.attention_format = trace, stack, recipe, attention_format
        self.kernels: list[Kernel] = []
        ops = trace.ops
        made = {i for op in ops for i in op.writes}
        self.constant = {i for op in ops for i in op.reads} - made - set(trace.inputs)
        ready = []  # casts of weights alone are not run: what they make is a weight
        for op in ops:
            if op.kind == "elementwise" and op.reads and self.constant.issuperset(op.reads):
                self.constant.update(op.writes)
            else:
                ready.append(op)
        self.ops = ready
        self.low = {id(op) for op in ready if self._is_low(op)}
        self.readers: dict[int, list[int]] = {}
        for at, op in enumerate(ready):
            for i in op.reads:
                self.readers.setdefault(i, []).append(at)
        self.heavy_read = {i for op in ready if op.kind in HEAVY for i in op.reads}
        self.sources: dict[int, frozenset[int]] = {}
        """For what an elementwise region made and no product keeps: what it can be made from again."""
        self.phase_made: dict[int, str] = {i: "forward" for i in trace.inputs}
        self.cast: set[int] = set()
        self.kept: dict[int, str] = {}

    # -- what is asked of an operator

    def _is_low(self, op: Op) -> bool:
        """Whether a product runs in the recipe's format: those of linear layers that the recipe covers do."""
        if op.kind != "matmul" or op.role == "product" or self.recipe.format in ("bf16", "fp32"):
            return False
        covered = self.trace.kind == "block" and "lora" not in op.module
        return covered and op.role in self.recipe.roles

    def _bytes(self, ids: Iterable[int]) -> int:
        return sum(self.trace.tensor_bytes.get(i, 0) for i in ids if i not in self.constant)

    # -- the walk

    def run(self) -> None:
        region: list[tuple[int, Op]] = []
        for at, op in enumerate(self.ops):
            if region and (op.kind in HEAVY or op.phase != region[-1][1].phase):
                self._region(region)
                region = []
            if op.kind == "elementwise":
                region.append((at, op))
                if not self.stack.fuse:
                    self._region(region)
                    region = []
            elif op.kind in ("matmul", "attention"):
                self._product(at, op)
            elif op.kind == "collective":
                self.kernels.append(
                    Kernel("collective", op.axis, op.phase, op.module, role=op.name, bytes=self._wire_bytes(at, op))
                )
                self._made(op.writes, op.phase)
                for i in op.writes:  # what was gathered is made again by gathering, not kept
                    self.sources[i] = frozenset(op.reads)
        if region:
            self._region(region)

    def _region(self, region: Sequence[tuple[int, Op]]) -> None:
        """One fused kernel of neighbouring operators that are bound by memory."""
        last, phase = region[-1][0], region[0][1].phase
        made = {i for _, op in region for i in op.writes}
        reads: set[int] = set()
        for _, op in region:
            for i in op.reads:
                if i not in made and i not in self.constant:
                    reads |= self._remade(i, phase)
        outside = {i for i in made if any(at > last for at in self.readers.get(i, ())) or i in self.trace.outputs}
        writes, cast_bytes = set(outside), 0
        for i in outside:
            later = [self.ops[at] for at in self.readers.get(i, ()) if at > last]
            if self.stack.fuse and not self._wanted_whole(i, later, phase):
                writes.discard(i)
            if self.stack.fuse_casts and any(id(op) in self.low for op in later):
                cast_bytes += self._cast_bytes(i, later)
                self.cast.add(i)
        for i in made:
            if self.stack.fuse and i not in self.heavy_read and i not in self.trace.outputs:
                self.sources[i] = frozenset(reads)
        self._made(made, phase)
        self._keep(reads, phase)
        moved = self._bytes(reads) + self._bytes(writes)
        parts = [op.module for _, op in region]
        if moved or cast_bytes:
            self.kernels.append(Kernel("memory", "other", phase, parts[-1], role="fused", bytes=moved + cast_bytes))

    def _wanted_whole(self, i: int, later: list[Op], phase: str) -> bool:
        """Whether the tensor itself must be written: a same-phase reader or a product in its own format wants it."""
        if i in self.trace.outputs:
            return True
        for op in later:
            if op.kind in ("matmul",) and id(op) in self.low and self.stack.fuse_casts:
                continue  # takes the cast one
            if op.kind in HEAVY or op.phase == phase:
                return True
        return False

    def _product(self, at: int, op: Op) -> None:
        low = id(op) in self.low
        fmt = self.recipe.format if low else ("fp32" if self.trace.precision == "fp32" else "bf16")
        if op.kind == "attention" and self.attention_format != "bf16":
            fmt = self.attention_format
        reads: set[int] = set()
        for i in op.reads:
            if i in self.constant:
                continue
            if low and i not in self.cast:
                self.cast.add(i)
                later = [self.ops[n] for n in self.readers[i] if n >= at]
                moved = self._bytes([i]) + self._cast_bytes(i, later)
                self.kernels.append(Kernel("memory", "cast", op.phase, op.module, role="cast", bytes=moved))
            reads.add(i)
        self._keep(reads, op.phase, low=low)
        self._made(op.writes, op.phase)
        part = "attention" if op.kind == "attention" else "matmul"
        self.kernels.append(Kernel(op.kind, part, op.phase, op.module, fmt, op.shape, op.role))

    def _cast_bytes(self, i: int, later: list[Op]) -> int:
        """Written for the cast copies of a tensor, and read once more where its largest value must be known first."""
        elements = self._bytes([i]) // self._element_bytes()
        copies = 1 + any(op.role == "wgrad" and id(op) in self.low for op in later)
        return int(elements * (copies * self.recipe.bytes + self.recipe.extra_read_bytes))

    def _element_bytes(self) -> int:
        return 4 if self.trace.precision == "fp32" else 2

    def _wire_bytes(self, at: int, op: Op) -> int:
        """Of a collective: gathered in the low format where only low products read what it brings."""
        if op.name == "all_gather" and self.recipe.gathers_low and op.writes:
            readers = [self.ops[n] for i in op.writes for n in self.readers.get(i, ())]
            if readers and all(id(r) in self.low for r in readers if r.kind == "matmul") and self.low:
                return int(op.bytes * self.recipe.bytes / self._element_bytes())
        return op.bytes

    # -- what lives from forward to backward

    def _made(self, ids: Iterable[int], phase: str) -> None:
        for i in ids:
            self.phase_made.setdefault(i, phase)

    def _remade(self, i: int, phase: str) -> set[int]:
        """`i`, or, for a backward kernel, what it is made from again."""
        if phase == "forward" or self.phase_made.get(i) != "forward" or i not in self.sources:
            return {i}
        found: set[int] = set()
        for source in self.sources[i]:
            if source not in self.constant:
                found |= self._remade(source, phase)
        return found

    def _keep(self, ids: Iterable[int], phase: str, low: bool = False) -> None:
        """Note which forward tensors a later pass reads, and whether it is content with the low format."""
        if phase == "forward":
            return
        for i in ids:
            for kept in self._remade(i, phase):
                if self.phase_made.get(kept, "forward") == "forward":
                    whole = not low or kept != i
                    self.kept[kept] = "whole" if whole or self.kept.get(kept) == "whole" else "low"

    def saved_bytes(self) -> int:
        element = self._element_bytes()
        total = 0.0
        for i, how in self.kept.items():
            size = self.trace.tensor_bytes.get(i, 0)
            total += size if how == "whole" else size * self.recipe.bytes / element
        return int(total)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def with_phase(kernels: Iterable[Kernel], phase: str) -> tuple[Kernel, ...]:
    """The same kernels in another phase."""
    return tuple(replace(k, phase=phase) for k in kernels)
