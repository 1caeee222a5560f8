"""Llama 3.1 405B, pretraining continued from Meta's weights on C4 to a validation log perplexity of 5.6.

Every hyperparameter follows from the global batch size; the rules forbid to borrow or tune any. The
text is cut by the Mixtral 8x22B tokenizer (32,000 ids), whose ids mean nothing to the weights: hence
the high target. How the checkpoint's 128,256 rows become 32,000, and what else is odd: docs/recipes.md.
"""

from __future__ import annotations

import math

from timetrial.config import Data, Evaluation, Init, Optim, Plan, RunConfig
from timetrial.errors import UserError
from timetrial.models.layers.config import RopeScaling
from timetrial.models.llama.config import LlamaConfig
from timetrial.workloads.workload import Workload

BASE_GBS = 1152
BASE_LR = 8e-5
EVAL_EVERY = {"v5.0": 46_080, "v5.1": 18_432, "v6.0": 18_432}

MODEL = LlamaConfig(
    vocab_size=32_000,
    dim=16_384,
    n_layers=126,
    n_heads=128,
    n_kv_heads=8,
    ffn_dim=53_248,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192),
    norm_eps=1e-5,
    tied=False,
    init_std=0.02,
)


def base_learning_rate(gbs: int) -> float:
    """8e-5 * gbs / 1152, in the one order of operations that the compliance checker mostly accepts.

    It compares `rate * 1152 == gbs * 8e-5` exactly. This quotient passes for ten batch sizes in
    eleven, and where it does not, no float passes (`checker_accepts`). The rules' own rounding to the
    8th decimal passes for few, 8e-5 * (gbs / 1152) for half.
    """
    return BASE_LR * gbs / BASE_GBS


def checker_accepts(rate: float, gbs: int) -> bool:
    """The checker's test of the base learning rate (closed_llama31_405b.yaml)."""
    return rate * BASE_GBS == gbs * BASE_LR


def official(round_: str, gbs: int | None) -> RunConfig:
    """The closed-division definition of `round_` at global batch size `gbs` (1,152 when None)."""
    gbs = BASE_GBS if gbs is None else gbs
    if gbs < 1:
        raise UserError(f"llama31_405b: global batch size {gbs} must be at least 1; the rules' range is 1152 to 9216")
    warmup_steps = math.ceil(8000 * BASE_GBS / gbs)
    max_steps = math.ceil(1_200_000 * BASE_GBS / gbs)
    return RunConfig(
        workload="llama31_405b",
        preset="official",
        round=round_,
        model=MODEL,
        data=Data(source="c4", seq_len=8192, tokenizer="mixtral-8x22b"),
        optim=Optim(
            name="adamw",
            base_lr=base_learning_rate(gbs),
            end_lr=8e-7,
            beta1=0.9,
            beta2=0.95,
            eps=1e-5,
            weight_decay=0.1,
            decay_norms=False,
            clip_norm=1.0,
            schedule="cosine with linear warmup",
            warmup_steps=warmup_steps,
            decay_steps=max_steps - warmup_steps,
        ),
        evaluation=Evaluation(
            metric="log perplexity",
            target=5.6,
            every_samples=math.ceil(EVAL_EVERY[round_] / gbs) * gbs,
            samples=5760,
            skip_first=0 if round_ == "v5.0" else math.floor(0.0026 * gbs + 12),
            max_samples=max_steps * gbs,
        ),
        plan=Plan(gbs=gbs, precision="bf16"),
        init=Init(kind="hf", resize_vocab=True),
        checkpoint_every=20,
    )


RULES = "mlcommons/training_policies training_rules.adoc (v5.0, v5.1, v6.0)"
REFERENCE = "mlcommons/training large_language_model_pretraining/nemo"
RULESET = "mlperf-logging 4.1.68 compliance_checker/training_{5.0.0,5.1.0,6.0.0}/closed_llama31_405b.yaml"
NEMO_MODEL = "NVIDIA/NeMo nemo/collections/llm/gpt/model/llama.py Llama31Config405B"
NEMO_OPTIM = "NVIDIA/NeMo nemo/collections/llm/recipes/optim/adam.py"

