"""Configurations: frozen dataclasses, built in Python, varied by replace(), stored as JSON.

A run is one `RunConfig` value. It is resolved once, before anything starts, and written to the
run directory as it stands; `load()` gives the same value back. Nothing else steers a run: no
environment variable, no module global.

The model's own configuration is a dataclass of the model's package (`models/llama/config.py`), so
that a new model adds a file and edits none. JSON carries its type by name.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import types
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from timetrial.errors import UserError

T = TypeVar("T")

AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True)
class Plan:
    """How one run is laid out over its ranks."""

    tp: int = 1
    """Tensor parallel degree, ranks."""
    cp: int = 1
    """Context parallel degree, ranks."""
    pp: int = 1
    """Pipeline parallel degree, ranks."""
    vp: int = 1
    """Virtual pipeline stages per pipeline rank."""
    ep: int = 1
    """Expert parallel degree, ranks."""
    dp: int = 1
    """Data parallel degree, ranks."""
    shard: int = 0
    """Ranks of dp x cp over which parameters, gradients and optimizer states are sharded; 0: all of them. Groups of
    that size are replicas of each other, whose gradients are all-reduced (hybrid sharding, HSDP)."""
    zero: int | None = None
    """What is sharded also within a step: 1 neither parameters nor gradients, 2 gradients, 3 both (the stages of
    ZeRO). None: 3, and 1 with pipeline stages."""
    order: str = "tp-cp-dp-pp"
    """Axes from the fastest to the slowest varying over the ranks."""
    mbs: int = 1
    """Micro batch: samples per forward pass on one data parallel rank."""
    gbs: int = 1
    """Global batch: samples per optimizer step over all ranks."""
    precision: str = "bf16"
    """fp32 or bf16: what matrix products take; weights and optimizer state stay in fp32."""
    recompute: str = "none"
    """Activation recomputation: none, selective or full."""
    schedule: str = "1f1b"
    """Pipeline schedule: 1f1b (interleaved when vp > 1), zb (zero bubble) or zbv (V-shaped zero bubble, vp=2)."""
    compile: bool = False
    """Run each block under torch.compile."""
    graph: bool = False
    """Replay the whole step as one CUDA graph."""
    async_tp: bool = False
    """Overlap tensor-parallel communication with its products, in compiled blocks on GPUs."""

    @property
    def world_size(self) -> int:
        """Ranks of the run. Expert parallelism reuses ranks of the other axes."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the parameters of a tensor and pipeline rank."""
        return self.shard or self.dp * self.cp

    @property
    def zero_stage(self) -> int:
        """`zero`, chosen where the plan leaves it open."""
        return self.zero or (3 if self.pp == 1 else 1)

    @property
    def grad_accumulation_steps(self) -> int:
        """Micro batches that one data parallel rank runs per optimizer step."""
        return self.gbs // (self.mbs * self.dp)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = 16
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = 0.1
    """Probability of dropping an element of the adapter's input."""
    targets: tuple[str, ...] = ("wq", "wk", "wv", "wo")
    """Names of the linear layers that get an adapter."""


@dataclass(frozen=True)
class Init:
    """Where the weights come from."""

    kind: str = "random"
    """random; base (pretrain `base` first, cached); hf (a directory of Hugging Face safetensors)."""
    path: str | None = None
    """Directory of the checkpoint, for kind=hf."""
    base: str | None = None
    """Workload whose mini base is the start, for kind=base; the run's own where None."""
    resize_vocab: bool = False
    """Take the first rows of embedding and head where the checkpoint's vocabulary is larger."""


@dataclass(frozen=True)
class Data:
    """Which samples the run reads."""

    source: str
    """A key of `data.sources`: what is read and how it is cut into samples."""
    path: str | None = None
    """Directory made by `timetrial data build`; None where the package bundles the data."""
    seq_len: int = 8192
    """Tokens per sample."""
    tokenizer: str = ""
    """Which tokenizer the token files must have been made with."""


