"""Data parallelism with parameters, gradients and optimizer states sharded: PyTorch's FSDP2 per block.

Ranks that differ in dp or cp hold the same parameters and see other tokens, so both axes are one to
FSDP. Gradients are *summed* over them, never averaged: the loss is already divided by the global token
count (`engine.py`). A sum is also the only reduction that every backend has.

The unit is the block (Zhao et al. 2023, arXiv:2304.11277): its parameters are gathered before its
forward pass, dropped, gathered again for its backward pass. What lies outside the blocks (embedding,
last norm, head) is the root's unit and stays gathered through the step.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def apply(model: nn.Module, mesh: DeviceMesh, precision: str, reshard_after_forward: bool) -> None:
    """Shard `model` over the one-axis `mesh`, in place.

    With `reshard_after_forward` false, blocks stay gathered from their first forward to the last backward
    of a step: what pipelining wants, since there every micro batch would gather again.
    """
    # a vocabulary-parallel head returns a view of a DTensor; the loss does not write into it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = mixed_precision(precision, mesh.device_type)
    for block in model.get_submodule("layers").children():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
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


def last_micro_batch(model: nn.Module, last: bool) -> None:
    """Say before a forward pass whether its backward pass ends the step: only then are gradients reduced.

    Until then they accumulate, unreduced, on every rank.
    """
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters: after an evaluation, lest a later step or checkpoint see old values."""
    for module in units(model):
        module.reshard()
