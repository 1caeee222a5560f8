"""Which configuration a benchmark or model of a published table is: those that this package's models can express."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from timetrial.config import Lora, RunConfig, replace
from timetrial.errors import UserError
from timetrial.models.layers.config import RopeScaling
from timetrial.models.llama.config import LlamaConfig
from timetrial.workloads.workload import find, names

_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)

LLAMA3_8B = LlamaConfig(vocab_size=128_256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336)
LLAMA3_70B = LlamaConfig(vocab_size=128_256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672)
LLAMA3_405B = LlamaConfig(
    vocab_size=128_256, dim=16_384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53_248, rope_scaling=_SCALING
)
"""Grattafiori et al. 2024, arXiv:2407.21783, table 3 (layers, dimensions, heads, rope base) and section 3.2
(vocabulary of 128,000 and special tokens, 128,256 rows); meta-llama/Llama-3.1-405B config.json (rope scaling)."""

MODELS: dict[str, tuple[str, LlamaConfig, str]] = {
    "llama38b": ("Llama 3 8B", LLAMA3_8B, "llama31_8b"),
    "llama318b": ("Llama 3.1 8B", replace(LLAMA3_8B, rope_scaling=_SCALING), "llama31_8b"),
    "llama370b": ("Llama 3 70B", LLAMA3_70B, "llama31_8b"),
    "llama3170b": ("Llama 3.1 70B", replace(LLAMA3_70B, rope_scaling=_SCALING), "llama31_8b"),
    "llama3370b": ("Llama 3.3 70B", replace(LLAMA3_70B, rope_scaling=_SCALING), "llama31_8b"),
    "llama3405b": ("Llama 3.1 405B", LLAMA3_405B, "llama31_405b"),
    "llama31405b": ("Llama 3.1 405B", LLAMA3_405B, "llama31_405b"),
}
"""Letters and digits of a model's name -> its title, its shape, and the workload whose recipe is the base."""

TASKS = ("", "pretrain", "pretraining", "train", "training", "sft", "full_sft", "finetune", "finetuning")
ADAPTED = ("lora", "peft")


@dataclass(frozen=True)
class Subject:
    """What a row is about."""

    config: RunConfig
    """At the workload's own batch size."""
    model: str
    """The model's name, for people."""
    converges: bool
    """Whether it is a benchmark with a target."""
    shape: LlamaConfig | None = None
    """The model in place of the workload's."""
    lora: Lora | None = None
    """Adapters in place of the workload's."""

    def at(self, gbs: int) -> RunConfig:
        """The configuration at another global batch size."""
        config = find(self.config.workload).official(self.config.round, gbs)
        if self.shape is not None:
            config = replace(config, model=self.shape, lora=self.lora)
        return config


def subject(benchmark: str, model: str, task: str, round_: str, assumed: list[str]) -> Subject:
    """What `benchmark`, or else `model` with `task`, means. Raises UserError when no workload expresses it."""
    if benchmark:
        return _benchmark(benchmark, round_, assumed)
    if model:
        return _model(model, task)
    raise UserError("no benchmark: fill the column benchmark (or model)")


def _benchmark(benchmark: str, round_: str, assumed: list[str]) -> Subject:
    wanted = _letters(benchmark)
    name = next((name for name in names() if _letters(name) == wanted), None)
    if name is None:
        if wanted in MODELS:
            return _model(benchmark, "")
        raise UserError(f"no workload for {benchmark[:40]} yet; there are {', '.join(names())}")
    workload = find(name)
    rounds = workload.rounds
    asked = _round(round_)
    if not round_:
        used = rounds[-1]
        assumed.append(f"round {used}")
    elif asked is None:
        raise UserError(f"round={round_[:40]}: is not a round such as {rounds[-1]}")
    else:
        used = min(rounds, key=lambda r: abs((_round(r) or 0.0) - asked))
        if _round(used) != asked:
            assumed.append(f"rules of {used}, for {name} is not known in v{asked}")
    return Subject(workload.official(used, None), workload.title.split(",")[0], converges=True)


def _model(model: str, task: str) -> Subject:
    wanted = re.sub(r"\s*\((\d+) layers\)\s*$", "", model, flags=re.IGNORECASE)
    letters = _letters(wanted).removeprefix("meta").removesuffix("instruct")
    if letters not in MODELS:
        raise UserError(f"no workload for {model[:40]} yet")
    kind = task.lower().replace("-", "_")
    if kind not in TASKS + ADAPTED:
        raise UserError(f"no workload for task {task[:40]} yet; there are pretrain, sft and lora")
    title, shape, base = MODELS[letters]
    if layers := re.search(r"\((\d{1,4}) layers\)", model, flags=re.IGNORECASE):
        shape = replace(shape, n_layers=int(layers[1]))
        shape.check()
        title += f" with {layers[1]} layers"
    workload = find(base)
    config: Any = replace(workload.official(workload.rounds[-1], None), model=shape)
    lora = find("llama2_70b_lora").official("v6.0", None).lora if kind in ADAPTED else None
    return Subject(replace(config, lora=lora), title, converges=False, shape=shape, lora=lora)


def _letters(name: str) -> str:
    return re.sub(r"[\s._/-]", "", name.lower())


def _round(text: str) -> float | None:
    match = re.fullmatch(r"(?:training[\s_-]*)?v?(\d+\.\d+)(?:\.0)?", text.lower())
    return float(match[1]) if match else None
