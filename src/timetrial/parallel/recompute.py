"""Activation recomputation: spend forward work again to keep fewer activations.

| kind      | kept of a block                               | computed again                               |
| --------- | --------------------------------------------- | -------------------------------------------- |
| none      | everything autograd saves                     | nothing                                      |
| selective | results of matrix products and of attention   | norms, rotations, SwiGLU's elementwise part  |
| full      | its input                                     | the whole block                              |

Torch's non-reentrant checkpoint per block. Selective keeps what is dear to compute and drops what is dear
to keep (Korthikanti et al. 2022, arXiv:2205.05198); that paper recomputes attention instead, but flash
attention has since made its activations small.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.linear.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operators whose results selective recomputation keeps; context parallelism's ring too."""


def apply(model: nn.Module, kind: str, same_random_numbers: bool = True) -> None:
    """Wrap every block of `model` in place; parameter names are kept but for a mark (`engine.plain_name`).

    Without `same_random_numbers` the second run does not draw what the first drew; a CUDA graph cannot read
    the generator for that.
    """
    if kind == "none":
        return
    layers = model.get_submodule("layers")
    for name, block in list(layers.named_children()):
        if kind == "full":
            wrapped = checkpoint_wrapper(block, preserve_rng_state=same_random_numbers)
        else:
            contexts = partial(create_selective_checkpoint_contexts, _keep)
            wrapped = checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=same_random_numbers)
        layers.register_module(name, wrapped)


def _keep(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in KEPT or operator.namespace == "timetrial"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
