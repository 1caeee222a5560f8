"""A run's weights outside the run: put together from all ranks, adapters alone or merged."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from timetrial.config import Plan, RunConfig, replace
from timetrial.errors import UserError
from timetrial.models import lora
from timetrial.optim import adamw
from timetrial.parallel import parallelize
from timetrial.parallel.engine import Engine
from timetrial.train.base import initial_weights
from timetrial.train.build import build_model, empty_model
from timetrial.train.checkpoint import Checkpointer
from timetrial.train.rundir import reopen
from timetrial.train.state import load_state


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

    Needs the whole model in this machine's memory. Raises UserError when there is no checkpoint or
    `out` is not empty.
    """
    run, config = reopen(path)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: is not an empty directory; choose another")
    config = replace(config, plan=replace(Plan(), mbs=1, gbs=1, precision="fp32"))
    engine = parallelize.build(config, lambda: build_model(config, initial_weights(config)), "cpu")
    optimizer = adamw.build(engine.parameters_named(), config.optim)
    with Checkpointer(run.checkpoints, keep=config.keep_checkpoints) as checkpoints:
        restored = load_state(checkpoints, engine, optimizer, trainable_only=config.lora is not None)
    if restored is None:
        raise UserError(f"{run.checkpoints}: holds no checkpoint; train with --set checkpoint_every=N")
    save_model(config, engine.model, out)
    return f"{out}: weights of step {restored.step:,} as Hugging Face safetensors"
