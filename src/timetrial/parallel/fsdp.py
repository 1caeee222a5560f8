"""Data parallelism with parameters, gradients and optimizer states sharded: PyTorch's FSDP2 per block.

Ranks that differ in dp or cp hold the same parameters and see other tokens, so both axes are one to
FSDP, cut into shard groups and their replicas (`mesh.py`). Gradients are *summed* over them, never
averaged: the loss is already divided by the global token count (`engine.py`). A sum is also the only
reduction that every backend has.

The unit is the block (Zhao et al. 2023, arXiv:2304.11277). What lies outside the blocks (embedding, last
norm, head) is the root's unit. Between two steps a rank holds its shard alone; `plan.zero` says how much
of that holds within a step of m micro batches (Rajbhandari et al. 2020, arXiv:1910.02054):

| zero | parameters of a block                             | gradients                    | gathers, reduces |
| ---- | -------------------------------------------------- | ---------------------------- | ---------------- |
| 1    | gathered at first use, kept until the step ends    | whole until the step ends    | 1, 1             |
| 2    | the same                                           | reduced after a micro batch  | 1, m             |
| 3    | gathered for each forward and backward, dropped    | reduced after a micro batch  | 2 m, m           |

A reduction is a reduce-scatter within the shard group; replicas add their shards up once a step,
by an all-reduce.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from timetrial.parallel.overlap import prefetch


def apply(model: nn.Module, mesh: DeviceMesh, precision: str, zero: int) -> None:
    """Shard `model` in place over `mesh`, which has one axis, or two: (replicate, shard)."""
    # a vocabulary-parallel head returns a view of a DTensor; the loss does not write into it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = mixed_precision(precision, mesh.device_type)
    for block in model.get_submodule("layers").children():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    prefetch(model)
    for module in units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def mixed_precision(precision: str, device_type: str) -> MixedPrecisionPolicy:
    """bf16 on a GPU: parameters are gathered and used in bfloat16, gradients summed in float32.

    On a CPU the linear layers round by themselves (`precision/bf16.py`), on float32 tensors.
    """
    if precision == "bf16" and device_type != "cpu":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def units(model: nn.Module) -> list[FSDPModule]:
    """The sharded modules of `model`."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def last_micro_batch(model: nn.Module, zero: int, last: bool) -> None:
    """Say before a backward pass (and its forward pass) whether it ends the step."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or zero > 1)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or zero == 3)


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters: after an evaluation, lest a later step or checkpoint see old values."""
    for module in units(model):
        module.reshard()
