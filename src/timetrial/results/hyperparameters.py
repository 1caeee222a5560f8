"""A configuration in the words of the result log.

The keys are those of the rulesets 5.0.0 to 6.1.0 of mlperf-logging 4.1.68. A ruleset ignores keys that it
does not know, so all are written whatever the round: a log of one round can be checked by another.
"""

from __future__ import annotations

from typing import Any

from mlperf_logging.mllog import constants as keys

from timetrial.config import RunConfig

PRECISION_NAMES = {"fp32": "fp32", "bf16": "bfloat16"}
"""A plan's precision -> its name in the rules; others are the same in both."""


def hyperparameters(config: RunConfig, train_samples: int, world_size: int = 1) -> dict[str, Any]:
    """Key -> value, in an order that the checkers accept: batch size and warm-up before what hangs on them."""
    plan, optim, evaluation = config.plan, config.optim, config.evaluation
    precision = PRECISION_NAMES.get(plan.precision, plan.precision)
    schedule_steps = optim.warmup_steps + optim.decay_steps
    values: dict[str, Any] = {
        keys.SEED: config.seed,
        keys.GLOBAL_BATCH_SIZE: plan.gbs,
        keys.GRADIENT_ACCUMULATION_STEPS: plan.grad_accumulation_steps,
        keys.MAX_SEQUENCE_LENGTH: config.data.seq_len,
        keys.TRAIN_SAMPLES: train_samples,
        keys.EVAL_SAMPLES: evaluation.samples,
        keys.MAX_STEPS: schedule_steps,
        keys.OPT_NAME: optim.name,
        keys.OPT_BASE_LR: optim.base_lr,
        keys.OPT_END_LR: optim.end_lr,
        keys.OPT_LR_WARMUP_STEPS: optim.warmup_steps,
        keys.OPT_LR_DECAY_STEPS: optim.decay_steps,
        keys.OPT_LR_DECAY_SCHEDULE: "cosine with linear warmup",  # the checkers' only word for both of ours
        keys.OPT_ADAMW_BETA_1: optim.beta1,
        keys.OPT_ADAMW_BETA_2: optim.beta2,
        keys.OPT_ADAMW_EPSILON: optim.eps,
        keys.OPT_ADAMW_WEIGHT_DECAY: optim.weight_decay,
        keys.OPT_GRADIENT_CLIP_NORM: optim.clip_norm,
        keys.INIT_CHECKPOINT_STEP: 0,
    }
    if config.lora is not None:
        values |= {
            keys.OPT_LR_TRAINING_STEPS: schedule_steps,
            keys.OPT_LR_WARMUP_FACTOR: optim.warmup_steps / schedule_steps,
            "lora_rank": config.lora.rank,  # mllog has no constant for it
            keys.LORA_ALPHA: config.lora.alpha,
        }
    return values | {
        keys.LOWEST_NUMERICAL_PRECISION_IN_LINEAR: precision,
        keys.LOWEST_NUMERICAL_PRECISION_IN_ATTN: precision,
        keys.LOWEST_NUMERICAL_PRECISION_IN_COMM: precision,  # weights and activations travel in it
        keys.TENSOR_PARALLELISM: plan.tp,
        keys.PIPELINE_PARALLELISM: plan.pp,
        keys.CONTEXT_PARALLELISM: plan.cp,
        keys.EXPERT_PARALLELISM: plan.ep,
        keys.MICRO_BATCH_SIZE: plan.mbs,
        keys.CONFIG_FILENAME: "config.json",
        "world_size": world_size,
        "model_parameters": config.model.n_params(),
    }
