"""Low-rank adapters, put on a finished model from outside (Hu et al. 2021, arXiv:2106.09685).

    y = W x + (alpha / r) B A dropout(x),   A [r, inputs], B [outputs, r]

W is frozen. A starts uniform in +-1/sqrt(inputs) (Kaiming's rule with a = sqrt 5, as in Hugging Face
PEFT, which the MLPerf reference uses) and B at zero, so that training starts from the pretrained model.

`apply` puts a `LoraLinear` in the place of each target; `merge` folds them back into plain layers.
Adapters are saved alone in PEFT's files and under its names. PEFT itself is not used: it wraps
transformers' modules, while ours must stay plain enough to be cut over ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from timetrial.config import Lora
from timetrial.errors import UserError
from timetrial.models.files import cannot_write, flush, write_tensors, write_text
from timetrial.models.llama.hf import whole
from timetrial.models.llama.hf_config import read_json
from timetrial.models.llama.hf_names import hf_name, plain_name
from timetrial.models.lora_targets import adapted, lora_params
from timetrial.seeding import stream

__all__ = [
    "LoraLinear", "SharedDown", "adapter_state", "apply", "init_adapters", "init_parameter", "is_adapter",
    "load_adapters", "lora_params", "merge", "plain_name", "save_adapters",
]  # fmt: skip

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


class LoraLinear(nn.Module):
    """A linear layer and the adapter beside it.

    `lora_a` is None in all but the first layer of a group that shares one A; those must be given A x.
    """

    def __init__(self, base: nn.Linear, lora: Lora, shares_a: bool = False) -> None:
        super().__init__()
        self.base = base
        self.lora = lora
        weight = base.weight
        self.lora_a = None if shares_a else nn.Parameter(weight.new_empty(lora.rank, base.in_features))
        self.lora_b = nn.Parameter(weight.new_empty(base.out_features, lora.rank))
        self.dropout = nn.Dropout(lora.dropout)

    @property
    def scale(self) -> float:
        return self.lora.alpha / self.lora.rank

    def down(self, x: Tensor) -> Tensor:
        """A dropout(x): [..., inputs] -> [..., r]. Dropout draws from torch's generator of x's device."""
        assert self.lora_a is not None, "this layer shares another's A; ask that one"
        x = self.dropout(x)
        return F.linear(x.to(self.lora_a.dtype), self.lora_a)

    def forward(self, x: Tensor, down: Tensor | None = None) -> Tensor:
        """[..., inputs] -> [..., outputs]; `down` is A dropout(x) where it is known already."""
        y: Tensor = self.base(x)
        down = self.down(x) if down is None else down
        # scaled while it is narrow; the adapter computes in its own type, the result is in the layer's
        return y + F.linear(self.scale * down, self.lora_b).to(y.dtype)


class SharedDown(nn.Module):
    """Stands in for a model's `Projections` where they share one A: computes A x once for all of them.

    So the three see the same dropped elements, as one layer would. `plain` is what it stands in for.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """[B, T, D] and the layers, of which the first holds A -> the output of each."""
        first = layers[0]
        assert isinstance(first, LoraLinear)
        down = first.down(x)
        return tuple(layer(x, down) for layer in layers)


# ---- on and off ----------------------------------------------------------------------------------


def apply(model: nn.Module, lora: Lora, seed: int) -> None:
    """Freeze `model` and give the layers that `lora.targets` names an adapter, in place.

    On the meta device the adapters are left without values; `init_adapters` gives them some later.
    Raises UserError on a setting that cannot work.
    """
    _validate(lora)
    if _adapters(model):
        raise UserError("the model has adapters already; merge them first")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    groups = adapted(layers, lora.targets)
    embedding = getattr(getattr(model, "embed", None), "weight", None)
    for name in (name for group in groups for name in group):
        if layers[name].weight is embedding:
            raise UserError(f"lora.targets: {name} shares its weight with the embedding and cannot have an adapter")
    model.requires_grad_(False)
    for group in groups:
        for i, name in enumerate(group):
            model.set_submodule(name, LoraLinear(layers[name], lora, shares_a=i > 0).train(model.training))
        if len(group) > 1:
            projections = f"{group[0].rpartition('.')[0]}.qkv"
            model.set_submodule(projections, SharedDown(model.get_submodule(projections)))
    if not any(p.is_meta for p in model.parameters()):
        init_adapters(model, seed)


def is_adapter(name: str) -> bool:
    """Whether the parameter called `name` belongs to an adapter."""
    return name.endswith((".lora_a", ".lora_b"))


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Fill every adapter, each A from a stream of its own: the same whatever is adapted besides."""
    for name, layer in _adapters(model).items():
        init_parameter(f"{name}.lora_b", layer.lora_b, seed)
        if layer.lora_a is not None:
            init_parameter(f"{name}.lora_a", layer.lora_a, seed)


@torch.no_grad()
def init_parameter(name: str, parameter: Tensor, seed: int) -> None:
    """Fill one whole A or B, which is called `name` in the model."""
    if name.endswith("lora_b"):
        parameter.zero_()
        return
    bound = 1.0 / math.sqrt(parameter.shape[1])
    generator = torch.Generator(parameter.device).manual_seed(stream(seed, plain_name(name)))
    parameter.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add (alpha / r) B A to the weights, in float32, and put the plain layers back, in place, still frozen."""
    for (name, layer), lora_a in zip(_adapters(model).items(), _down_matrices(model), strict=True):
        change = layer.scale * (layer.lora_b.float() @ lora_a.float())
        layer.base.weight.copy_(layer.base.weight.float() + change)
        model.set_submodule(name, layer.base)
    for name, module in list(model.named_modules()):
        if isinstance(module, SharedDown):
            model.set_submodule(name, module.plain)


