"""Tensor parallelism with sequence parallelism, from a model's sharding table.

Between blocks every rank holds T/tp of the tokens of a sequence. A block gathers them, multiplies by its
columns of the first matrices and its rows of the last, and reduce-scatters the sum back over tokens
(Korthikanti et al. 2022, arXiv:2205.05198): the bytes are those of the two all-reduces of plain tensor
parallelism, and norms and activations between blocks shrink by tp.

| style          | weight            | input -> output                                              |
| -------------- | ----------------- | ------------------------------------------------------------ |
| vocab          | split by entry    | token ids -> embeddings, split by token                      |
| sequence       | on every rank     | split by token -> split by token                             |
| gather         | (none of its own) | split by token -> whole                                      |
| colwise        | split by output   | whole -> split by channel                                    |
| rowwise        | split by input    | split by channel -> summed, split by token                   |
| colwise_gather | split by output   | split by token, gathered -> split by channel                 |

Parameters become DTensors and layouts are changed by DTensor's redistribute, so that FSDP, optimizers
and checkpoints know what each rank holds. A linear layer may be one wrapped with a low-rank adapter:
y += B A x splits with its layer, B by output under colwise, A by input under rowwise, and the other is on
every rank; its gradient is then a sum over ranks, which DTensor tracks as Partial.

Dropout draws for the whole input and keeps this rank's part, so that a layer drops what it drops on one rank.
"""

from __future__ import annotations

import fnmatch
import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from timetrial.parallel import initial

TOKENS = Shard(1)
CHANNELS = Shard(-1)
WHOLE = Replicate()


def apply(model: nn.Module, table: dict[str, str], mesh: DeviceMesh) -> None:
    """Lay `model` out over the ranks of the one-axis `mesh`, in place, by `table` (module pattern -> style).

    Every parameter must lie in a module that the table names, else ValueError: one left out would be a
    plain tensor beside DTensors, and its gradient wrong on every rank.
    """
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in table.items() if _matches(name, pattern)), None)
        if style is not None:
            placements, layouts = _STYLES[style]
            if placements is not None:
                _distribute(module, mesh, placements, placed)
            _layouts(module, mesh, *layouts)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                parent.register_module(name, WholeDropout(child.p).train(child.training))
    left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if left:
        raise ValueError(f"the sharding table covers no module of {', '.join(left[:3])}")


def table_of(model_config: Any) -> dict[str, str]:
    """The sharding table that stands beside a model's configuration."""
    package = type(model_config).__module__.rpartition(".")[0]
    table: dict[str, str] = importlib.import_module(f"{package}.sharding").SHARDING
    return table


def finish_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum the gradients that are still partial over tensor-parallel ranks: those of replicated parameters.

    One collective for all. FSDP does this by itself when it reduces.
    """
    partial = [(p, p.grad) for p in parameters if isinstance(p.grad, DTensor) and p.grad.placements[-1].is_partial()]
    if not partial:
        return
    mesh = partial[0][1].device_mesh
    parts = [grad.to_local() for _, grad in partial]
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=mesh.get_group())
    summed = torch.split(flat, [part.numel() for part in parts])
    for (parameter, _), part, values in zip(partial, parts, summed, strict=True):
        parameter.grad = DTensor.from_local(values.view_as(part), mesh, [WHOLE], run_check=False)


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


class WholeDropout(nn.Dropout):
    """Dropout of a DTensor by the mask of the whole tensor; ranks must draw from the same stream."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor) or not self.training or self.p == 0.0:
            return super().forward(x)
        mask = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1.0 - self.p).div_(1.0 - self.p)
        return x * DTensor.from_local(initial.part(mask, x).contiguous(), x.device_mesh, x.placements, run_check=False)


# ---- styles --------------------------------------------------------------------------------------

_BY_OUTPUT: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0), "lora_b": Shard(0)}
_BY_INPUT: dict[str, Placement] = {"weight": Shard(1), "lora_a": Shard(1)}

# style -> parameter name -> placement (the rest replicated; None: no parameters of its own), and the
# layouts of the first input as given, as seen by the module, and of the output (None: left alone)
_Layouts = tuple[Placement, Placement, Placement | None]
_STYLES: dict[str, tuple[dict[str, Placement] | None, _Layouts]] = {
    "vocab": ({"weight": Shard(0)}, (WHOLE, WHOLE, TOKENS)),
    "sequence": ({}, (TOKENS, TOKENS, TOKENS)),
    "gather": (None, (TOKENS, WHOLE, None)),
    "colwise": (_BY_OUTPUT, (WHOLE, WHOLE, CHANNELS)),
    "rowwise": (_BY_INPUT, (CHANNELS, CHANNELS, TOKENS)),
    "colwise_gather": (_BY_OUTPUT, (TOKENS, WHOLE, CHANNELS)),
}


def _distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: dict[str, Placement],
    placed: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Make the parameters of `module` DTensors; `placed` keeps tied ones one parameter."""
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False)):
            if old not in placed:
                # every rank has the whole tensor already: cut it here instead of scattering it from rank 0
                cut = distribute_tensor(old.data, mesh, [placements.get(name, WHOLE)], src_data_rank=None)
                placed[old] = nn.Parameter(cut, requires_grad=old.requires_grad)
            owner.register_parameter(name, placed[old])


def _layouts(module: nn.Module, mesh: DeviceMesh, given: Placement, seen: Placement, out: Placement | None) -> None:
    """Have `module` take its first input as `given`, see it as `seen`, and return its output as `out`, local.

    An input that is a DTensor already says itself how it lies.
    """

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [given], run_check=False)
        if x.placements[0] != seen:  # even one that changes nothing would reduce the gradient at once
            x = x.redistribute(placements=[seen])
        return x, *rest

    module.register_forward_pre_hook(before)
    if out is None:
        return
    placements = [out]

    def after(_: nn.Module, __: tuple[Any, ...], y: DTensor) -> Tensor:
        return y.redistribute(placements=placements).to_local()

    module.register_forward_hook(after)
