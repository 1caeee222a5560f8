"""A run's newest weights as Hugging Face safetensors, whatever plan trained them."""

from __future__ import annotations

from pathlib import Path

from timetrial.config import Plan, replace
from timetrial.errors import UserError
from timetrial.optim import adamw
from timetrial.parallel import parallelize
from timetrial.train.base import initial_weights
from timetrial.train.build import build_model
from timetrial.train.checkpoint import Checkpointer
from timetrial.train.loop import trained_weights
from timetrial.train.rundir import reopen
from timetrial.train.state import load_state


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
    trained_weights(config, engine, out)
    return f"{out}: weights of step {restored.step:,} as Hugging Face safetensors"
