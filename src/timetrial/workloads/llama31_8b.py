"""Llama 3.1 8B, pretrained from random weights on C4 to a validation log perplexity of 3.3.

The closed division leaves global batch size, base learning rate and warm-up free. Their values here
are those of the reference convergence points (RCPs), so that a run can be held against them. What
the rounds differ in, and where rules, checker and reference disagree: docs/recipes.md.
"""

from __future__ import annotations

import math

from timetrial.config import Data, Evaluation, Init, Optim, Plan, RunConfig
from timetrial.errors import UserError
from timetrial.models.layers.config import RopeScaling
from timetrial.models.llama.config import LlamaConfig
from timetrial.workloads.workload import Workload

MAX_STEPS = 1_200_000

# GBS -> (base learning rate, warm-up in samples). The file says 16348 for GBS 96, most likely 16384
# with two digits swapped; both give 171 steps.
RCP_RECIPES = {
    16: (4e-4, 256),
    32: (8e-4, 4096),
    64: (8e-4, 6144),
    96: (1e-3, 16348),
    128: (2e-3, 32768),
}

MODEL = LlamaConfig(
    vocab_size=128_256,
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim=14_336,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192),
    norm_eps=1e-5,
    tied=False,
    init_std=0.02,
)


def recipe(gbs: int) -> tuple[float, int]:
    """(base learning rate, warm-up steps) at `gbs`: of the RCP there, else of the nearest smaller RCP.

    Between two RCPs the rules leave both free; the smaller one's learning rate is the safer guess.
    """
    known = max((size for size in RCP_RECIPES if size <= gbs), default=min(RCP_RECIPES))
    base_lr, warmup_samples = RCP_RECIPES[known]
    return base_lr, math.ceil(warmup_samples / gbs)


def official(round_: str, gbs: int | None) -> RunConfig:
    """The closed-division definition of `round_` at global batch size `gbs` (32 when None)."""
    gbs = 32 if gbs is None else gbs
    if gbs < 1:
        raise UserError(f"llama31_8b: global batch size {gbs} must be at least 1; RCPs exist for {sorted(RCP_RECIPES)}")
    base_lr, warmup_steps = recipe(gbs)
    return RunConfig(
        workload="llama31_8b",
        preset="official",
        round=round_,
        model=MODEL,
        data=Data(source="c4", seq_len=8192, tokenizer="llama-3.1-8b"),
        optim=Optim(
            name="adamw",
            base_lr=base_lr,
            end_lr=0.1 * base_lr,
            beta1=0.9,
            beta2=0.95,
            eps=1e-5,
            weight_decay=0.1,
            decay_norms=False,
            clip_norm=1.0,
            schedule="cosine with linear warmup",
            warmup_steps=warmup_steps,
            decay_steps=MAX_STEPS - warmup_steps,
        ),
        evaluation=Evaluation(
            metric="log perplexity",
            target=3.3,
            every_samples=math.ceil(12_288 / gbs) * gbs,
            samples=1024,
            skip_first=0,
            max_samples=MAX_STEPS * gbs,
        ),
        plan=Plan(gbs=gbs, precision="bf16"),
        init=Init(kind="random"),
        checkpoint_every=500,
    )


RULES = "mlcommons/training_policies training_rules.adoc (v5.1, v6.0)"
REFERENCE = "mlcommons/training small_llm_pretraining/nemo"
RULESET = "mlperf-logging 4.1.68 compliance_checker/training_{5.1.0,6.0.0,6.1.0}/closed_llama31_8b.yaml"
RCP = "mlperf-logging 4.1.68 rcp_checker/training_{5.1.0,6.0.0,6.1.0}/rcps_llama31_8b.json"
NEMO_MODEL = "NVIDIA/NeMo nemo/collections/llm/gpt/model/llama.py Llama31Config8B"
NEMO_OPTIM = "NVIDIA/NeMo nemo/collections/llm/recipes/optim/adam.py"

PROVENANCE = {
    "model.vocab_size": f"{REFERENCE}/README.md: Llama 3.1 8B tokenizer, 128,256 ids; no padding",
    "model.dim": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.n_layers": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.n_heads": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.n_kv_heads": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.ffn_dim": f"{REFERENCE}/README.md; {NEMO_MODEL}",
    "model.rope_theta": NEMO_MODEL,
    "model.rope_scaling": f"{NEMO_MODEL}: Llama31Config stretches the frequencies also at 8,192 tokens",
    "model.norm_eps": NEMO_MODEL,
    "model.tied": NEMO_MODEL,
    "model.init_std": NEMO_MODEL,
    "init.kind": f"{REFERENCE}/README.md: from random weights",
    "data.source": f"{REFERENCE}/pretrain_llama31.py get_data: C4 en 3.0.1, c4-train.en_6 = files 768 to 895, shuffled",
    "data.seq_len": f"{RULES}; {RULESET}",
    "data.tokenizer": f"{REFERENCE}/README.md",
    "optim.name": RULESET,
    "optim.base_lr": f"{RCP}: opt_base_learning_rate of the batch size (free in the rules)",
    "optim.end_lr": f"{RULES}: 0.1 x base (v6.0 also allows 4e-5)",
    "optim.beta1": RULESET,
    "optim.beta2": RULESET,
    "optim.eps": RULESET,
    "optim.weight_decay": RULESET,
    "optim.decay_norms": "NVIDIA/Megatron-LM megatron/core/optimizer/__init__.py: one-dimensional ones do not decay",
    "optim.clip_norm": RULESET,
    "optim.schedule": f"{RULESET}; {NEMO_OPTIM}: CosineAnnealing",
    "optim.warmup_steps": f"{RCP}: opt_learning_rate_warmup_samples over GBS (free in the rules)",
    "optim.decay_steps": f"{RULES}; {RULESET}: 1,200,000 - warm-up",
    "evaluation.target": RULESET,
    "evaluation.every_samples": f"{RULES}: 12,288, rounded up to whole batches",
    "evaluation.average": f"{REFERENCE}: Megatron averages the loss over all tokens",
    "evaluation.samples": RULESET,
    "evaluation.skip_first": f"{RULES}: none",
    "evaluation.max_samples": f"{RULESET}: max_steps 1,200,000",
    "plan.gbs": f"{REFERENCE}/config_H200_1x8x1_8b.sh: 32 (free in the rules)",
}


def mini() -> RunConfig:
    """The same code on a small model and small text; target and spread: docs/convergence.md."""
    return RunConfig(
        workload="llama31_8b",
        preset="mini",
        round="v6.0",
        model=LlamaConfig(vocab_size=2048, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=448),
        data=Data(source="sotu", seq_len=128, tokenizer="sotu-2048"),
        optim=Optim(base_lr=3e-3, end_lr=3e-4, warmup_steps=50, decay_steps=700),
        evaluation=Evaluation(
            metric="log perplexity", target=4.3, every_samples=400, samples=256, max_samples=8 * 1200
        ),
        plan=Plan(mbs=8, gbs=8, precision="fp32"),
        checkpoint_every=100,
    )


WORKLOAD = Workload(
    name="llama31_8b",
    title="Llama 3.1 8B, pretraining on C4",
    rounds=("v5.1", "v6.0", "v6.1"),
    official=official,
    mini=mini,
    provenance=PROVENANCE,
    mini_note="State of the Union addresses, whole addresses held out",
)
