"""Llama 2 70B, low-rank adapters trained on SCROLLS GovReport to an evaluation loss of 0.925.

The closed division leaves global batch size, base learning rate, warm-up and the number of training
steps free. Their values here are those of the reference convergence points (RCPs). What the rounds
differ in, and where rules, checker and reference disagree: docs/recipes.md.
"""

from __future__ import annotations

import math

from timetrial.config import Data, Evaluation, Init, Lora, Optim, Plan, RunConfig
from timetrial.errors import UserError
from timetrial.models.llama.config import LlamaConfig
from timetrial.workloads.workload import Workload

TRAINING_STEPS = 1024

# GBS -> base learning rate
RCP_RATES = {8: 4e-4, 16: 4e-4, 32: 4e-4, 128: 1e-3}

MODEL = LlamaConfig(
    vocab_size=32_000,
    dim=8192,
    n_layers=80,
    n_heads=64,
    n_kv_heads=8,
    ffn_dim=28_672,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-5,
    tied=False,
    init_std=0.02,
)


def base_learning_rate(gbs: int) -> float:
    """Of the RCP at `gbs`, else of the nearest smaller RCP (free in the rules)."""
    return RCP_RATES[max((size for size in RCP_RATES if size <= gbs), default=min(RCP_RATES))]


def official(round_: str, gbs: int | None) -> RunConfig:
    """The closed-division definition of `round_` at global batch size `gbs` (8 when None)."""
    gbs = 8 if gbs is None else gbs
    if gbs < 1:
        raise UserError(
            f"llama2_70b_lora: global batch size {gbs} must be at least 1; RCPs exist for {sorted(RCP_RATES)}"
        )
    return RunConfig(
        workload="llama2_70b_lora",
        preset="official",
        round=round_,
        model=MODEL,
        data=Data(source="govreport", seq_len=8192, tokenizer="llama-2"),
        optim=Optim(
            name="adamw",
            base_lr=base_learning_rate(gbs),
            end_lr=0.0,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=1e-4,
            decay_norms=False,
            clip_norm=0.3,
            schedule="cosine with linear warmup from zero",
            warmup_steps=0,
            decay_steps=TRAINING_STEPS,
        ),
        evaluation=Evaluation(
            metric="evaluation loss",
            target=0.925,
            every_samples=math.ceil(384 / gbs) * gbs,
            samples=173,
            skip_first=math.floor(0.125 * gbs + 2),
            max_samples=TRAINING_STEPS * gbs,
            average="sequences",
        ),
        plan=Plan(gbs=gbs, precision="bf16"),
        init=Init(kind="hf"),
        lora=Lora(rank=16, alpha=32.0, dropout=0.1, targets=("wqkv", "wo")),
        checkpoint_every=50,
    )


RULES = "mlcommons/training_policies training_rules.adoc (v5.0, v5.1, v6.0)"
REFERENCE = "mlcommons/training llama2_70b_lora"
RULESET = "mlperf-logging 4.1.68 compliance_checker/training_{5.0.0,5.1.0,6.0.0,6.1.0}/closed_llama2_70b_lora.yaml"
RCP = "mlperf-logging 4.1.68 rcp_checker/training_{5.0.0,5.1.0,6.0.0,6.1.0}/rcps_llama2_70b_lora.json"
SHAPE = f"{REFERENCE}/scripts/regiss_llama_70b_model_config/config.json"
COMMAND = f"{REFERENCE}/run_llama_70B_scrolls_r16.sh"
TRAINER = "huggingface/transformers src/transformers/training_args.py"

