"""Every field of a configuration that can be set, held against what it may be, before anything starts.

`config.override` sees to types; this sees to ranges, names, and to values of a stored configuration that
are of the wrong type. One line a mistake: the dotted key, its value, what is allowed. What a model's
fields may be is the model's to know: its configuration may have a `check()` of its own. Which values fit
together under a plan is `parallel.plan.validate`'s, which may rely on this having passed.

No torch and no numpy here, as in the plan's checks.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

from timetrial.config import Lora, RunConfig
from timetrial.data.names import SOURCE_NAMES
from timetrial.errors import UserError
from timetrial.models.lora_targets import adapted
from timetrial.optim import schedule
from timetrial.parallel.plan import ZERO
from timetrial.workloads import workload as workloads

IDENTITY = ("workload", "preset", "round")
"""What a run is: chosen by the workload's definition, and not to be set by hand."""
OPTIMIZERS = ("adamw",)
AVERAGES = ("tokens", "sequences")
INITS = ("random", "base", "hf")
DIVISIONS = ("closed", "open")
SIZE = 2**31 - 1
"""The largest size of anything; below it, sizes and products of two fit a 64-bit index."""
COUNT = 2**63 - 1
"""The largest count of samples or steps, and the largest seed."""


@dataclass(frozen=True)
class Range:
    """From `low` to `high`; the ends belong to it unless they are said to be open."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        low = f"above {self.low:,}" if self.low_open else f"at least {self.low:,}"
        if self.high == math.inf:
            return low
        return f"{low} and {'below' if self.high_open else 'at most'} {self.high:,}"


POSITIVE = Range(0.0, low_open=True)
SHARE = Range(0.0, 1.0, high_open=True)

RANGES: dict[str, Range] = {
    "data.seq_len": Range(2, SIZE),  # a packed sample of one token has no label
    "evaluation.every_samples": Range(1, COUNT),
    "evaluation.samples": Range(1, COUNT),
    "evaluation.skip_first": Range(0, COUNT),
    "evaluation.max_samples": Range(1, COUNT),
    "optim.base_lr": POSITIVE,
    "optim.end_lr": Range(0.0),
    "optim.beta1": SHARE,
    "optim.beta2": SHARE,
    "optim.eps": POSITIVE,
    "optim.weight_decay": Range(0.0),
    "optim.clip_norm": POSITIVE,
    "optim.warmup_steps": Range(0, COUNT),
    "optim.decay_steps": Range(1, COUNT),
    "lora.rank": Range(1, SIZE),
    "lora.alpha": POSITIVE,
    "lora.dropout": SHARE,
    **{f"plan.{name}": Range(1, SIZE) for name in ("tp", "cp", "pp", "vp", "ep", "dp", "mbs", "gbs")},
    "plan.shard": Range(0, SIZE),
    "plan.zero": Range(min(ZERO), max(ZERO)),
    "seed": Range(0, COUNT),
    "threads": Range(1, 4096),
    "lanes": Range(1, 64),
    "max_steps": Range(1, COUNT),
    "checkpoint_every": Range(0, COUNT),
    "keep_checkpoints": Range(1, SIZE),
}
"""Dotted key -> what its number may be."""

NAMES: dict[str, tuple[str, ...]] = {
    "preset": workloads.PRESETS,
    "data.source": SOURCE_NAMES,
    "optim.name": OPTIMIZERS,
    "optim.schedule": schedule.SCHEDULES,
    "evaluation.average": AVERAGES,
    "init.kind": INITS,
    "submission.division": DIVISIONS,
}
"""Dotted key -> the names it may be."""

NOT_EMPTY = ("evaluation.metric", "submission.org", "submission.platform")


def check(config: RunConfig) -> None:
    """Raise UserError, one line naming the key, the value and what is allowed, unless `config` can be run.

    Says nothing about files and the machine: whether a path exists is asked by whoever opens it.
    """
    _check_identity(config)
    _check_types(config, "")
    for key, allowed in RANGES.items():
        value = _value(config, key)
        if value is not None and not allowed.holds(value):
            raise UserError(f"{key}={value}: must be {allowed}")
    for key, names in NAMES.items():
        _check_name(key, str(_value(config, key)), names)
    for key in NOT_EMPTY:
        if not str(_value(config, key)).strip():
            raise UserError(f"{key} is empty: must be a name")
    schedule.check(config.optim)
    _check_model(config.model)
    _check_init(config)
    _check_lanes(config)
    if config.lora is not None:
        _check_targets(config.model, config.lora)


def _check_identity(config: RunConfig) -> None:
    rounds = workloads.find(config.workload).rounds
    _check_name("preset", config.preset, workloads.PRESETS)
    _check_name("round", config.round, rounds)


def _check_types(group: Any, prefix: str) -> None:
    """Numbers are finite and of the field's type, all the way down; a stored file may say anything."""
    hints = typing.get_type_hints(type(group))
    for field in dataclasses.fields(group):
        key, value, hint = f"{prefix}{field.name}", getattr(group, field.name), hints[field.name]
        if dataclasses.is_dataclass(value):
            _check_types(value, f"{key}.")
            continue
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        if value is None and type(None) in options:
            continue
        for kind, words in ((bool, "true or false"), (int, "a whole number"), (float, "a finite number")):
            if kind in options and not _is(value, kind):
                raise UserError(f"{key}={value}: must be {words}")
        if isinstance(value, int) and abs(value) > COUNT:
            raise UserError(f"{key}={value}: must be at most {COUNT:,}")
        if str in options and not isinstance(value, str):
            raise UserError(f"{key}={value}: must be text")
        if any(typing.get_origin(option) is tuple for option in options) and not isinstance(value, tuple):
            raise UserError(f"{key}={value}: must be a list")


def _is(value: Any, kind: type) -> bool:
    if kind is float:  # JSON writes 1.0 as it likes
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


def _check_name(key: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        meant = workloads.suggest(value, list(names))
        raise UserError(f"{key}={value}: unknown{meant}; must be one of {', '.join(map(repr, names))}")


def _check_model(model: Any) -> None:
    own = getattr(model, "check", None)
    if own is not None:
        own()
    if model.n_params() < 1:
        raise UserError(f"model: has {model.n_params()} parameters; give it at least one")


def against_lanes(config: RunConfig) -> str | None:
    """What of `config` lanes (`parallel/lanes.py`) do not go with, or None."""
    if config.plan.world_size > 1:
        return "several ranks"
    return "lora.dropout" if config.lora is not None and config.lora.dropout > 0.0 else None


def _check_lanes(config: RunConfig) -> None:
    if config.lanes is None or config.lanes == 1:
        return
    if obstacle := against_lanes(config):
        raise UserError(f"lanes={config.lanes}: lanes do not go with {obstacle}; leave lanes out")
    if config.threads is not None and config.threads % config.lanes:
        raise UserError(f"lanes={config.lanes}: must divide threads={config.threads}")


def _check_init(config: RunConfig) -> None:
    if config.init.kind == "base":
        name = config.init.base or config.workload
        if config.init.base is not None:
            _check_name("init.base", name, tuple(workloads.names()))
        if workloads.find(name).mini_base is None:
            raise UserError(f"init.kind=base: {name} defines no base; must be random, or hf with init.path")


def _check_targets(model: Any, lora: Lora) -> None:
    linears = getattr(model, "linears", None)
    if linears is not None:
        adapted(linears(), lora.targets)


def _value(config: RunConfig, key: str) -> Any:
    """The field at a dotted key; None in a group that is absent."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None) if value is not None else None
    return value
