"""Learning rate of an optimizer step, as the reference implementations' schedulers give it.

Both schedules rise linearly over W = `warmup_steps` and fall along a half cosine over
D = `decay_steps`; s counts optimizer steps from 0:

    s < W       rise                                         (see below)
    W <= s      end + (base - end) (1 + cos(pi (s - W) / D)) / 2,   and `end` from s = W + D on

They differ in where the first step stands. "cosine with linear warmup" is NeMo's `CosineAnnealing`
(NVIDIA/NeMo nemo/core/optim/lr_scheduler.py), which trains Llama 3.1: base (s + 1) / (W + 1), so no
step is wasted at 0. "cosine with linear warmup from zero" is Hugging Face's
`get_cosine_schedule_with_warmup` (huggingface/transformers src/transformers/optimization.py), which
trains the Llama 2 adapters: base s / W, so the first step changes nothing when W > 0.

A plain function of the step, not a `torch.optim.lr_scheduler`: a resumed run needs no scheduler
state, and the predictor and the report can ask for any step.
"""

from __future__ import annotations

import math

from timetrial.config import Optim
from timetrial.errors import UserError

SCHEDULES = ("cosine with linear warmup", "cosine with linear warmup from zero")


def learning_rate(optim: Optim, step: int) -> float:
    """The rate at which optimizer step `step`, counted from 0, is made."""
    warmup, decay = optim.warmup_steps, optim.decay_steps
    if step < warmup:
        from_zero = optim.schedule == "cosine with linear warmup from zero"
        return optim.base_lr * (step / warmup if from_zero else (step + 1) / (warmup + 1))
    if step >= warmup + decay:
        return optim.end_lr
    return optim.end_lr + (optim.base_lr - optim.end_lr) * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / decay))


def check(optim: Optim) -> None:
    """Raise UserError where `optim` describes no schedule."""
    if optim.schedule not in SCHEDULES:
        raise UserError(f"optim.schedule {optim.schedule!r} is unknown; use one of {', '.join(map(repr, SCHEDULES))}")
    if optim.warmup_steps < 0 or optim.decay_steps < 1:
        raise UserError(
            f"optim.warmup_steps {optim.warmup_steps} must be at least 0 and "
            f"optim.decay_steps {optim.decay_steps} at least 1"
        )
    if not 0.0 <= optim.end_lr <= optim.base_lr:
        raise UserError(f"optim.end_lr {optim.end_lr} must lie between 0 and optim.base_lr {optim.base_lr}")
