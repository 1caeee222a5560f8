"""The stack's pass: from the operators that model code asks for to the kernels that a machine's software runs.

Two things that eager operators do not show, beside those of `fuse.py`:

- *Fusion.* Operators bound by memory wait until a product, attention or a collective wants what they make; all
  that hang together by then are one kernel, which reads what it does not make and writes what is used elsewhere.
  What a backward kernel wants of a forward one is made again from that one's own inputs, unless a product has
  to keep it anyway (the cut a fusing compiler makes); what was gathered is gathered again.
- *Low precision.* An operand of a product in another format is cast once: in the kernel that makes it where
  there is one, else in a kernel of its own; twice over where the backward pass wants it transposed.

What a stack does is data (`systems/stacks/*.toml`); this file is the rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from timetrial.predict import fuse
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


def compile_layer(
    trace: LayerTrace, stack: Stack, recipe: Recipe, attention_format: str, context: str = "ring"
) -> Layer:
    """The kernels that `stack` makes of a trace whose linear layers run in `recipe`.

    `context`: how context-parallel ranks share attention, one of the stack's ways.
    """
    flow = _Flow(trace, stack, recipe, attention_format, context)
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

    def __init__(self, trace: LayerTrace, stack: Stack, recipe: Recipe, attention_format: str, context: str) -> None:
        self.trace, self.stack, self.recipe, self.attention_format = trace, stack, recipe, attention_format
        self.kernels: list[Kernel] = []
        self.constant = fuse.constants(trace)
        self.ops = fuse.simplified(trace, self.constant, context == "heads") if stack.fuse else list(trace.ops)
        self.adapters = fuse.adapted(trace.ops)
        self.low = {at for at, op in enumerate(self.ops) if self._is_low(op)}
        self.readers: dict[int, list[int]] = {}
        for at, op in enumerate(self.ops):
            for i in op.reads:
                self.readers.setdefault(i, []).append(at)
        self.heavy_read = {i for op in self.ops if op.kind in HEAVY for i in op.reads}
        self.sources: dict[int, frozenset[int]] = {}
        """For what an elementwise region made and no product keeps: what it can be made from again."""
        self.gathers: dict[int, tuple[Op, int]] = {}
        """Gathered forward tensor -> the collective and its bytes on the wire."""
        self.made_in: dict[int, str] = dict.fromkeys(trace.inputs, "forward")
        self.cast: set[int] = set()
        self.kept: dict[int, str] = {}

    def _is_low(self, op: Op) -> bool:
        """Whether a product runs in the recipe's format: those of a block's linear layers do, adapters do not."""
        if op.kind != "matmul" or self.recipe.format in ("bf16", "fp32"):
            return False
        return self.trace.kind == "block" and not fuse.narrow(op) and op.role in self.recipe.roles

    def _bytes(self, ids: Iterable[int]) -> int:
        return sum(self.trace.tensor_bytes.get(i, 0) for i in ids if i not in self.constant)

    @property
    def _element(self) -> int:
        return 4 if self.trace.precision == "fp32" else 2

    # -- the walk

    def run(self) -> None:
        pending: list[tuple[int, Op]] = []
        for at, op in enumerate(self.ops):
            if pending and op.phase != pending[-1][1].phase:
                pending = self._flush(pending, None)
            if op.kind == "elementwise":
                if self._alone(op):
                    pending = self._flush(pending, set(op.reads))
                    self._region([(at, op)])
                else:
                    pending.append((at, op))
            elif op.kind in HEAVY:
                pending = self._flush(pending, set(op.reads) | set(op.writes))
                if op.kind == "collective":
                    self._collective(at, op)
                else:
                    self._product(at, op)
        self._flush(pending, None)

    def _alone(self, op: Op) -> bool:
        """Whether an operator bound by memory is a kernel of its own."""
        if not self.stack.fuse:
            return True
        return not self.stack.fuse_adapters and fuse.of_adapter(op, self.adapters)

    def _flush(self, pending: list[tuple[int, Op]], wanted: set[int] | None) -> list[tuple[int, Op]]:
        """Run the waiting operators that make what is `wanted` (all: None), with all that hang together with them."""
        rest = []
        for group in _connected(pending, self.constant):
            made = {i for _, op in group for i in op.writes}
            if wanted is None or made & wanted:
                self._region(group)
            else:
                rest += group
        return sorted(rest, key=lambda entry: entry[0])

    def _region(self, region: list[tuple[int, Op]]) -> None:
        """One fused kernel of operators that are bound by memory."""
        phase, inside = region[0][1].phase, {at for at, _ in region}
        made = {i for _, op in region for i in op.writes}
        first_read: set[int] = set()
        written: set[int] = set()
        for _, op in region:
            first_read |= set(op.reads) - written
            written |= set(op.writes)
        reads: set[int] = set()
        for i in first_read - self.constant:
            reads |= self._remade(i, phase)
        writes, cast_bytes = 0, 0
        for i in made:
            later = [at for at in self.readers.get(i, ()) if at not in inside and at > region[0][0]]
            low, whole = self._how_read(i, later, phase)
            if low and self.stack.fuse_casts:
                cast_bytes += self._cast_bytes(i, later)
                self.cast.add(i)
            if whole or i in self.trace.outputs or (low and not self.stack.fuse_casts):
                writes += self._bytes([i])
            if self.stack.fuse and i not in self.heavy_read and i not in self.trace.outputs:
                self.sources[i] = frozenset(first_read - self.constant)
            self.made_in.setdefault(i, phase)
        self._keep(reads, phase)
        moved = self._bytes(reads) + writes + cast_bytes
        if moved:
            self.kernels.append(Kernel("memory", "other", phase, region[-1][1].module, role="fused", bytes=moved))

    def _how_read(self, i: int, later: list[int], phase: str) -> tuple[bool, bool]:
        """Whether a tensor is read in the low format, and whether anything needs it whole."""
        low = whole = False
        for at in later:
            op = self.ops[at]
            if at in self.low or (op.kind == "collective" and self._gathers_low(op)):
                low = True
            elif op.kind in HEAVY or op.phase == phase or not self.stack.fuse:
                whole = True
        return low, whole

    def _product(self, at: int, op: Op) -> None:
        low = at in self.low
        fmt = self.recipe.format if low else ("fp32" if self.trace.precision == "fp32" else "bf16")
        if op.kind == "attention" and self.attention_format != "bf16":
            fmt = self.attention_format
        for i in op.reads:
            if i in self.constant:
                continue
            if op.phase != "forward" and i in self.gathers and self.made_in.get(i) == "forward":
                self._gather_again(i, op.phase)
            if low and i not in self.cast:
                self.cast.add(i)
                later = [n for n in self.readers[i] if n >= at]
                moved = self._bytes([i]) + self._cast_bytes(i, later)
                self.kernels.append(Kernel("memory", "cast", op.phase, op.module, role="cast", bytes=moved))
            self._keep([i], op.phase, low)
        for i in op.writes:
            self.made_in.setdefault(i, op.phase)
        self.kernels.append(Kernel(op.kind, op.kind, op.phase, op.module, fmt, op.shape, op.role))

    def _collective(self, at: int, op: Op) -> None:
        low = self._gathers_low(op)
        size = int(op.bytes * self.recipe.bytes / self._element) if low else op.bytes
        if op.axis == "cp" and self.attention_format == "fp8" and self.stack.context_low:
            size //= 2
        self.kernels.append(Kernel("collective", op.axis, op.phase, op.module, role=op.name, bytes=size))
        self._keep(op.reads, op.phase)
        for i in op.writes:
            self.made_in.setdefault(i, op.phase)
            if op.name == "all_gather" and self.stack.fuse:
                self.sources[i] = frozenset(op.reads)
                self.gathers[i] = (op, size)
            if low:
                self.cast.add(i)

    def _gathers_low(self, op: Op) -> bool:
        """Whether a gather carries the low format: only products in it read what it brings."""
        if op.name != "all_gather" or not self.recipe.gathers_low or not self.low:
            return False
        readers = [n for i in op.writes for n in self.readers.get(i, ()) if self.ops[n].kind != "wait"]
        return bool(readers) and all(n in self.low for n in readers)

    def _gather_again(self, i: int, phase: str) -> None:
        op, size = self.gathers[i]
        self.kernels.append(Kernel("collective", op.axis, phase, op.module, role=op.name, bytes=size))
        self._keep(op.reads, phase, i in self.cast)
        self.made_in[i] = phase

    def _cast_bytes(self, i: int, later: list[int]) -> int:
        """Written for the cast copies of a tensor, and read once more where its largest value must be known first."""
        transposed = any(self.ops[at].role == "wgrad" and at in self.low for at in later)
        elements = self._bytes([i]) // self._element
        return int(elements * ((1 + transposed) * self.recipe.bytes + self.recipe.extra_read_bytes))

    # -- what lives from forward to backward

    def _remade(self, i: int, phase: str, seen: frozenset[int] = frozenset()) -> set[int]:
        """`i`, or, for a backward kernel, what it is made from again."""
        if phase == "forward" or self.made_in.get(i) != "forward" or i not in self.sources or i in seen:
            return {i}
        found: set[int] = set()
        for source in self.sources[i]:
            found |= self._remade(source, phase, seen | {i})
        return found - {i} if self.sources[i] - {i} else found

    def _keep(self, ids: Iterable[int], phase: str, low: bool = False) -> None:
        """Note which forward tensors a later pass reads, and whether it is content with the low format."""
        if phase == "forward":
            return
        for i in ids:
            if self.made_in.get(i, "") == "forward" and i not in self.constant:
                how = "low" if low and self.kept.get(i) != "whole" else "whole"
                self.kept[i] = how

    def saved_bytes(self) -> int:
        """Bytes of what is kept, each in the format in which it is wanted."""
        share = {"whole": 1.0, "low": self.recipe.bytes / self._element}
        return int(sum(self.trace.tensor_bytes.get(i, 0) * share[how] for i, how in self.kept.items()))


def _connected(pending: list[tuple[int, Op]], constant: set[int]) -> list[list[tuple[int, Op]]]:
    """Groups of operators that share tensors, constants aside, each in order."""
    groups: list[tuple[set[int], list[tuple[int, Op]]]] = []
    for entry in pending:
        ids = {i for i in (*entry[1].reads, *entry[1].writes) if i not in constant}
        joined: tuple[set[int], list[tuple[int, Op]]] = (ids, [entry])
        apart = []
        for group in groups:
            if group[0] & ids:
                joined = (joined[0] | group[0], group[1] + joined[1])
                ids = joined[0]
            else:
                apart.append(group)
        groups = [*apart, joined]
    return [sorted(entries, key=lambda e: e[0]) for _, entries in groups]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
