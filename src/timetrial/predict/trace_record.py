"""Turn what passes below autograd and DTensor into a trace's operators.

Seen at the dispatcher, where views, allocations and every kernel pass. What a kernel is, follows from the
operator: a few names are products and attention, `parallel/record.py` knows collectives, and whatever else
reads or writes memory is elementwise.

A weight is known by its memory, and so is what is only a cast of it. A product's role follows from that:

| phase              | a weight among the operands | role                                      |
| ------------------ | --------------------------- | ----------------------------------------- |
| forward, recompute | transposed, as F.linear has | fprop                                     |
| forward            | as it lies                  | dgrad: the head's, made ahead (`head.py`)  |
| backward           | yes                         | dgrad                                     |
| forward            | no; result like a weight    | wgrad, likewise                           |
| backward           | no, two matrices            | wgrad                                     |
| any                | no, batched                 | product                                   |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from timetrial.parallel.record import collective_of, implementation
from timetrial.predict.events import Op
from timetrial.predict.trace_modules import ModulePaths

ALLOCATE = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "lift_fresh"}
)
"""Operators that get memory and leave it as it is."""
FILL = frozenset({"copy_", "fill_", "zero_", "random_", "normal_", "uniform_", "bernoulli_"})
"""In-place operators that do not read what they overwrite."""
SPARSE = {"embedding": 0, "gather": 0, "index_select": 0, "scatter_": 0, "scatter_add_": 0}
"""Operator -> the operand of which it touches a few rows or elements alone: not counted as read or written."""
NOTHING = frozenset({"_local_scalar_dense", "is_nonzero", "item", "equal", "record_stream"})

MATMUL = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
"""Operator -> place of its left operand."""

# operator -> (name, role, place of q, place of the causal flag or None where it always is, dim of the heads)
_FLASH = "_scaled_dot_product_flash_attention"
ATTENTION: dict[str, tuple[str, str, int, int | None, int]] = {
    _FLASH: ("flash_attention", "forward", 0, 4, 1),
    f"{_FLASH}_backward": ("flash_attention", "backward", 1, 11, 1),
    f"{_FLASH}_for_cpu": ("flash_attention", "forward", 0, 4, 1),
    f"{_FLASH}_for_cpu_backward": ("flash_attention", "backward", 1, 7, 1),
    "causal_attention": ("causal_attention", "forward", 0, None, 2),
    "causal_attention_backward": ("causal_attention", "backward", 1, None, 2),
}


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators of the code that runs inside, in `ops`; the ids' bytes in `tensor_bytes`."""

    def __init__(self, paths: ModulePaths, axes: Mapping[tuple[int, ...], str], weights: list[Tensor]) -> None:
        """`axes` says of a group's global ranks which axis it is; `weights` are this rank's parts."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.paths, self.axes = paths, axes
        self.ops: list[Op] = []
        self.tensor_bytes: dict[int, int] = {}
        self.backward = False
        """Whether the backward pass has begun."""
        self.paused = 0
        self._ids: dict[int, int] = {}
        # held, so that no address is used twice; fake storages take no memory
        self._storages: list[Any] = []
        self._arriving: dict[int, str] = {}
        self.weights = {self.id_of(w) for w in weights}
        self._weight_shapes = {tuple(w.shape) for w in weights}
        self._casts: set[int] = set()
        self.touched_before: set[int] = set()
        """Ids that the forward pass read or wrote, once `begin_backward` was called."""
        self.read_after: set[int] = set()
        """Ids that are read after that."""

    def id_of(self, x: Tensor) -> int:
        """The tensor id of the memory of `x`."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._ids:
            self._ids[key] = len(self.tensor_bytes)
            self._storages.append(storage)
            self.tensor_bytes[self._ids[key]] = storage.nbytes()
        return self._ids[key]

    def begin_backward(self) -> None:
        """What follows is the backward pass."""
        self.backward = True
        self.touched_before = {i for op in self.ops for i in (*op.reads, *op.writes)}

    @property
    def phase(self) -> str:
        if not self.backward:
            return "forward"
        return "recompute" if self.paths.stack else "backward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor take itself apart first
        inside = implementation(func)
        if inside is not None:
            with self:
                return inside(*args, **kwargs)
        out = func(*args, **kwargs)
        if not self.paused and not (self.backward and self.paths.accumulating):
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = func._opname
        if name in ALLOCATE or name in NOTHING or func.namespace in ("prim", "profiler"):
            return
        given = _tensors((args, kwargs))
        made = _tensors(out)
        if name == "wait_tensor":
            self._wait(given[0], made[0])
            return
        call = collective_of(func, args)
        if call is not None:
            self._collective(func, call.kind, call.ranks, call.bytes, given, made)
            return
        reads, writes = self._traffic(func, args, kwargs, given, made)
        if not writes and name not in SPARSE:
            return  # a view
        for i in reads:
            if i in self._arriving:
                self._add("wait", "wait", (i,), (i,), axis=self._arriving.pop(i))
        if name in MATMUL:
            self._matmul(name, args, reads, writes)
        elif name in ATTENTION:
            self._attention(name, args, reads, writes)
        else:
            self._add("elementwise", name.lstrip("_"), reads, writes)
            if reads and self._is_weight(*reads):
                self._casts |= set(writes)

    def _traffic(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], made: list[Tensor]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids read and written."""
        reads = dict.fromkeys(self.id_of(x) for x in given)
        if func._opname.startswith("new_") or func._opname.endswith("_like"):
            reads = {}  # its shape alone is asked for
        writes = dict.fromkeys(i for x in made if (i := self.id_of(x)) not in reads)
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            overwritten = _tensors(value)
            others = {self.id_of(x) for x in given if not any(x is y for y in overwritten)}
            for x in overwritten:
                writes[self.id_of(x)] = None
                if (func._opname in FILL or argument.is_out) and self.id_of(x) not in others:
                    reads.pop(self.id_of(x), None)
        if func._opname in SPARSE:
            few = self.id_of(args[SPARSE[func._opname]])
            reads.pop(few, None)
            writes.pop(few, None)
        return tuple(reads), tuple(writes)

    def _is_weight(self, *ids: int) -> bool:
        return all(i in self.weights or i in self._casts for i in ids)

    def _matmul(self, name: str, args: tuple[Any, ...], reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        a, b = args[MATMUL[name] : MATMUL[name] + 2]
        batch = a.shape[0] if a.ndim == 3 else 1
        shape = (batch, a.shape[-2], b.shape[-1], a.shape[-1])
        weight = next((x for x in (a, b) if self._is_weight(self.id_of(x))), None)
        role = "product"
        if weight is not None:
            as_it_lies = weight is b and weight.is_contiguous()
            role = "dgrad" if self.phase == "backward" or (self.phase == "forward" and as_it_lies) else "fprop"
        elif a.ndim == 2 and (self.phase == "backward" or (a.shape[0], b.shape[1]) in self._weight_shapes):
            role = "wgrad"
        self._add("matmul", name.rstrip("_"), reads, writes, shape=shape, role=role)

    def _attention(self, name: str, args: tuple[Any, ...], reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        title, role, first, flag, heads = ATTENTION[name]
        q, k = args[first], args[first + 1]
        tokens = 3 - heads
        shape = (q.shape[0], q.shape[heads], k.shape[heads], q.shape[tokens], k.shape[tokens], q.shape[3])
        causal = flag is None or (flag < len(args) and args[flag])
        self._add("attention", title, reads, writes, shape=shape, role=role + " causal" * bool(causal))

    def _collective(
        self, func: Any, kind: str, ranks: tuple[int, ...], size: int, given: list[Tensor], made: list[Tensor]
    ) -> None:
        ids, results = tuple(dict.fromkeys(map(self.id_of, given))), tuple(dict.fromkeys(map(self.id_of, made)))
        for i in ids:
            if i in self._arriving:
                self._add("wait", "wait", (i,), (i,), axis=self._arriving.pop(i))
        axis = self.axes[ranks]
        if kind in ("send", "receive"):  # the others' wait is where the message is first looked at
            sends = kind == "send"
            self._add("collective", kind, ids if sends else (), () if sends else ids, axis=axis, size=size)
            if not sends:
                self._arriving.update(dict.fromkeys(ids, axis))
            return
        functional = func.namespace == "_c10d_functional"
        writes = results if functional else ids[:1]
        self._add("collective", kind, ids, writes, axis=axis, size=size)
        if functional:
            self._arriving.update(dict.fromkeys(writes, axis))
        else:  # torch.distributed's own calls return when it is done
            self._add("wait", "wait", writes, writes, axis=axis)

    def _wait(self, given: Tensor, made: Tensor) -> None:
        i = self.id_of(given)
        storage = made.untyped_storage()
        if storage._cdata not in self._ids:  # a fake wait makes a new tensor, a real one does not
            self._ids[storage._cdata] = i
            self._storages.append(storage)
        if i in self._arriving:
            self._add("wait", "wait", (i,), (i,), axis=self._arriving.pop(i))

    def _add(
        self,
        kind: str,
        name: str,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        shape: tuple[int, ...] = (),
        role: str = "",
        axis: str = "",
        size: int = 0,
    ) -> None:
        if self.backward:
            self.read_after |= set(reads)
        module = self.paths.current
        module = "loss" if module is None else module
        self.ops.append(Op(kind, name, self.phase, module, reads, writes, tuple(map(int, shape)), role, axis, size))


@contextmanager
def without_phantoms(tracer: Tracer) -> Iterator[None]:
    """Inside, `tracer` does not see the operators that DTensor runs on whole shapes to learn its results' shapes."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    names = ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached")
    originals = {name: getattr(ShardingPropagator, name) for name in names}

    def paused(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            tracer.paused += 1
            try:
                return original(*args, **kwargs)
            finally:
                tracer.paused -= 1

        return run

    for name, original in originals.items():
        setattr(ShardingPropagator, name, paused(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(ShardingPropagator, name, original)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
