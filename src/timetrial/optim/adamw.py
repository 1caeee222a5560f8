"""AdamW as the reference implementations set it up.

Per step s = 1, 2, ... at rate r, for a parameter p with gradient g and decay w:

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    p = p - r w p - r (m / (1 - b1^s)) / (sqrt(v / (1 - b2^s)) + eps)

(Loshchilov and Hutter, arXiv:1711.05101, algorithm 2 with the schedule multiplier folded into r.)
torch.optim.AdamW computes this, and so does the fused Adam of the NVIDIA reference, in its AdamW
mode, up to rounding. An own kernel would gain nothing: torch has a fused one for CPU and CUDA.

What torch leaves to us is who decays. Megatron-Core (NVIDIA/Megatron-LM megatron/core/optimizer)
spares every bias and every one-dimensional parameter, so norm weights; embeddings decay.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from timetrial.config import Optim
from timetrial.errors import UserError
from timetrial.optim import schedule

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def build(
    parameters: NamedParameters, optim: Optim, fused: bool = False, capturable: bool = False
) -> torch.optim.AdamW:
    """AdamW over those of the named `parameters` that require a gradient, set to the rate of step 0.

    Two groups, by `name` decay and no_decay in this order; an empty one is left out. `fused` takes torch's
    fused kernel (CPU, CUDA) in place of a few passes over all tensors; `capturable` lets a CUDA graph record
    the update. Raises UserError when `optim`
    is no AdamW or nothing is to be trained.
    """
    if optim.name != "adamw":
        raise UserError(f"optim.name {optim.name!r} is unknown; the optimizer is adamw")
    schedule.check(optim)
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    if not trained:
        raise UserError("no parameter requires a gradient; check lora.targets against the model's layers")
    groups = [
        {
            "params": [p for name, p in trained if decays(name, p, optim) == decay],
            "weight_decay": optim.weight_decay if decay else 0.0,
            "name": "decay" if decay else "no_decay",
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=schedule.learning_rate(optim, 0),
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=fused,
        capturable=capturable,
    )


def decays(name: str, parameter: Tensor, optim: Optim) -> bool:
    """Whether weight decay holds for this parameter. A DTensor's dims are those of the whole tensor."""
    return optim.decay_norms or not (parameter.ndim < 2 or name.endswith(".bias"))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """The rate of all groups for the next step; of all following ones where it is a tensor, a scalar."""
    for group in optimizer.param_groups:
        group["lr"] = rate
