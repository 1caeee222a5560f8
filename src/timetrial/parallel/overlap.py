"""Which blocks' parameters are gathered ahead of time under FSDP2.

FSDP2 gathers and reduces on streams of their own, so that gradients are reduced while earlier blocks go
backward. Gathering ahead is by default the host's: forward, the next block is gathered when the host has
come to it. Said explicitly, a block's gather starts when the one `depth` before it has been copied out.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

DEPTH = 1
"""Blocks ahead; each costs the memory of one gathered block. With one, a gather has a whole block's
computation to hide behind; more help only where blocks are shorter than their gathers, which then
bound the step anyway."""


def prefetch(model: nn.Module, depth: int = DEPTH) -> None:
    """Have each block of the sharded `model` gather the `depth` next ones, in both directions.

    Does nothing to a `model` that is not sharded. The order is that of `layers`.
    """
    blocks: list[FSDPModule] = [
        block for block in model.get_submodule("layers").children() if isinstance(block, FSDPModule)
    ]
    if isinstance(model, FSDPModule) and blocks:
        model.set_modules_to_forward_prefetch(blocks[:depth])
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - depth) : i][::-1])
