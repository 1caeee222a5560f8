"""Llama weights in Hugging Face form: safetensors, in one file or in shards with an index.

Values pass unchanged, for both turn a head's halves against each other (`layers/rope.py`). Also read is
`self_attn.qkv_proj`, the rows of q, k and v in that order, as in the MLPerf LoRA reference's checkpoint.

Reading and writing hold one tensor, or one shard, beside the model and never a second model; hence not
`safetensors.torch.load_model`, nor transformers, which is a test's oracle and no dependency.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from timetrial.errors import UserError
from timetrial.models.files import new_directory, write_tensors, write_text
from timetrial.models.llama.config import LlamaConfig
from timetrial.models.llama.hf_config import FILE as CONFIG
from timetrial.models.llama.hf_config import read_config, read_json, to_hf
from timetrial.models.llama.hf_names import PARTS, hf_name, plain_name, shapes

__all__ = ["CONFIG", "hf_name", "load", "plain_name", "read_config", "read_tensors", "save", "shapes", "write"]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000

_DTYPES = ("F64", "F32", "F16", "BF16")

# settings that no tensor's shape gives away, but that change what the weights compute
_MEANING = ("n_heads", "n_kv_heads", "rope_theta", "rope_scaling", "norm_eps")


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Source:
    """Where one of our tensors comes from: all rows of a stored one, or some."""

    name: str
    rows: slice | None = None


def load(
    model: nn.Module,
    directory: Path | str,
    *,
    device: torch.device | str = "cpu",
    resize_vocab: bool = False,
    put: Callable[[nn.Parameter, Tensor], None] | None = None,
) -> None:
    """Fill `model`, a Llama or a pipeline stage of one, with the checkpoint in `directory`.

    Parameters keep their type; those on the meta device are made on `device`. Adapters stay as they
    are. `resize_vocab` takes a checkpoint of another vocabulary: rows too many are dropped, missing
    ones are zero. `put` writes a tensor into a parameter in place of a plain copy (sharded parameters).

    Raises UserError, before anything is changed, unless the checkpoint has exactly the tensors of the
    model, in its shapes, and the settings that give them their meaning.
    """
    directory, config = Path(directory), _config(model)
    wanted = {plain_name(name): name for name, _ in model.named_parameters() if ".lora_" not in name}
    for name, tensor in read_tensors(directory, config, wanted, resize_vocab):
        parameter = model.get_parameter(wanted[name])
        with torch.no_grad():
            if put is not None:
                put(parameter, tensor)
            elif parameter.is_meta:
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).copy_(tensor)
                owner, _, leaf = wanted[name].rpartition(".")
                new = nn.Parameter(made, requires_grad=parameter.requires_grad)
                model.get_submodule(owner).register_parameter(leaf, new)
            else:
                parameter.copy_(tensor)
    tie = getattr(model, "tie", None)
    if tie is not None:
        tie()


def read_tensors(
    directory: Path, config: LlamaConfig, names: Collection[str] | None = None, resize_vocab: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) of the checkpoint, file by file; all, or those in `names`.

    A tensor is a view of the file and must be copied before the next is asked for. The whole
    checkpoint is checked against `config` first; errors as in `load`.
    """
    theirs = read_config(directory)
    if theirs.tied != config.tied:
        raise UserError(f"{directory}: the checkpoint's tied is {theirs.tied}, the model's is {config.tied}")
    stored = _stored(directory)
    sources = _sources(config, stored)
    _check(directory, config, stored, sources, resize_vocab)
    for setting in _MEANING:
        if getattr(theirs, setting) != getattr(config, setting):
            raise UserError(
                f"{directory}: the checkpoint's {setting} is {getattr(theirs, setting)}, "
                f"the model's is {getattr(config, setting)}; set model.{setting}"
            )
    if config.tied:
        sources["head.weight"] = sources["embed.weight"]  # of a stage that has a head and no embedding
    by_file: dict[Path, list[str]] = {}
    for name in names if names is not None else shapes(config):
        by_file.setdefault(stored[sources[name].name].file, []).append(name)
    for file, inside in sorted(by_file.items()):
        with _opened(file) as handle:
            for name in inside:
                source = sources[name]
                whole = source.rows is None
                tensor = handle.get_tensor(source.name) if whole else handle.get_slice(source.name)[source.rows]
                if name in ("embed.weight", "head.weight"):
                    tensor = _resized(tensor, config.vocab_size)
                yield name, tensor


def _stored(directory: Path) -> dict[str, _Stored]:
    """Every tensor in the files of a checkpoint, under the name that it has there."""
    if (directory / WEIGHTS).exists():
        files = [directory / WEIGHTS]
    elif (directory / INDEX).exists():
        shards = read_json(directory / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(file, str) for file in shards.values()):
            raise UserError(f"{directory / INDEX}: has no weight_map of tensors to files; fetch it again")
        files = [directory / shard for shard in sorted(set(shards.values()))]
    else:
        raise UserError(f"{directory}: has neither {WEIGHTS} nor {INDEX}; only safetensors can be read")
    found = {}
    for file in files:
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                tensor = handle.get_slice(name)
                found[name] = _Stored(file, tuple(tensor.get_shape()), tensor.get_dtype())
    return found


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except FileNotFoundError:
        raise UserError(f"{file}: no such file, though the index names it; fetch it again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: is damaged or cut short ({error}); fetch it again") from None


