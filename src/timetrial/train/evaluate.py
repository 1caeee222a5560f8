"""Held-out loss over a fixed set of samples.

Pretraining averages over all counted tokens. The LoRA reference evaluates sequence by sequence and
averages their means, so that each summary weighs the same however long it is; then batches hold one
sequence each, under every plan.
"""

from __future__ import annotations

import torch

from timetrial.config import RunConfig
from timetrial.data.loader import eval_batches
from timetrial.data.source import Samples
from timetrial.errors import RunFailed
from timetrial.parallel.engine import Engine


def evaluate(engine: Engine, heldout: Samples, config: RunConfig) -> float:
    """Nats per token over the first `evaluation.samples` held-out samples, the same on every rank.

    Raises RunFailed when no token of them has a label.
    """
    by_sequence = config.evaluation.average == "sequences"
    mbs = 1 if by_sequence else config.plan.mbs
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    # the last batch may be smaller: an evaluation, unlike a step, has no fixed shape, in a pipeline neither
    for batch in eval_batches(heldout, config.evaluation.samples, mbs, engine.dp_rank, engine.dp_size):
        loss_sum, tokens = engine.eval_loss(batch)
        loss, weight = loss_sum.double(), tokens.double()
        if by_sequence:  # one without counted tokens has no mean; a loss that is not finite must show
            loss, weight = loss / weight.clamp(min=1.0), (weight > 0).double()
        sums += torch.stack((loss, weight.to(loss.device)))
    total, weights = engine.reduce_sums(sums).tolist()
    if not weights:
        raise RunFailed(f"evaluation: none of the {config.evaluation.samples:,} held-out samples has a counted token")
    return float(total / weights)
