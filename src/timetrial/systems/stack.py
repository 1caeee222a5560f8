"""A stack: what one generation of training software makes of the operators that model code asks for.

The same chip trains 1.5 times faster half a year later by software alone, so every efficiency figure belongs
to a stack. A stack is a file in `stacks/`; it may say `like = "another"` and change what differs.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from timetrial.errors import UserError

ROLES = ("fprop", "dgrad", "wgrad")
GRAPHS = ("none", "layer", "full")
CONTEXTS = ("ring", "heads")


@dataclass(frozen=True)
class Recipe:
    """How linear layers run in one number format."""

    format: str = "bf16"
    """Of the products' operands: bf16, fp8, mxfp8, nvfp4 or mxfp4."""
    bytes: float = 2.0
    """Of one element with its share of the scales."""
    extra_read_bytes: float = 0.0
    """Read once more per element cast: 2 where the largest value must be known before (current scaling)."""
    roles: tuple[str, ...] = ROLES
    """Which products of a linear layer run in the format; the others run in bf16."""
    gathers_low: bool = False
    """Whether tensor-parallel all-gathers carry the low format."""
    weights_low: bool = False
    """Whether the master copy of a weight is cast once a step (in the optimizer), not in each micro batch."""


@dataclass(frozen=True)
class Stack:
    """One generation of software."""

    name: str
    title: str = ""
    """Which software, in words."""
    rounds: tuple[str, ...] = ()
    """Rounds whose entries ran on it, where nothing nearer is known: "v5.0"."""
    vendors: tuple[str, ...] = ("nvidia",)
    """Whose accelerators it is for: nvidia, amd, cpu."""
    releases: tuple[str, ...] = ()
    """Names by which vendors' tables call it."""
    fuse: bool = True
    """Whether neighbouring operators bound by memory become one kernel."""
    fuse_adapters: bool = True
    """Whether that holds for adapters' operators too."""
    fuse_casts: bool = True
    """Whether a cast is part of the kernel that makes the tensor."""
    graphs: str = "none"
    """Which launches cost the host nothing, where a plan does not say: none, layer or full."""
    gap_s: float = 1.0e-6
    """Idle time of the device between two kernels, s."""
    overlaps: tuple[str, ...] = ("tp", "cp", "dp", "pp")
    """Axes whose communication runs beside computing, where a run does not say."""
    contexts: tuple[str, ...] = ("ring",)
    """How context-parallel ranks may share attention: ring (keys and values go round), heads (all-to-all, where the
    heads divide). Of two the faster is taken, as who tunes a run does."""
    context_low: bool = False
    """Whether what context-parallel ranks send each other has attention's format."""
    ep_overlap: float = 0.0
    """Share of a block's products that can hide expert-parallel all-to-alls."""
    gradient_bytes: float = 2.0
    """Of one gradient element as it is reduced."""
    parameter_bytes: float = 2.0
    """Of one parameter element as it is gathered."""
    stash: bool = False
    """Whether SwiGLU's inputs may be kept in eight bits from the forward to the backward pass."""
    bucket_elements: float = 0.0
    """Gradients that leave together; 0: Megatron-Core's rule, the larger of 40 million and a million a rank."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """By the precision's name: bf16, fp8 (delayed scaling), fp8(tensorwise), mxfp8, nvfp4, mxfp4."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """In place of fitted ones, by their names: see `predict/constants.py`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure comes from."""

    def recipe(self, precision: str) -> Recipe:
        """The recipe of a precision. Raises UserError for one that the stack does not have."""
        found = self.recipes.get(precision)
        if found is None:
            raise UserError(
                f"stack {self.name} has no precision {precision!r}; it has {', '.join(sorted(self.recipes))}"
            )
        return found


RANGES: dict[str, tuple[float, float]] = {
    "gap_s": (0, 1e-4),
    "ep_overlap": (0, 1),
    "gradient_bytes": (1, 4),
    "parameter_bytes": (0.5, 4),
    "bucket_elements": (0, 1e12),
    "bytes": (0.5, 4),
    "extra_read_bytes": (0, 8),
}


def names() -> list[str]:
    """The stacks of the package."""
    return sorted(p.name.removesuffix(".toml") for p in _folder().iterdir() if p.name.endswith(".toml"))


@lru_cache(maxsize=64)
def load(name: str) -> Stack:
    """A stack by its name, or from a file by its path. Raises UserError on what cannot be."""
    return _build(_values(name), name)


def for_round(round_: str, vendor: str) -> Stack:
    """The stack that a round's entries ran on. Raises UserError where none is known."""
    told = re.search(r"\d+\.\d+", round_)  # "V5.1", "Training v5.1" and "5.1" mean one round
    round_ = f"v{told[0]}" if told else round_
    for name in names():
        stack = load(name)
        if round_ in stack.rounds and vendor in stack.vendors:
            return stack
    raise UserError(f"no stack is known for round {round_} on {vendor}; name one with --stack: {', '.join(names())}")


def for_release(release: str) -> Stack | None:
    """The stack of a text that names a vendor's software release, or None."""
    return next((s for s in map(load, names()) if any(name in release for name in s.releases)), None)


def _folder() -> Any:
    return resources.files("timetrial.systems") / "stacks"


def _values(name: str) -> dict[str, Any]:
    path = Path(name)
    source = path if name.endswith(".toml") else _folder() / f"{name}.toml"
    try:
        text = source.read_text()
    except OSError:
        raise UserError(f"no stack {name!r}; there are {', '.join(names())}, or give a .toml file") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"stack {name}: not TOML: {error}") from None
    if "like" in values:
        base = _values(values.pop("like"))
        for key in ("rounds", "releases", "title"):
            base.pop(key, None)
        for table in ("recipes", "sources", "constants"):
            values[table] = base.get(table, {}) | values.get(table, {})
        values = base | values
    return values


def _build(values: dict[str, Any], name: str) -> Stack:
    recipes = {
        key: _dataclass(Recipe, given, f"stack {name}: recipes.{key}")
        for key, given in values.pop("recipes", {}).items()
    }
    values["name"] = Path(name).name.removesuffix(".toml")
    stack: Stack = _dataclass(Stack, values | {"recipes": recipes}, f"stack {name}")
    for key, values_, allowed in (("graphs", (stack.graphs,), GRAPHS), ("contexts", stack.contexts, CONTEXTS)):
        if not values_ or not set(values_) <= set(allowed):
            raise UserError(f"stack {name}: {key}={', '.join(values_)} must be of {', '.join(allowed)}")
    return stack


def _dataclass(cls: type, values: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    made = {}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{where}: no setting {key!r}; there are {', '.join(sorted(known))}")
        made[key] = tuple(value) if isinstance(value, list) else value
        if hints[key] is float:
            low, high = RANGES[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"{where}: {key}={value!r} must be a number")
            if not low <= value <= high:
                raise UserError(f"{where}: {key}={value} must lie between {low} and {high}")
            made[key] = float(value)
        elif hints[key] in (bool, str) and not isinstance(value, hints[key]):
            raise UserError(f"{where}: {key}={value!r} must be a {hints[key].__name__}")
    return cls(**made)
