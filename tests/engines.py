"""An engine of one rank with a small model in it, for tests of steps."""

from __future__ import annotations

import torch
from torch import nn

from timetrial.config import Lora
from timetrial.models import lora
from timetrial.models.llama.config import LlamaConfig
from timetrial.parallel.engine import OneRank
from timetrial.precision import bf16


def one_rank(model_config: LlamaConfig, std: float, precision: str, adapters: Lora | None, device: str) -> OneRank:
    """Norms are 1, all other parameters normal(0, std), from one stream."""
    model: nn.Module = model_config.create()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if name.endswith("norm.weight") else p.normal_(std=std, generator=generator)
    if adapters is not None:
        lora.apply(model, adapters, seed=1)
    if precision == "bf16":
        bf16.convert(model)
    return OneRank(model, torch.device(device))
