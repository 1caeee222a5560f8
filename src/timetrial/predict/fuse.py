"""What a training stack's own layers do with the model code's operators before any kernel runs.

- Weights lie ready in the format of their products: what is computed of weights alone is not run.
- Copies that only change a layout (for a collective, for attention, for heads that share keys) are not made.
- Context parallelism exchanges heads instead of sending keys and values round a ring, where the heads divide:
  each rank attends with its share of the heads over the whole sequence (Jacobs et al. 2023, arXiv:2309.14509).
- Products that read the same input are one product over all their weights (query, key and value; gate and up),
  forward and back, and the sum of their input gradients is part of it.

A stack that does none of this (eager PyTorch) takes a trace as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from timetrial.predict.events import LayerTrace, Op

COPIES = frozenset({"clone", "contiguous", "cat", "stack", "repeat_interleave", "copy", "expand_copy", "zeros_like"})
"""Operators that move values and compute none; `zeros` and `zeros_like` begin a sum that a kernel begins itself."""
NARROW = 128
"""Rows, columns or summands below which a product is an adapter's: kernels' smallest tile."""
BEGINNINGS = frozenset({"zeros", "zeros_like", "empty_like", "scalar_tensor", "full"})


def constants(trace: LayerTrace) -> set[int]:
    """Tensors that are there before the layer runs: weights, tables, and what is made of them alone."""
    made = {i for op in trace.ops for i in op.writes}
    known = {i for op in trace.ops for i in op.reads} - made - set(trace.inputs)
    for op in trace.ops:
        if op.kind == "elementwise" and op.reads and known.issuperset(op.reads):
            known.update(op.writes)
    # the gradient that comes in from the layer behind is read before anything makes it, as weights are
    return known - incoming(trace)


def incoming(trace: LayerTrace) -> set[int]:
    """The gradient of the layer's output: what the backward pass reads, none made and no forward operator read."""
    made = {i for op in trace.ops for i in op.writes}
    before = {i for op in trace.only("forward") for i in op.reads}
    weights = {i for op in trace.ops if op.kind == "matmul" and op.role == "dgrad" for i in op.reads}
    after = {i for op in trace.only("recompute", "backward") for i in op.reads}
    return {
        i
        for i in after - made - before - set(trace.inputs)
        if any(trace.tensor_bytes.get(i) == trace.tensor_bytes.get(o) for o in trace.outputs) or i not in weights
    }


def simplified(trace: LayerTrace, known: set[int], exchange_heads: bool) -> list[Op]:
    """The operators that are left of a trace, in order. `known`: its constants."""
    ops = _computing(trace.ops, known)
    if exchange_heads:
        ops = _exchanged(ops, trace)
    return _merged(_uncopied(ops), known)


def _exchanged(ops: list[Op], trace: LayerTrace) -> list[Op]:
    """With an exchange of heads in the place of each phase's ring, where there is one and the heads divide."""
    made: list[Op] = []
    for phase in dict.fromkeys(op.phase for op in ops):
        own = [op for op in ops if op.phase == phase]
        messages = [op for op in own if op.kind == "collective" and op.axis == "cp" and op.name == "receive"]
        modules = {op.module for op in messages}
        ring = [op for op in own if op.module in modules]
        made += _heads_exchanged(own, ring, messages, trace) if messages else own
    return made