PROVENANCE = {
    "model.vocab_size": f"{REFERENCE}/README.md: Mixtral 8x22B tokenizer; NeMo pads to 32,768 at TP 8",
    "model.dim": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.n_layers": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.n_heads": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.n_kv_heads": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.ffn_dim": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.rope_theta": NEMO_MODEL,
    "model.rope_scaling": f"{NEMO_MODEL}: Llama31Config stretches the frequencies also at 8,192 tokens",
    "model.norm_eps": NEMO_MODEL,
    "model.tied": NEMO_MODEL,
    "init.kind": f"{REFERENCE}/README.md: the BF16 weights of meta-llama/Llama-3.1-405B",
    "data.source": f"{REFERENCE}/README.md: C4 en 3.0.1, shards 768 to 1,023, shuffled",
    "data.seq_len": f"{RULES}; {RULESET}",
    "data.tokenizer": f"{REFERENCE}/README.md",
    "optim.name": RULESET,
    "optim.base_lr": f"{RULES}; {RULESET}: 8e-5 x GBS / 1152",
    "optim.end_lr": f"{RULES}; {REFERENCE}/pretrain_llama31.py",
    "optim.beta1": RULESET,
    "optim.beta2": RULESET,
    "optim.eps": RULESET,
    "optim.weight_decay": RULESET,
    "optim.decay_norms": "NVIDIA/Megatron-LM megatron/core/optimizer/__init__.py: one-dimensional ones do not decay",
    "optim.clip_norm": RULESET,
    "optim.schedule": f"{RULESET}; {NEMO_OPTIM}: CosineAnnealing",
    "optim.warmup_steps": f"{RULES}: ceil(8000 x 1152 / GBS)",
    "optim.decay_steps": f"{RULES}; {RULESET}: ceil(1,200,000 x 1152 / GBS) - warm-up",
    "evaluation.target": RULESET,
    "evaluation.every_samples": f"{RULES}: v5.0 46,080, later 18,432, rounded up to whole batches",
    "evaluation.average": f"{REFERENCE}: Megatron averages the loss over all tokens",
    "evaluation.samples": RULESET,
    "evaluation.skip_first": f"{RULES}: v5.0 none, later floor(0.0026 x GBS + 12)",
    "evaluation.max_samples": f"{REFERENCE}/pretrain_llama31.py: max_steps, the end of the schedule",
    "plan.gbs": f"{RULES}: 1,152 to 9,216; {REFERENCE}/config.sh: 1,152",
}


MINI_MODEL = LlamaConfig(vocab_size=2048, dim=128, n_layers=6, n_heads=8, n_kv_heads=2, ffn_dim=416)


def mini() -> RunConfig:
    """Continued pretraining on the addresses since 1900, from a base that has read those before."""
    return RunConfig(
        workload="llama31_405b",
        preset="mini",
        round="v6.0",
        model=MINI_MODEL,
        data=Data(source="sotu-since-1900", seq_len=128, tokenizer="sotu-2048"),
        optim=Optim(base_lr=3e-3, end_lr=3e-4, warmup_steps=20, decay_steps=580),
        evaluation=Evaluation(
            metric="log perplexity", target=4.55, every_samples=320, samples=256, skip_first=2, max_samples=8 * 600
        ),
        plan=Plan(mbs=8, gbs=8, precision="fp32"),
        init=Init(kind="base"),
        checkpoint_every=50,
    )


def mini_base() -> RunConfig:
    """The pretraining that the mini goes on from."""
    return RunConfig(
        workload="llama31_405b",
        preset="mini",
        round="v6.0",
        model=MINI_MODEL,
        data=Data(source="sotu-before-1900", seq_len=128, tokenizer="sotu-2048"),
        optim=Optim(base_lr=5e-3, end_lr=5e-4, warmup_steps=30, decay_steps=370),
        evaluation=Evaluation(metric="log perplexity", target=5.1, every_samples=400, samples=256, max_samples=8 * 600),
        plan=Plan(mbs=8, gbs=8, precision="fp32"),
    )


WORKLOAD = Workload(
    name="llama31_405b",
    title="Llama 3.1 405B, continued pretraining on C4",
    rounds=("v5.0", "v5.1", "v6.0"),
    official=official,
    mini=mini,
    mini_base=mini_base,
    provenance=PROVENANCE,
    mini_note="State of the Union addresses since 1900, from a base pretrained on those before",
)