@dataclass(frozen=True)
class Optim:
    """Optimizer and learning-rate schedule. AdamW: Loshchilov and Hutter, arXiv:1711.05101."""

    name: str = "adamw"
    base_lr: float = 1e-3
    end_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-5
    weight_decay: float = 0.1
    """Applied as the reference applies it; see `decay_norms`."""
    decay_norms: bool = False
    """Whether vectors (norm weights, biases) decay too."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""
    schedule: str = "cosine with linear warmup"
    warmup_steps: int = 0
    decay_steps: int = 1
    """Steps from the end of the warm-up until `end_lr`."""


@dataclass(frozen=True)
class Evaluation:
    """When and on what the model is evaluated, and when the run ends."""

    metric: str
    """Name of the quality metric, as results print it."""
    target: float
    """Quality at which the run stops."""
    every_samples: int
    """Training samples between two evaluations."""
    samples: int
    """Held-out samples per evaluation."""
    skip_first: int = 0
    """Evaluations that are due but not made at the start of the run."""
    max_samples: int = 0
    """Training samples after which a run that has not reached its target has failed."""
    average: str = "tokens"
    """Of the loss: over all counted tokens, or `sequences`: of the means of single sequences."""
    higher_is_better: bool = False

    def reached(self, value: float) -> bool:
        """Whether `value` meets the target."""
        return value >= self.target if self.higher_is_better else value <= self.target

    def due(self, before: int, after: int) -> bool:
        """Whether a step from `before` to `after` consumed samples passes an evaluation point."""
        point = after // self.every_samples
        return point > before // self.every_samples and point > self.skip_first


@dataclass(frozen=True)
class Submission:
    """Who submits what, as the result log says it."""

    org: str = "unaffiliated"
    platform: str = "local"
    """Name of the system under test."""
    division: str = "closed"


class ModelConfig(Protocol):
    """What every model's configuration offers without importing torch."""

    def n_params(self) -> int:
        """Trainable and frozen parameters, elements."""
        ...

    def flops_per_sample(self, seq_len: int, frozen: bool = False) -> float:
        """Model FLOP of forward and backward over one sample, recomputation not counted.

        With `frozen` weights the products for weight gradients are left out.
        """
        ...

    def create(self) -> Any:
        """The model, an `nn.Module`, on torch's default device, without meaningful values."""
        ...

    def init_parameter(self, name: str, parameter: Any, seed: int) -> None:
        """Fill one whole parameter of the model, by its name, with its random initial value."""
        ...

    def read_weights(self, path: Path, names: Collection[str], resize_vocab: bool = False) -> Iterator[tuple[str, Any]]:
        """(name, whole tensor) of the parameters `names` from pretrained weights in the format of its field."""
        ...

    def save_weights(self, model: Any, path: Path) -> None:
        """Write the model's weights in the format of its field."""
        ...


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run, resolved."""

    workload: str
    preset: str
    round: str
    """The MLPerf Training round whose rules hold, such as v5.1."""
    model: Any
    data: Data
    optim: Optim
    evaluation: Evaluation
    plan: Plan = field(default_factory=Plan)
    init: Init = field(default_factory=Init)
    lora: Lora | None = None
    seed: int = 1
    threads: int | None = None
    """CPU threads of each rank; None to choose at the start of the run (`train/threads.py`)."""
    lanes: int | None = None
    """Parts of a micro batch that run side by side on one rank's threads; None to choose with the threads."""
    max_steps: int | None = None
    """Optimizer steps after which to stop, target or not."""
    checkpoint_every: int = 0
    """Optimizer steps between two checkpoints; 0 for none."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay on disk."""
    submission: Submission = field(default_factory=Submission)

    @property
    def official(self) -> bool:
        """Whether the run goes by a round's closed-division definition."""
        return self.preset == "official"

    @property
    def flops_per_step(self) -> float:
        """Model FLOP of one optimizer step over all ranks."""
        return self.plan.gbs * float(self.model.flops_per_sample(self.data.seq_len, frozen=self.lora is not None))


def replace(config: T, **changes: Any) -> T:
    """A copy of a frozen configuration with the named fields changed."""
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


# ---- overrides: --set optim.base_lr=3e-4 ---------------------------------------------------------


