"""Write down the collectives that a piece of work issues: kind, ranks, bytes, in order.

A layout is right when its numbers are; it is the layout one meant when its communication is. Tests hold
each axis against its formula, and what is predicted must be what is recorded here.

Seen below autograd and DTensor, where every collective of this package passes: `torch.distributed` calls
(FSDP, pipelines, rings) and functional collectives (DTensor). Bytes are those of the whole tensor: what
an all-gather puts out, what a reduce-scatter takes in, what a message carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from timetrial.parallel.context import IMPLEMENTATIONS

_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}


@dataclass(frozen=True)
class Collective:
    """One call, as this rank made it."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send or receive."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    bytes: int
    """Size of the whole tensor."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Recorder() as record: ...`, then `record.calls`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []

    def counts(self) -> Counter[Collective]:
        """How often each was called."""
        return Counter(self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor take itself apart first: it communicates inside
        kwargs = kwargs or {}
        inside = implementation(func)
        if inside is not None:
            with self:
                return inside(*args, **kwargs)
        call = collective_of(func, args)
        if call is not None:
            self.calls.append(call)
        return func(*args, **kwargs)


def implementation(func: Any) -> Callable[..., Any] | None:
    """What an operator of this package that communicates runs; None for any other operator."""
    return IMPLEMENTATIONS.get(func._opname) if func.namespace == "timetrial" else None


def collective_of(func: Any, args: tuple[Any, ...]) -> Collective | None:
    """What the operator `func` sends when it is called with `args`; None where it sends nothing."""
    kind = _KINDS.get(func._opname) if func.namespace in ("c10d", "_c10d_functional") else None
    if kind is None:
        return None
    tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
    sizes = [x.numel() * x.element_size() for x in tensors]
    ranks = _ranks(args)
    whole = max(sizes, default=0)
    if kind == "all_gather" and len(sizes) == 1:  # the functional form gets the part and makes the whole
        whole *= len(ranks)
    return Collective(kind, ranks, whole)


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    for arg in reversed(args):
        if isinstance(arg, str):
            try:
                group = dist.distributed_c10d._resolve_process_group(arg)  # type: ignore
            except (RuntimeError, ValueError):
                continue  # the reduction's name
            return tuple(dist.get_process_group_ranks(group))
        if isinstance(arg, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(arg)
            except (RuntimeError, TypeError):
                continue  # the reduction's
            return tuple(dist.get_process_group_ranks(group))
    raise ValueError("a collective without a group")