def _validate(lora: Lora) -> None:
    if lora.rank < 1:
        raise UserError(f"lora.rank={lora.rank}: must be at least 1")
    if not 0.0 <= lora.dropout < 1.0:
        raise UserError(f"lora.dropout={lora.dropout}: must be at least 0 and below 1")


def _adapters(model: nn.Module) -> dict[str, LoraLinear]:
    """Layers with adapters by the names under which they lie in the model, in its order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def _down_matrices(model: nn.Module) -> list[Tensor]:
    """The A of every layer with an adapter; those that share one follow its holder in the model's order."""
    found: list[Tensor] = []
    for layer in _adapters(model).values():
        found.append(layer.lora_a if layer.lora_a is not None else found[-1])
    return found


# ---- files ---------------------------------------------------------------------------------------


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters under PEFT's names, copied to the CPU, a shared A once for each layer that uses it.

    Sharded adapters are gathered: a collective, so every rank must call this.
    """
    state = {}
    for (name, layer), lora_a in zip(_adapters(model).items(), _down_matrices(model), strict=True):
        for key, value in (("lora_A", lora_a), ("lora_B", layer.lora_b)):
            state[_peft_name(name, key)] = whole(value).detach().cpu().clone()
    return state


def save_adapters(model: nn.Module, directory: Path | str, state: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapters alone, as PEFT's adapter_model.safetensors and adapter_config.json.

    Each file is replaced whole. `state` is what `adapter_state` gave, where it was gathered before: for a
    model that lies over several ranks, on all of them, and for pipeline stages put together.
    Raises UserError when the model has no adapters or the directory cannot be written, RunFailed when the
    disk is full.
    """
    directory, layers = Path(directory), _adapters(model)
    if not layers:
        raise UserError(f"{directory}: the model has no adapters to save")
    lora = next(iter(layers.values())).lora
    tensors = dict(adapter_state(model) if state is None else state)
    settings = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "task_type": "CAUSAL_LM",
    }
    partial = directory / f".adapters.partial-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_tensors(partial, tensors)
        flush(partial)
        partial.replace(directory / WEIGHTS)
        write_text(partial, json.dumps(settings, indent=2) + "\n")
        flush(partial)
        partial.replace(directory / SETTINGS)
        flush(directory)
    except (OSError, SafetensorError) as error:
        raise cannot_write(directory, error) from error
    finally:
        with contextlib.suppress(OSError):  # the first error says what the trouble is
            partial.unlink(missing_ok=True)


@torch.no_grad()
def load_adapters(model: nn.Module, directory: Path | str) -> None:
    """Fill the adapters of `model` from PEFT's files.

    Raises UserError, before anything is changed, unless the files hold exactly the model's adapters with
    its rank and alpha.
    """
    directory, layers = Path(directory), _adapters(model)
    if not layers:
        raise UserError(f"{directory}: the model has no adapters to fill; apply some first")
    _check_settings(read_json(directory / SETTINGS), next(iter(layers.values())).lora, directory / SETTINGS)
    try:
        stored = load_file(directory / WEIGHTS)
    except FileNotFoundError:
        raise UserError(f"{directory / WEIGHTS}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory / WEIGHTS}: is damaged or cut short ({error})") from None
    fills: list[tuple[Tensor, Tensor]] = []
    shared = torch.empty(0)
    for (name, layer), lora_a in zip(layers.items(), _down_matrices(model), strict=True):
        for key, value in (("lora_A", lora_a), ("lora_B", layer.lora_b)):
            theirs = _peft_name(name, key)
            if theirs not in stored:
                raise UserError(f"{directory}: has no tensor {theirs}, which the model needs")
            tensor = stored.pop(theirs)
            if tensor.shape != value.shape:
                raise UserError(
                    f"{directory}: {theirs} has shape {list(tensor.shape)}, the model needs {list(value.shape)}"
                )
            if key == "lora_B" or layer.lora_a is not None:
                fills.append((value, tensor))
            elif not tensor.equal(shared):
                raise UserError(
                    f"{directory}: {theirs} differs from that of q_proj, but wqkv has one for the three; "
                    "set lora.targets=wq,wk,wv"
                )
            shared = tensor if key == "lora_A" else shared
    if stored:
        raise UserError(f"{directory}: has a tensor {min(stored)}, which the model has not; check lora.targets")
    for parameter, tensor in fills:
        parameter.copy_(tensor)


def _check_settings(settings: Mapping[str, Any], lora: Lora, where: Path) -> None:
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type is {settings.get('peft_type')!r}; only 'LORA' can be read")
    for key, ours, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if settings.get(key) != value:
            raise UserError(f"{where}: {key} is {settings.get(key)}, the model's is {value}; set lora.{ours}")
    for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save"):
        if settings.get(key):
            raise UserError(f"{where}: {key} is {settings[key]}; only plain low-rank adapters can be read")
    if settings.get("bias", "none") != "none":
        raise UserError(f"{where}: bias is {settings['bias']!r}; only 'none' can be read")


def _peft_name(name: str, key: str) -> str:
    return f"base_model.model.{hf_name(plain_name(name))}.{key}.weight"
