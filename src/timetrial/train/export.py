"""A run's weights outside the run: put together from all ranks, adapters alone or merged."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

from timetrial.config import RunConfig
from timetrial.errors import UserError
from timetrial.models import lora
from timetrial.parallel.engine import Engine
from timetrial.train.base import initial_weights
from timetrial.train.build import build_model, empty_model
from timetrial.train.checkpoint import Checkpointer
from timetrial.train.rundir import reopen
from timetrial.train.state import load_model_state, model_state


def whole_model(config: RunConfig, engine: Engine) -> nn.Module | None:
    """The single-device model with the engine's weights; None on all ranks but 0. Every rank must call it."""
    if engine.world_size == 1:
        return engine.model
    weights = engine.whole_weights()
    if engine.rank != 0:
        return None
    model = empty_model(config, "cpu")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    if unexpected or set(missing) - tied:
        raise AssertionError(f"weights of all ranks do not make up the model: {missing=} {unexpected=}")
    return model


def save_model(config: RunConfig, model: nn.Module, out: Path) -> None:
    """Write `model` as pretrained weights, adapters merged into it."""
    if config.lora is not None:
        lora.merge(model)
    config.model.save_weights(model, out)


def export_run(path: Path, out: Path) -> str:
    """Write the weights of the run in `path` to the directory `out`, adapters merged; what was done.

    The run may be going on: its directory is only read. Needs the whole model in this machine's memory.
    Raises UserError when there is no run, or no checkpoint in it, or `out` is not empty.
    """
    run, config = reopen(path)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: is not an empty directory; choose another")
    with Checkpointer(run.checkpoints, read_only=True) as checkpoints:
        if checkpoints.newest is None:
            raise UserError(f"{run.checkpoints}: holds no checkpoint yet; train with --set checkpoint_every=N")
        adapters_only = config.lora is not None  # then the checkpoint lacks what they stand on
        model = build_model(config, initial_weights(config) if adapters_only else None)
        state = model_state(model, trainable_only=adapters_only)
        restored = checkpoints.restore_newest(state)
    assert restored is not None
    load_model_state(model, None, state, trainable_only=adapters_only)
    for message in restored.skipped:
        print(f"warning: {message}", file=sys.stderr)
    save_model(config, model, out)
    return f"{out}: weights of step {restored.step:,} as Hugging Face safetensors"
