"""A CUDA graph's stand-in on the CPU, as strict as one: operators are recorded and replayed, never Python.

What work takes from the host while it is recorded (a learning rate, a step count, an address) is what every
replay takes; reading a tensor back or making one of host values is refused as CUDA refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
REFUSED = {_aten._local_scalar_dense.default: "reads a tensor back", _aten.lift_fresh.default: "copies from the host"}


class Tape(TorchDispatchMode):
    """`parallel.graph.Recorder` of the operators of one thread, without collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}

    def warm_up(self, work: Callable[[], None]) -> None:
        self.events.append("warm up")
        work()

    def record(self, work: Callable[[], None]) -> None:
        self.events.append("record")
        with torch.random.fork_rng(devices=[]), self:  # recording draws no random numbers ...
            work()
        for tensor, content in self._before.values():  # ... and changes nothing
            tensor.untyped_storage().copy_(content)

    @torch.no_grad()
    def replay(self) -> None:
        self.events.append("replay")
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            returns = func._schema.returns
            for returned, new, old in zip(returns, _several(again, returns), _several(made, returns), strict=True):
                if returned.alias_info is None:  # a result of its own: later calls read it at its old address
                    for source, target in zip(tree_leaves(new), tree_leaves(old), strict=True):
                        if isinstance(target, Tensor):
                            target.copy_(source)

    def close(self) -> None:
        self.events.append("close")
        self.calls.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REFUSED:
            raise RuntimeError(f"{func} {REFUSED[func]}: not permitted while recording")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    self._keep(tensor)
        out = func(*args, **kwargs)
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}  # a view is not made
        self._made |= {_address(t) for t in tree_leaves(out) if isinstance(t, Tensor)} - given
        self.calls.append((func, args, kwargs, out))
        return out

    def _keep(self, tensor: Tensor) -> None:
        key = _address(tensor)
        if key not in self._made and key not in self._before:
            self._before[key] = (tensor, tensor.untyped_storage().clone())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _several(out: Any, returns: list[Any]) -> tuple[Any, ...]:
    """One value for each of `returns`; one of them may itself be a list of tensors."""
    return tuple(out) if len(returns) > 1 else (out,)[: len(returns)]