def override(config: T, dotted: str, text: str, where: str | None = None) -> T:
    """A copy of `config` with the field at `dotted` set to `text`, read as that field's type.

    `none` clears a group that may be absent. Raises UserError, naming `where`, when there is no such
    field or the text does not fit its type.
    """
    where = where or f"--set {dotted}"
    head, _, rest = dotted.partition(".")
    hints = _hints(type(config))
    if head not in hints:
        raise UserError(f"{where}: {type(config).__name__} has no {head!r}; it has {', '.join(hints)}")
    old = getattr(config, head)
    if rest:
        if not dataclasses.is_dataclass(old):
            raise UserError(f"{where}: {head} is {old!r} and has no fields of its own")
        return replace(config, **{head: override(old, rest, text, where)})
    group: Any = _dataclass_in(hints[head]) or (type(old) if dataclasses.is_dataclass(old) else None)
    if group is not None:
        if type(None) in typing.get_args(hints[head]) and text.lower() == "none":
            return replace(config, **{head: None})
        prefix = where.removeprefix("--set ")
        inner = ", ".join(f"{prefix}.{f.name}" for f in dataclasses.fields(group))
        raise UserError(f"{where}: is a group; set one of {inner}")
    return replace(config, **{head: parse(text, hints[head], where)})


def parse(text: str, hint: Any, where: str) -> Any:
    """`text` as a value of type `hint`. Raises UserError naming `where`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in args and text.lower() in ("none", "null", ""):
            return None
        return parse(text, next(a for a in args if a is not type(None)), where)
    if origin is tuple:
        return tuple(parse(part.strip(), args[0], where) for part in text.split(",") if part.strip())
    try:
        if hint is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if hint is int:
            return int(text) if text.lstrip("+-").isdigit() else _whole(float(text))
        if hint is float:
            value = float(text)
            if not math.isfinite(value):
                raise ValueError
            return value
    except (ValueError, KeyError, OverflowError):
        raise UserError(f"{where}={text}: needs {_article(hint.__name__)}") from None
    if hint is str or hint is Any:
        return text
    raise UserError(f"{where}: cannot be set from the command line")


def _whole(value: float) -> int:
    """1e3 -> 1000. Raises ValueError for what is no whole number."""
    if not value.is_integer():
        raise ValueError
    return int(value)


def _article(type_name: str) -> str:
    return {"int": "a whole number", "float": "a finite number", "bool": "true or false"}.get(type_name, type_name)


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


# ---- dump and load -------------------------------------------------------------------------------


def dump(config: Any) -> dict[str, Any]:
    """The configuration as plain JSON values; the model carries its type's name."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            out[f.name] = dump(value)
            if _hints(type(config))[f.name] is Any:
                out[f.name] = {"type": f"{type(value).__module__}:{type(value).__qualname__}", **out[f.name]}
        else:
            out[f.name] = list(value) if isinstance(value, tuple) else value
    return out


def load(values: dict[str, Any], cls: Any = RunConfig) -> Any:
    """The configuration that `dump` wrote. Raises UserError on fields that do not belong."""
    values = dict(values)
    named = values.pop("type", None)
    if named:
        module, _, name = named.partition(":")
        if not module.startswith("timetrial."):
            raise UserError(f"configuration names the type {named!r}, which is not part of this package")
        cls = getattr(importlib.import_module(module), name)
    hints = _hints(cls)
    unknown = sorted(set(values) - {f.name for f in dataclasses.fields(cls)})
    if unknown:
        raise UserError(f"configuration has unknown fields for {cls.__name__}: {', '.join(unknown)}")
    kwargs = {}
    for key, value in values.items():
        if isinstance(value, dict):
            kwargs[key] = load(value, _dataclass_in(hints[key]))
        else:
            kwargs[key] = tuple(value) if isinstance(value, list) else value
    return cls(**kwargs)


def _dataclass_in(hint: Any) -> Any:
    options = [hint, *typing.get_args(hint)]
    return next((o for o in options if dataclasses.is_dataclass(o)), None)


def dumps(config: Any) -> str:
    """`dump` as indented JSON text."""
    return json.dumps(dump(config), indent=2) + "\n"
