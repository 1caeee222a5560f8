"""A Llama's `config.json` in Hugging Face form, to and from `LlamaConfig`; without torch.

Two layouts of the rotary settings are read: `rope_theta` beside `rope_scaling` (transformers 4) and both
in `rope_parameters` (transformers 5). The first is written, for both generations read it.

What this model cannot do is refused instead of ignored: biases, other activations, head sizes and
frequency stretches, quantized weights. Also read is the MLPerf LoRA reference's `custom_llama`, which is a
Llama whose query, key and value are stored as one matrix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timetrial.errors import UserError
from timetrial.models.layers.config import RopeScaling
from timetrial.models.llama.config import LlamaConfig

FILE = "config.json"

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "custom_llama": "CustomLlamaForCausalLM"}

# key -> the values that mean what this model does; an absent key means the first
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
}


def read_config(directory: Path) -> LlamaConfig:
    """The model that the checkpoint in `directory` holds. Raises UserError when it is no such Llama."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; give one with config.json and *.safetensors")
    return from_hf(read_json(directory / FILE), directory / FILE)


def from_hf(values: Mapping[str, Any], where: object = FILE) -> LlamaConfig:
    """`values` of a config.json as ours. Raises UserError that begins with `where`."""
    kind = values.get("model_type")
    if kind not in _ARCHITECTURES:
        raise UserError(f"{where}: model_type is {kind!r}; only Llama (model_type 'llama') can be read")
    architectures = values.get("architectures") or [_ARCHITECTURES[kind]]
    if _ARCHITECTURES[kind] not in architectures:
        raise UserError(f"{where}: architectures is {', '.join(architectures)}; needs {_ARCHITECTURES[kind]}")
    for key, allowed in _ONLY.items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(f"{where}: {key} is {values[key]!r}; only {allowed[0]!r} is supported")
    n_heads, dim = _whole(values, "num_attention_heads", where), _whole(values, "hidden_size", where)
    if dim % n_heads:
        raise UserError(f"{where}: hidden_size {dim} is not a multiple of num_attention_heads {n_heads}")
    head_dim = values.get("head_dim")
    if head_dim not in (None, dim // n_heads):
        raise UserError(f"{where}: head_dim is {head_dim}; only hidden_size / num_attention_heads = {dim // n_heads}")
    theta, scaling = _rope(values, where)
    return LlamaConfig(
        vocab_size=_whole(values, "vocab_size", where),
        dim=dim,
        n_layers=_whole(values, "num_hidden_layers", where),
        n_heads=n_heads,
        n_kv_heads=_whole(values, "num_key_value_heads", where, n_heads),
        ffn_dim=_whole(values, "intermediate_size", where),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        tied=bool(values.get("tie_word_embeddings", False)),
        init_std=float(values.get("initializer_range", 0.02)),
    )


def to_hf(config: LlamaConfig, dtype: str, max_len: int | None = None) -> dict[str, Any]:
    """The content of config.json.

    dtype: name of the weights' type, such as `bfloat16`. max_len: longest context in tokens, which only
    other software heeds; None for what the rotary settings were made for.
    """
    scaling = config.rope_scaling
    if max_len is None:
        max_len = int(scaling.factor * scaling.original_max_len) if scaling else 8192
    return {
        "architectures": [_ARCHITECTURES["llama"]],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "initializer_range": config.init_std,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": max_len,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "num_key_value_heads": config.n_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None
        if scaling is None
        else {
            "factor": scaling.factor,
            "high_freq_factor": scaling.high_freq_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "original_max_position_embeddings": scaling.original_max_len,
            "rope_type": "llama3",
        },
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,  # its name in transformers 4
        "vocab_size": config.vocab_size,
    }


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises UserError when there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a Hugging Face directory has one beside its *.safetensors") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); fetch it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object; fetch it again")
    return values


def _rope(values: Mapping[str, Any], where: object) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) out of either layout."""
    settings = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    theta = float(settings.get("rope_theta", values.get("rope_theta", 10_000.0)))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{where}: rope type is {kind!r}; only 'default' and 'llama3' are supported")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in settings]
    if missing:
        raise UserError(f"{where}: the llama3 rope settings lack {', '.join(missing)}")
    factor, low, high, original = (settings[name] for name in names)
    return theta, RopeScaling(float(factor), float(low), float(high), int(original))


def _whole(values: Mapping[str, Any], key: str, where: object, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: {key} is {value!r}; needs a whole number of at least 1")
    return value
