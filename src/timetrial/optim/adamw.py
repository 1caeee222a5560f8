"""AdamW as the reference implementations set it up, and gradient clipping over all shards.

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
from torch.distributed.tensor import DTensor

from timetrial.config import Optim
from timetrial.errors import UserError
from timetrial.optim import schedule

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def build(parameters: NamedParameters, optim: Optim, fused: bool = False) -> torch.optim.AdamW:
    """AdamW over those of the named `parameters` that require a gradient, set to the rate of step 0.

    Two groups, `decay` True and False in this order; an empty one is left out. `fused` takes torch's
    fused kernel (CPU, CUDA) in place of a few passes over all tensors. Raises UserError when `optim`
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
            "decay": decay,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=schedule.learning_rate(optim, 0),
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=fused,
    )


def decays(name: str, parameter: Tensor, optim: Optim) -> bool:
    """Whether weight decay holds for this parameter. A DTensor's dims are those of the whole tensor."""
    return optim.decay_norms or not (parameter.ndim < 2 or name.endswith(".bias"))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of all groups for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their joint L2 norm is at most `max_norm`; returns the norm before that.

    The norm is a float32 scalar, the same on every rank that holds a shard; ranks of other pipeline
    stages are not asked. Nothing waits for the device: an infinite or NaN norm spoils the gradients
    and is the caller's to see.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = global_norm(grads)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in Megatron-Core and in torch
    torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], scale)
    return norm


def global_norm(grads: list[Tensor]) -> Tensor:
    """L2 norm of all `grads` together, in float32; a DTensor counts as the whole tensor."""
    by_mesh: dict[object, list[Tensor]] = {}
    for grad in grads:  # tensors of different meshes cannot be stacked
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    joint: Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in whole]))
    return joint
