"""From a configuration to a model without memory, and to the initial value of each of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from timetrial.config import RunConfig
from timetrial.models import lora
from timetrial.parallel.initial import fill


def empty_model(config: RunConfig, device: str | torch.device = "meta") -> nn.Module:
    """The model without values, adapters included; on `meta` it takes no memory. Float32."""
    with torch.device(device):
        model: nn.Module = config.model.create()
        if config.lora is not None:
            lora.apply(model, config.lora, seed=config.seed)
    return model


@dataclass(frozen=True)
class InitialValues:
    """What the parameters of a run's model start from, one whole value at a time (`parallel.initial.Values`)."""

    config: RunConfig
    weights: Path | None
    """Directory of pretrained weights, or None for random ones by the seed. Adapters are random in any case."""

    def __call__(self, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
        """(name, value), float32 on the CPU where it is random, for the parameters in `shapes`."""
        adapters = [name for name in shapes if lora.is_adapter(name)]
        for name in adapters:
            yield name, self._random(name, shapes[name])
        plain = {lora.plain_name(name): name for name in shapes if not lora.is_adapter(name)}
        if self.weights is None:
            for name, theirs in plain.items():
                yield theirs, self._random(name, shapes[theirs])
        elif plain:
            for name, value in self.config.model.read_weights(self.weights, plain, self.config.init.resize_vocab):
                yield plain[name], value

    def _random(self, name: str, shape: torch.Size) -> Tensor:
        value = torch.empty(shape)
        if lora.is_adapter(name):
            lora.init_parameter(name, value, self.config.seed)
        else:
            self.config.model.init_parameter(name, value, self.config.seed)
        return value


def build_model(config: RunConfig, weights: Path | None, device: str | torch.device = "cpu") -> nn.Module:
    """The whole model with its initial weights (see `InitialValues`) and its adapters, on one device."""
    model = empty_model(config)
    fill(model, InitialValues(config, weights), device)
    return model
