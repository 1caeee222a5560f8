"""Initial values for a model that was laid out on the meta device, one parameter after another.

Laying out needs shapes alone. So a model of any size is cut up first, without memory; then each parameter
is made whole on the CPU, cut to what this rank holds of it, and dropped. A rank's peak is its own shards
and one whole parameter, and it never makes a parameter that it holds nothing of: those of other pipeline
stages are neither drawn nor read.

Each whole value is a function of its name alone (`seeding.stream`, or a file), so every layout starts
from the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from timetrial.parallel.engine import plain_name

Values = Callable[[Mapping[str, torch.Size]], Iterator[tuple[str, Tensor]]]
"""Whole initial values on the CPU: given parameters' names and shapes, each (name, value) once, in any order.

A value is let go before the next is asked for.
"""


@torch.no_grad()
def fill(model: nn.Module, values: Values, device: torch.device | str) -> None:
    """Give every parameter of `model`, plain or DTensor, its value on `device`, in place.

    What modules share stays shared. Raises ValueError unless `values` gives exactly what is asked for.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, leaf))
    waiting = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for name, whole in values({name: parameter.shape for name, parameter in waiting.items()}):
        old = waiting.pop(name, None)
        if old is None or old.shape != whole.shape:
            raise ValueError(f"{name} of shape {list(whole.shape)} was not asked for")
        made = torch.empty_like(old, device=device)
        _held(made).copy_(part(whole, old))
        del whole  # before the next is made
        new = nn.Parameter(made, requires_grad=old.requires_grad)
        for module, leaf in owners[old]:
            module.register_parameter(leaf, new)
    if waiting:
        raise ValueError(f"no value was given for {', '.join(list(waiting)[:3])}")


def part(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of `whole` where it lies as `like` does; a view.

    The mesh's last axis cuts first: FSDP, whose axes come before, shards what tensor parallelism left.
    """
    placements = getattr(like, "placements", ())
    for axis in reversed(range(len(placements))):
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:  # a shard; the rest are replicas
            mesh = like.device_mesh  # type: ignore[attr-defined]
            size = -(-whole.shape[dim] // mesh.size(axis))
            start = min(mesh.get_local_rank(axis) * size, whole.shape[dim])
            whole = whole.narrow(dim, start, min(size, whole.shape[dim] - start))
    return whole


def _held(x: Tensor) -> Tensor:
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()
