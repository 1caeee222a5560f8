"""The one entry of the engine: a run's configuration and a model in, something to step out.

Order of what is applied: precision -> recomputation -> compile. Each rewrites the model in place and
keeps its parameters' names (`engine.plain_name`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from timetrial.config import RunConfig
from timetrial.errors import UserError
from timetrial.parallel.engine import Engine, OneRank
from timetrial.precision import bf16


def build(config: RunConfig, model_factory: Callable[[], nn.Module], device: torch.device | str = "cpu") -> Engine:
    """Lay the model out over the ranks of this job as `config.plan` says.

    `model_factory` returns the whole model on the CPU with its initial weights in it; it is called once
    on every rank and must give the same weights there, which holds for `init_weights(seed)`'s named
    streams and for a checkpoint. Dropout draws from torch's generator, which is left to the caller.
    """
    device = torch.device(device)
    plan = config.plan
    if plan.world_size != 1:
        raise UserError(f"plan needs {plan.world_size} ranks; this build runs on one")
    model = model_factory()
    if plan.precision == "bf16":
        bf16.convert(model)
    if plan.compile:
        for block in model.get_submodule("layers").children():
            block.compile()
    return OneRank(model, device)
