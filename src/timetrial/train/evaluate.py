"""Held-out loss over a fixed set of samples.

Pretraining averages over all counted tokens. The LoRA reference evaluates sequence by sequence and
averages their means, so that each summary weighs the same however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from timetrial.config import RunConfig
from timetrial.data.loader import eval_batches
from timetrial.data.source import Samples
from timetrial.parallel.engine import Batch, Engine


def _batches(heldout: Samples, config: RunConfig, mbs: int, engine: Engine) -> Iterator[Batch]:
    fixed_shape = config.plan.pp > 1  # pipeline stages agree on one shape beforehand
    return eval_batches(heldout, config.evaluation.samples, mbs, engine.dp_rank, engine.dp_size, pad=fixed_shape)


def evaluate(engine: Engine, heldout: Samples, config: RunConfig) -> float:
    """Nats per token over the first `evaluation.samples` held-out samples, the same on every rank."""
    by_sequence = config.evaluation.average == "sequences"
    mbs = 1 if by_sequence and config.plan.pp == 1 else config.plan.mbs
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for batch in _batches(heldout, config, mbs, engine):
        loss_sum, tokens = engine.eval_loss(batch)
        loss, weight = loss_sum.double(), tokens.double()
        if by_sequence:  # a sequence without counted tokens has no mean
            loss, weight = torch.nan_to_num(loss / weight), (weight > 0).double()
        sums += torch.stack((loss, weight))
    total, weights = engine.reduce_sums(sums).tolist()
    return float(total / weights)
