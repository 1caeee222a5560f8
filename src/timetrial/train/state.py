"""The state of a model and its optimizer as one nested dictionary, the same in every layout.

    {"model": {name: tensor}, "optimizer": {"state": {name: {"exp_avg": tensor, ...}}, "groups": {name: {"lr": ...}}}}

Names of parameters are those of the single-device model, names of groups those that the optimizer gave them
(their number, where it gave none): a pipeline stage may lack a group that others have. Tensors are plain, or
DTensors under FSDP2 and tensor parallelism, and share their memory with the model, so that reading a checkpoint
into this state reads it into the model. Built on torch.distributed.checkpoint.state_dict, with two differences:

- Its way to make room for the state of a fresh optimizer is a step with zero gradients and learning
  rate zero, which leaves `step` at 1: an Adam that goes on from there corrects its bias as if it were
  one step older. Here `step` goes back to 0, which equals a fresh optimizer.
- How an update is computed (fused, foreach, capturable, a learning rate in a tensor) belongs to the process and
  is not stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from timetrial.parallel.engine import Engine
from timetrial.train.checkpoint import Checkpointer, Restored

_HOW_NOT_WHAT = {"params", "foreach", "fused", "capturable", "differentiable", "name"}


def run_state(engine: Engine, optimizer: Optimizer, trainable_only: bool = False) -> dict[str, dict[str, Any]]:
    """`model_state` of this rank's part of the run's model."""
    return model_state(engine.model, optimizer, trainable_only=trainable_only)


def load_state(
    checkpoints: Checkpointer, engine: Engine, optimizer: Optimizer, trainable_only: bool = False
) -> Restored | None:
    """Reads the newest intact checkpoint into the run's model and optimizer; None when there is none."""
    state = run_state(engine, optimizer, trainable_only)
    restored = checkpoints.restore_newest(state)
    if restored is not None:
        load_model_state(engine.model, optimizer, state, trainable_only=trainable_only)
    return restored


def model_state(
    model: nn.Module, optimizer: Optimizer | None = None, *, trainable_only: bool = False
) -> dict[str, dict[str, Any]]:
    """The state to save, or to read a checkpoint into.

    trainable_only: leave out frozen parameters, which are made again from their own source (LoRA).
    An optimizer that has made no step yet gets its state, as zeros.
    """
    options = StateDictOptions(ignore_frozen_params=trainable_only)
    state: dict[str, dict[str, Any]] = {"model": dict(get_model_state_dict(model, options=options))}
    if optimizer is not None:
        moments, groups = _optimizer_state(model, optimizer)
        state["optimizer"] = {
            "state": moments,
            "groups": {
                _name(index, group): {k: _plain(value) for k, value in group.items() if k not in _HOW_NOT_WHAT}
                for index, group in enumerate(groups)
            },
        }
    return state


def load_model_state(
    model: nn.Module,
    optimizer: Optimizer | None,
    state: dict[str, dict[str, Any]],
    *,
    trainable_only: bool = False,
) -> None:
    """Puts a state of `model_state`'s form, filled from a checkpoint, into the model and the optimizer."""
    options = StateDictOptions(strict=not trainable_only, ignore_frozen_params=trainable_only)
    set_model_state_dict(model, dict(state["model"]), options=options)
    if optimizer is None:
        return
    _, groups = _optimizer_state(model, optimizer)
    stored = state["optimizer"]["groups"]
    merged = [{**group, **stored[_name(index, group)]} for index, group in enumerate(groups)]
    set_optimizer_state_dict(model, optimizer, {"state": state["optimizer"]["state"], "param_groups": merged})


def _name(index: int, group: dict[str, Any]) -> str:
    return str(group.get("name", index))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """State by parameter name, and parameter groups with their parameters' names."""
    if optimizer.state:
        found = get_optimizer_state_dict(model, optimizer)
    else:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None  # torch makes no room for state while there are gradients
        found = get_optimizer_state_dict(model, optimizer)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        for per_parameter in optimizer.state.values():
            step = per_parameter.get("step")
            if isinstance(step, torch.Tensor):
                step.zero_()
            elif step is not None:
                per_parameter["step"] = 0
    return found["state"], found["param_groups"]  # type: ignore[return-value]
