"""Which module's code asks for an operator, while it runs forward and while autograd runs it backward.

Forward it is the innermost module that is being called, hooks included: what a layout puts around a module
(gathers, reduce-scatters) is that module's. Backward, autograd's node knows: each node is marked, when the
module that made it returns, with that module's path.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from timetrial.parallel.engine import plain_name

_MARK = "timetrial_module"


class ModulePaths:
    """`with ModulePaths(layer): ...`; `stack` and `current` say who asks."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.stack: list[str] = []
        """Paths of the modules that are being called, outermost first."""
        self._handles: list[Any] = []

    def __enter__(self) -> ModulePaths:
        for name, module in self.layer.named_modules():
            path = plain_name(f"{name}.").rstrip(".")
            self._handles.append(module.register_forward_pre_hook(partial(self._enter, path), prepend=True))
            # also when recomputation stops in the middle of it
            self._handles.append(module.register_forward_hook(partial(self._leave, path), always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def current(self) -> str | None:
        """Path of the module that asks; None outside of the layer."""
        if self.stack:
            return self.stack[-1]
        node: Any = torch._C._current_autograd_node()
        return None if node is None else node.metadata.get(_MARK)

    @property
    def accumulating(self) -> bool:
        """Whether autograd is adding to a `.grad`."""
        node = torch._C._current_autograd_node()
        return node is not None and "AccumulateGrad" in node.name()

    def _enter(self, path: str, _: nn.Module, args: Any) -> None:
        if self.stack:
            _mark(args, self.stack[-1])
        self.stack.append(path)

    def _leave(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        _mark(output, path)
        self.stack.pop()


def _mark(values: Any, path: str) -> None:
    """Say of all nodes that lead to `values` and are nobody's yet that they are those of `path`."""
    found: list[Any] = [x.grad_fn for x in tree_leaves(values) if isinstance(x, Tensor) and x.grad_fn is not None]
    while found:
        node = found.pop()
        if node is not None and _MARK not in node.metadata:
            node.metadata[_MARK] = path
            found += [before for before, _ in node.next_functions]