PROVENANCE = {
    "model.vocab_size": SHAPE,
    "model.dim": SHAPE,
    "model.n_layers": SHAPE,
    "model.n_heads": SHAPE,
    "model.n_kv_heads": SHAPE,
    "model.ffn_dim": SHAPE,
    "model.rope_theta": SHAPE,
    "model.rope_scaling": f"{SHAPE}: none, though 8,192 tokens are twice the context of Llama 2",
    "model.norm_eps": SHAPE,
    "model.tied": SHAPE,
    "init.kind": f"{REFERENCE}/README.md: Llama 2 70B with fused q, k, v",
    "data.source": f"{REFERENCE}/scripts/utils.py: SCROLLS gov_report, packed",
    "data.seq_len": f"{COMMAND}; the rules' table says 8196, a slip",
    "data.tokenizer": f"{REFERENCE}/scripts/utils.py",
    "optim.name": f"{REFERENCE}/scripts/train.py: adamw_torch",
    "optim.base_lr": f"{RCP}: opt_base_learning_rate of the batch size (free in the rules)",
    "optim.end_lr": f"{COMMAND}: lr_scheduler_type cosine, which ends at 0",
    "optim.beta1": TRAINER,
    "optim.beta2": TRAINER,
    "optim.eps": TRAINER,
    "optim.weight_decay": f"{RULES}; {COMMAND}",
    "optim.decay_norms": "no norm is trained; the adapters' matrices all decay",
    "optim.clip_norm": f"{RULES}; {COMMAND}",
    "optim.schedule": f"{COMMAND}: lr_scheduler_type cosine (transformers' get_cosine_schedule_with_warmup)",
    "optim.warmup_steps": f"{RCP}; {COMMAND}: warmup_ratio 0 (free in the rules)",
    "optim.decay_steps": f"{RCP}; {COMMAND}: max_steps 1024 (free in the rules)",
    "evaluation.target": RULESET,
    "evaluation.every_samples": f"{RULES}: 384, rounded up to whole batches",
    "evaluation.average": f"{REFERENCE}: batches of one sequence, whose mean losses are averaged",
    "evaluation.samples": "packed validation set of the reference: 173 sequences",
    "evaluation.skip_first": f"{RULES}: floor(0.125 x GBS + 2)",
    "evaluation.max_samples": f"{COMMAND}: max_steps 1024",
    "lora.rank": f"{RULESET}; {COMMAND}",
    "lora.alpha": f"{RULES}; {COMMAND}",
    "lora.dropout": f"{RULES}; {COMMAND}",
    "lora.targets": f"{COMMAND}: qkv_proj, o_proj; the reference's q, k and v share one down-projection",
    "plan.gbs": f"{COMMAND}: 8 devices of 1 (free in the rules)",
}


MINI_MODEL = LlamaConfig(
    vocab_size=2048, dim=128, n_layers=4, n_heads=8, n_kv_heads=2, ffn_dim=448, rope_theta=10_000.0
)


def mini() -> RunConfig:
    """Adapters for summary lines of technical text, on a base that has read addresses alone."""
    return RunConfig(
        workload="llama2_70b_lora",
        preset="mini",
        round="v6.0",
        model=MINI_MODEL,
        data=Data(source="synopses", seq_len=256, tokenizer="sotu-2048"),
        optim=Optim(
            base_lr=1e-2,
            end_lr=0.0,
            beta2=0.999,
            eps=1e-8,
            weight_decay=1e-4,
            clip_norm=0.3,
            schedule="cosine with linear warmup from zero",
            decay_steps=400,
        ),
        evaluation=Evaluation(
            metric="evaluation loss",
            target=5.4,
            every_samples=320,
            samples=75,
            skip_first=2,
            max_samples=8 * 400,
            average="sequences",
        ),
        plan=Plan(mbs=8, gbs=8, precision="fp32"),
        init=Init(kind="base"),
        lora=Lora(targets=("wqkv", "wo")),
        checkpoint_every=50,
    )


def mini_base() -> RunConfig:
    """The pretraining whose weights the mini's adapters are trained on."""
    return RunConfig(
        workload="llama2_70b_lora",
        preset="mini",
        round="v6.0",
        model=MINI_MODEL,
        data=Data(source="sotu", seq_len=128, tokenizer="sotu-2048"),
        optim=Optim(base_lr=5e-3, end_lr=5e-4, warmup_steps=30, decay_steps=570),
        evaluation=Evaluation(metric="log perplexity", target=4.9, every_samples=400, samples=256, max_samples=8 * 600),
        plan=Plan(mbs=8, gbs=8, precision="fp32"),
    )


WORKLOAD = Workload(
    name="llama2_70b_lora",
    title="Llama 2 70B, LoRA fine-tuning on GovReport",
    rounds=("v5.0", "v5.1", "v6.0", "v6.1"),
    official=official,
    mini=mini,
    mini_base=mini_base,
    provenance=PROVENANCE,
    mini_note="summary lines of scientific Python, on a base pretrained on State of the Union addresses",
)