def _heads_exchanged(own: list[Op], ring: list[Op], messages: list[Op], trace: LayerTrace) -> list[Op]:
    attention = [op for op in ring if op.kind == "attention"]
    batch, heads, _, tokens, _, head_dim = attention[0].shape
    element = 4 if trace.precision == "fp32" else 2
    kv_heads = messages[0].bytes // (2 * batch * tokens * head_dim * element)
    cp = len(attention)  # a ring has one block for each of its ranks
    if not kv_heads or kv_heads % cp or heads % cp:
        return own
    inside = {i for op in ring for i in op.writes}
    reads = tuple(dict.fromkeys(i for op in ring for i in op.reads if i not in inside))
    q, kv = (batch * n * tokens * head_dim * element for n in (heads, kv_heads))
    first = attention[0]
    role = "backward causal" if first.role.startswith("backward") else "forward causal"
    whole = replace(
        first,
        role=role,
        reads=reads,
        writes=tuple(dict.fromkeys(i for op in ring for i in op.writes)),
        shape=(batch, heads // cp, kv_heads // cp, tokens * cp, tokens * cp, head_dim),
    )
    exchange = replace(first, kind="collective", name="all_to_all", axis="cp", shape=(), role="", reads=(), writes=())
    backward = role.startswith("backward")
    before = [exchange_of(exchange, size) for size in ([q] if backward else [q, kv, kv])]
    after = [exchange_of(exchange, size) for size in ([q, kv, kv] if backward else [q])]
    at = own.index(ring[0])
    kept = [op for op in own if op not in ring]
    place = sum(1 for op in own[:at] if op not in ring)
    return [*kept[:place], *before, whole, *after, *kept[place:]]


def exchange_of(exchange: Op, size: int) -> Op:
    """One all-to-all of `size` bytes."""
    return replace(exchange, bytes=size)


def _computing(ops: Iterable[Op], known: set[int]) -> list[Op]:
    return [op for op in ops if not (op.kind == "elementwise" and op.reads and known.issuperset(op.reads))]


def _uncopied(ops: list[Op]) -> list[Op]:
    """Without copies: who reads the copy reads what was copied."""
    behind: dict[int, tuple[int, ...]] = {}

    def seen(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(s for i in ids for s in behind.get(i, (i,))))

    kept: list[Op] = []
    for op in ops:
        reads = seen(op.reads)
        if op.kind == "elementwise" and op.name in COPIES and op.writes and reads:
            behind.update(dict.fromkeys(op.writes, reads))
        elif op.kind == "elementwise" and op.name in BEGINNINGS:
            continue
        else:
            for i in op.writes:
                behind.pop(i, None)
            kept.append(replace(op, reads=reads))
    return kept


def _merged(ops: list[Op], known: set[int]) -> list[Op]:
    """Products of one input as one, in all roles."""
    groups: dict[tuple[str, int], list[str]] = {}
    for op in ops:
        if op.kind == "matmul" and op.role == "fprop":
            for i in op.reads:
                if i not in known and not narrow(op):
                    groups.setdefault((op.phase, i), []).append(op.module)
    together = {module: modules[0] for modules in groups.values() if len(modules) > 1 for module in modules}
    first: dict[tuple[str, str, str], int] = {}
    last: dict[tuple[str, str, str], int] = {}
    for at, op in enumerate(ops):
        if _together(op, together):
            key = (op.phase, op.role, together[op.module])
            first.setdefault(key, at)
            last[key] = at
    whole: dict[tuple[str, str, str], Op] = {}
    for op in ops:
        if _together(op, together):
            key = (op.phase, op.role, together[op.module])
            whole[key] = _join(whole[key], op) if key in whole else op
    sums = {i for key, op in whole.items() if key[1] == "dgrad" for i in op.writes}
    renamed: dict[int, int] = {}
    kept: list[Op] = []
    for at, op in enumerate(ops):
        if _together(op, together):
            key = (op.phase, op.role, together[op.module])
            if at == (first if op.role == "fprop" else last)[key]:
                kept.append(whole[key])
            continue
        if op.kind == "elementwise" and op.name == "add" and op.reads and sums.issuperset(op.reads):
            sums.update(op.writes)  # part of the product
            renamed.update(dict.fromkeys(op.writes, renamed.get(op.reads[0], op.reads[0])))
            continue
        kept.append(replace(op, reads=tuple(dict.fromkeys(renamed.get(i, i) for i in op.reads))))
    return _one_gradient(kept, whole)


def _one_gradient(ops: list[Op], whole: dict[tuple[str, str, str], Op]) -> list[Op]:
    """A merged input gradient is one tensor: the first of those that its parts wrote."""
    same = {i: op.writes[0] for key, op in whole.items() if key[1] == "dgrad" for i in op.writes}
    made = []
    for op in ops:
        reads = tuple(dict.fromkeys(same.get(i, i) for i in op.reads))
        writes = tuple(dict.fromkeys(same.get(i, i) for i in op.writes))
        made.append(replace(op, reads=reads, writes=writes))
    return made


def _join(a: Op, b: Op) -> Op:
    """Two products as one: more outputs forward, more summands for the input's gradient, more rows for weights'."""
    batch, m, n, k = a.shape
    _, m2, n2, k2 = b.shape
    shape = {
        "fprop": (batch, m, n + n2, k),
        "dgrad": (batch, m, n, k + k2),
        "wgrad": (batch, m + m2, n, k),
    }[a.role]
    reads, writes = tuple(dict.fromkeys(a.reads + b.reads)), tuple(dict.fromkeys(a.writes + b.writes))
    return replace(a, shape=shape, reads=reads, writes=writes)


def narrow(op: Op) -> bool:
    """Whether a product has a side so short that it gains nothing from low precision: those of adapters."""
    return op.kind == "matmul" and min(op.shape[1:]) < NARROW


def _together(op: Op, together: dict[str, str]) -> bool:
    return op.kind == "matmul" and op.module in together and not narrow(op)


def adapted(ops: Iterable[Op]) -> frozenset[str]:
    """Modules that are a layer with an adapter: their own operators are the adapter's."""
    return frozenset(op.module.removesuffix(".base") for op in ops if op.module.endswith(".base"))


def of_adapter(op: Op, modules: frozenset[str]) -> bool:
    """Whether an operator is an adapter's rather than its base layer's."""
    path = op.module
    return any(path == m or (path.startswith(m + ".") and not path.startswith(m + ".base")) for m in modules)