def _sources(config: LlamaConfig, stored: Collection[str]) -> dict[str, _Source]:
    kv = config.n_kv_heads * config.head_dim
    ends = {"wq": (0, config.dim), "wk": (config.dim, config.dim + kv), "wv": (config.dim + kv, config.dim + 2 * kv)}
    found = {}
    for name in shapes(config):
        leaf = name.split(".")[-2]
        joined = hf_name(name).replace(f".{PARTS.get(leaf)}.", ".qkv_proj.")
        if leaf in ends and joined in stored:
            found[name] = _Source(joined, slice(*ends[leaf]))
        else:
            found[name] = _Source(hf_name(name))
    return found


def _check(
    directory: Path, config: LlamaConfig, stored: dict[str, _Stored], sources: dict[str, _Source], resize_vocab: bool
) -> None:
    """Raise UserError on the first tensor that is missing, misshapen, of a strange type or unexpected."""
    needed: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes(config).items():
        source = sources[name]
        if source.rows is not None:
            shape = (config.dim + 2 * config.n_kv_heads * config.head_dim, config.dim)
        needed[source.name] = shape
    ends = (hf_name("embed.weight"), hf_name("head.weight"))
    for name, shape in needed.items():
        if name not in stored:
            raise UserError(f"{directory}: has no tensor {name}, which the model needs with shape {list(shape)}")
        found = stored[name].shape
        fits = found[1:] == shape[1:] if resize_vocab and name in ends else found == shape
        if not fits:
            advice = "; resize_vocab takes it all the same" if name in ends and found[1:] == shape[1:] else ""
            raise UserError(f"{directory}: {name} has shape {list(found)}, the model needs {list(shape)}{advice}")
        if stored[name].dtype not in _DTYPES:
            raise UserError(f"{directory}: {name} is of type {stored[name].dtype}; needs one of {', '.join(_DTYPES)}")
    for name, tensor in stored.items():
        # old checkpoints hold the rotary frequencies, tied ones sometimes a copy of the embedding
        ignored = name.endswith("rotary_emb.inv_freq") or (config.tied and name == hf_name("head.weight"))
        if name not in needed and not ignored:
            raise UserError(f"{directory}: has a tensor {name} of shape {list(tensor.shape)}, which the model has not")


def _resized(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] >= rows:
        return tensor[:rows]
    return torch.cat((tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])))


# ---- writing -------------------------------------------------------------------------------------


def save(
    model: nn.Module,
    directory: Path | str,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    max_len: int | None = None,
) -> None:
    """Write the Llama `model` as a checkpoint of type `dtype` (its own when None); see `write`.

    Sharded parameters are gathered one by one: then every rank must call this with a directory of its
    own, or gather by itself and `write` on one.
    """
    parameters = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    if any(".lora_" in name for name in parameters):
        raise UserError(f"{directory}: the model has adapters; merge them first or save them alone")

    def fetch(name: str) -> Tensor:
        return whole(parameters[name])

    write(directory, _config(model), fetch, dtype or parameters["embed.weight"].dtype, shard_bytes, max_len)


@torch.no_grad()
def write(
    directory: Path | str,
    config: LlamaConfig,
    fetch: Callable[[str], Tensor],
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    max_len: int | None = None,
) -> None:
    """Write a checkpoint whose tensors `fetch` gives by our names, asked in the order of `shapes`.

    A file holds at most `shard_bytes`, unless one tensor is larger. The directory appears when it is
    complete. Raises UserError when it exists and is not empty or cannot be written, RunFailed when the
    disk is full.
    """
    size = torch.empty((), dtype=dtype).element_size()
    if not dtype.is_floating_point or shard_bytes < 1:
        raise UserError(f"{directory}: weights cannot be written as {dtype} in shards of {shard_bytes} bytes")
    shards: list[dict[str, int]] = [{}]
    for name, shape in shapes(config).items():
        n_bytes = size * torch.Size(shape).numel()
        if shards[-1] and sum(shards[-1].values()) + n_bytes > shard_bytes:
            shards.append({})
        shards[-1][name] = n_bytes
    with new_directory(Path(directory)) as temporary:
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards):
            file = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys(map(hf_name, shard), file)
            tensors = {hf_name(name): fetch(name).detach().to("cpu", dtype).contiguous() for name in shard}
            write_tensors(temporary / file, tensors)
            del tensors  # before the next shard is gathered
        if len(shards) > 1:
            total = {"total_parameters": config.n_params(), "total_size": config.n_params() * size}
            _write_json(temporary / INDEX, {"metadata": total, "weight_map": weight_map})
        _write_json(temporary / CONFIG, to_hf(config, str(dtype).removeprefix("torch."), max_len))


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered from all ranks where it is sharded (a collective)."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")


def _config(model: nn.Module) -> LlamaConfig:
    config = model.config
    assert isinstance(config, LlamaConfig)
    return config
