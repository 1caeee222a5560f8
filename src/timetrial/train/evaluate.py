"""Held-out loss: the mean over the counted tokens of a fixed set of samples."""

from __future__ import annotations

import torch

from timetrial.config import RunConfig
from timetrial.data.loader import eval_batches
from timetrial.data.source import Samples
from timetrial.parallel.engine import Engine


def evaluate(engine: Engine, heldout: Samples, config: RunConfig) -> float:
    """Nats per token over the first `evaluation.samples` held-out samples, the same on every rank."""
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    batches = eval_batches(heldout, config.evaluation.samples, config.plan.mbs, engine.dp_rank, engine.dp_size)
    for batch in batches:
        loss_sum, tokens = engine.eval_loss(batch)
        sums += torch.stack((loss_sum.double(), tokens.double()))
    total, tokens = engine.reduce_sums(sums).tolist()
    return total / tokens
