"""The sum of token losses: cross entropy of each token's label, -100 meaning "not counted".

    loss = sum over tokens of log(sum_v exp(z_v)) - z_label

`VocabParallelLoss` computes it from logits whose vocabulary is split over tensor-parallel ranks, so that
no rank ever holds a whole row: one all-reduce for the rows' maxima, one for their sums and the labels'
logits (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Written out rather than by DTensor's
`loss_parallel`, which must be a context around the backward pass too and cannot be given to a
pipeline schedule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor, vocab_group: dist.ProcessGroup | None = None) -> Tensor:
    """Float32 scalar; the softmax is taken in float32 whatever the logits are.

    With `vocab_group`, this rank's logits are its part of the vocabulary, parts in rank order and of equal
    size, and every rank gets the same sum.
    """
    logits, labels = logits_BTV.flatten(0, 1).float(), labels_BT.flatten()
    if vocab_group is None:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    loss_sum: Tensor = VocabParallelLoss.apply(logits, labels, vocab_group)  # type: ignore[no-untyped-call]
    return loss_sum


class VocabParallelLoss(torch.autograd.Function):
    """(logits [N, V/tp] float32, labels [N], group) -> sum of losses, float32 scalar."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        part = logits_NV.shape[1]
        counted = labels_N != IGNORE
        own = labels_N - dist.get_rank(group) * part
        mine = counted & (own >= 0) & (own < part)
        own = torch.where(mine, own, 0)
        top_N = logits_NV.amax(dim=1)
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group)
        # shifting by the maximum keeps exp from overflowing and cancels out of the loss
        shifted_NV = logits_NV - top_N[:, None]
        at_label_N = shifted_NV.gather(1, own[:, None]).squeeze(1) * mine
        exp_NV = shifted_NV.exp_()
        sums = torch.stack((exp_NV.sum(dim=1), at_label_N))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(exp_NV.div_(sums[0][:, None]), own, mine, counted)
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """softmax - one_hot(label), of this rank's part."""
        softmax_NV, own, mine, counted = ctx.saved_tensors
        grad_NV = softmax_NV * counted[:, None]
        grad_NV.scatter_add_(1, own[:, None], -mine[:, None].to(grad_NV.dtype))
        return grad_NV * grad, None, None
