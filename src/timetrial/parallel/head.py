"""Head and loss as one operator that never holds all logits.

The logits of a micro batch are the largest tensor of a step: 8,192 tokens of a vocabulary of 128,256 are
4.2 GB in float32, three times over (logits, softmax, gradient). Here a chunk of tokens is multiplied by the
head, turned into its losses and, at once, into its gradients, and dropped:

    z = x W^T,   g = softmax(z) - one_hot(label),   dx = g W,   dW += g^T x

so that the forward pass does the backward pass's products too, and the backward pass only scales them by the
loss's own gradient (as Liger-Kernel does, Hsu et al. 2024, arXiv:2410.10989, section 3.2). No product is made
twice. torch's own `linear_cross_entropy` has chunks too; it was 15 to 25 % slower here (docs/lab-log.md) and
cannot round logits.

Used where a rank has the whole vocabulary and calls the loss itself; a vocabulary split over tensor-parallel
ranks has its own loss, and a pipeline schedule wants the logits (`loss.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from timetrial.parallel.loss import IGNORE, token_loss_sum
from timetrial.precision.bf16 import Bf16Linear, rounded

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Of one chunk's float32 logits: on a CPU what its last cache holds, on a GPU what fills it."""


def model_loss_sum(
    model: nn.Module,
    tokens: Tensor,
    labels_BT: Tensor,
    positions_T: Tensor | None = None,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    device_type: str | None = None,
    most_chunks: int | None = None,
) -> Tensor:
    """The sum of token losses of a whole model, float32 scalar; as `loss.token_loss_sum` of its logits.

    Chunks are those of `device_type`, of the tensors' own device where None; longer ones where there were more than
    `most_chunks`.
    """
    head = getattr(model, "head", None)
    known = type(head) in (nn.Linear, Bf16Linear)  # another kind multiplies in its own way
    if known and isinstance(head, nn.Linear) and head.bias is None and vocab_group is None:
        x_ND = model(tokens, positions_T, head=False).flatten(0, 1)
        return head_loss_sum(x_ND, head, labels_BT.flatten(), device_type, most_chunks)
    return token_loss_sum(model(tokens, positions_T), labels_BT, vocab_group)


def head_loss_sum(
    x_ND: Tensor,
    head: nn.Linear,
    labels_N: Tensor,
    device_type: str | None = None,
    most_chunks: int | None = None,
) -> Tensor:
    """The sum of token losses from the head's input, float32 scalar. Its gradient can be taken once."""
    weight_VD, emulated = head.weight, False
    if isinstance(head, Bf16Linear):
        emulated = head.emulates(x_ND)
        x_ND, weight_VD = (rounded(t) if emulated else t.to(torch.bfloat16) for t in (x_ND, weight_VD))
    chunk = CHUNK_BYTES.get(device_type or x_ND.device.type, CHUNK_BYTES["cpu"])
    rows = max(1, chunk // (4 * weight_VD.shape[0]), -(-x_ND.shape[0] // most_chunks) if most_chunks else 1)
    loss_sum: Tensor = HeadLoss.apply(x_ND, weight_VD, labels_N, rows, emulated)  # type: ignore[no-untyped-call]
    return loss_sum


class HeadLoss(torch.autograd.Function):
    """(x [N, D], W [V, D], labels [N], rows a chunk, whether logits are rounded to bfloat16) -> sum of losses."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, rows: int, emulated: bool) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        loss_sum = torch.zeros((), device=x_ND.device)
        dx_ND = torch.empty_like(x_ND) if wants_x else None
        # summed over chunks in float32, whatever the operands are
        dw_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        for start in range(0, x_ND.shape[0], rows):
            part = slice(start, start + rows)
            x, labels = x_ND[part], labels_N[part]
            counted = labels != IGNORE
            z = F.linear(x, weight_VD)
            log_p = F.log_softmax((rounded(z) if emulated else z).float(), dim=1)
            own = labels.where(counted, 0)[:, None]
            loss_sum -= (log_p.gather(1, own).squeeze(1) * counted).sum()
            if dx_ND is None and dw_VD is None:
                continue
            g = log_p.exp_()
            g.scatter_add_(1, own, g.new_full((), -1.0).expand_as(own))
            g = rounded(g) if emulated else g.to(x.dtype)
            # tokens that do not count are struck out on the narrow side of the products
            if dx_ND is not None:
                dx_ND[part] = torch.mm(g, weight_VD) * counted[:, None]
            if dw_VD is not None and dw_VD.dtype == x.dtype:
                dw_VD.addmm_(g.t(), x * counted[:, None])
            elif dw_VD is not None:
                dw_VD += torch.mm(g.t(), x * counted[:, None])
        ctx.save_for_backward(dx_ND, dw_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx_ND, dw_VD = ctx.saved_tensors
        # in place: they are nobody else's
        dx_ND = None if dx_ND is None else dx_ND.mul_(grad)
        dw_VD = None if dw_VD is None else dw_VD.mul_(grad).to(ctx.weight_dtype)
        return dx_ND, dw_VD, None, None, None
