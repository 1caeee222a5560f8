"""From a configuration to a model with its weights, on one device, before anything is cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from timetrial.config import RunConfig
from timetrial.models import lora


def empty_model(config: RunConfig, device: str | torch.device = "meta") -> nn.Module:
    """The model without values, adapters included; on `meta` it takes no memory. Float32."""
    with torch.device(device):
        model: nn.Module = config.model.create()
        if config.lora is not None:
            lora.apply(model, config.lora, seed=config.seed)
    return model


def build_model(config: RunConfig, weights: Path | None, device: str | torch.device = "cpu") -> nn.Module:
    """The model with its initial weights and its adapters.

    `weights` is a directory of pretrained weights, or None for random weights by the seed.
    """
    with torch.device(device):
        model: nn.Module = config.model.create()
    if weights is None:
        cast(Any, model).init_weights(config.seed)
    else:
        config.model.load_weights(model, weights, resize_vocab=config.init.resize_vocab)
    if config.lora is not None:
        lora.apply(model, config.lora, seed=config.seed)
    return model
