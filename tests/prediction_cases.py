"""Predictions for tests of how they are shown: a pipelined 405B, and LoRA on one node without a pipeline."""

from __future__ import annotations

import functools

from timetrial.predict import cache, converge, energy, memory, predict
from timetrial.predict.constants import Constants
from timetrial.predict.request import request
from timetrial.predict.sure import Interval
from timetrial.report.prediction import Answered, PublishedRun, Scaled

PIPELINED = {
    "benchmark": "llama31_405b", "round": "v5.0", "accelerator": "NVIDIA Blackwell GPU (GB200)", "accelerators": "512",
    "TP": "4", "PP": "8", "VP": "8", "CP": "2", "micro_batch": "1", "gbs": "896", "precision": "fp8",
    "tp_pp_dp_mapping": "True",
}  # fmt: skip
ADAPTED = {
    "benchmark": "llama2_70b_lora", "round": "v5.0", "accelerator": "NVIDIA H100-SXM5-80GB", "accelerators": "8",
    "TP": "4", "PP": "1", "CP": "1", "micro_batch": "1", "gbs": "8", "precision": "fp8",
}  # fmt: skip
CONSTANTS = Constants({"network": 0.8, "contention": 0.3}, "nothing: of a test")


@functools.cache
def answered(name: str) -> Answered:
    """One of: pipelined, adapted."""
    return answer({"pipelined": PIPELINED, "adapted": ADAPTED}[name])


def answer(row: dict[str, str]) -> Answered:
    """A row's prediction with all that goes with it; the curve and what is published are made up."""
    wanted = request(row)
    found = predict.predict(wanted, constants=CONSTANTS)
    plan, step_s = wanted.plan, found.step.seconds
    habits = memory.policy(found.stack, found.stack.recipe(wanted.recipe), wanted.attention)
    layers = memory.measure(cache.layers(wanted.config), habits.fused)
    needs = memory.memory(plan, wanted.config.model.n_layers, layers, habits)
    verdict = needs.verdict(found.system.accelerator.memory_bytes)
    span = (0.92 * step_s, 1.09 * step_s)
    time = converge.time_to_train(
        wanted.config, step_s, found.step.evaluation_s, step_range=span, precision=wanted.precision
    )
    world = plan.world_size
    more = [(world // 2, 2.0, 1.02), (world, 1.0, 1.0), (2 * world, 0.5, 0.97), (4 * world, 0.25, 0.93)]
    return Answered(
        prediction=found,
        interval=Interval(*span, "errors of the 12 nearest validated runs", outside=False),
        fits=verdict.possible,
        reason=verdict.text,
        memory=needs,
        time=time,
        energy=energy.energy(found.system, world, time),
        notes=("TP <4> with CP 2 is outside of what was validated", "no noise of the file system"),
        scaling=tuple(Scaled(n, step_s * t / rate, found.tokens_per_s_per_gpu * rate) for n, t, rate in more),
        published=(
            PublishedRun("v5.0 <Somebody> & sons", world, 1.04 * step_s),
            PublishedRun(
                "v5.0 Somebody else", 2 * world, 0.55 * step_s, "tp4 pp8 vp8 cp2 dp16 mbs1 gbs2048", alike=False
            ),
        ),
        constants=CONSTANTS,
    )
