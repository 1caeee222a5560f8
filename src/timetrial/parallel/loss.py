"""The sum of token losses: cross entropy of each token's label, -100 meaning "not counted".

loss = sum over tokens of log(sum_v exp(z_v)) - z_label
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Float32 scalar; the softmax is taken in float32 whatever the logits are."""
    logits = logits_BTV.flatten(0, 1).float()
    return F.cross_entropy(logits, labels_BT.flatten(), ignore_index=IGNORE, reduction="sum")
