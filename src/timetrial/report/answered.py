"""Fill in all that is said about one prediction: memory, time to train, energy, its range, its neighbours."""

from __future__ import annotations

import dataclasses

from timetrial.config import replace
from timetrial.errors import UserError
from timetrial.parallel.plan import validate
from timetrial.predict import sure
from timetrial.predict.answer import energy_of, interval_of, memory_of, time_of
from timetrial.predict.constants import load as load_constants
from timetrial.predict.predict import Prediction, predict
from timetrial.predict.request import Request
from timetrial.report.prediction_record import Answered, PublishedRun, Scaled
from timetrial.systems.stack import Stack


def answered(request: Request, stack: Stack) -> Answered:
    """All that is said about one prediction."""
    made = predict(request, stack=stack)
    needed = memory_of(made)
    verdict = needed.verdict(made.system.accelerator.memory_bytes)
    time, why = time_of(made)
    interval = interval_of(made)
    return Answered(
        prediction=made,
        interval=interval,
        fits=verdict.possible,
        reason=verdict.text,
        memory=needed,
        time=time,
        energy=energy_of(made, time),
        notes=(*_notes(made, interval), *([f"no time to train: {why}"] if why else [])),
        scaling=scaling(request, stack),
        published=dots(made),
    )


def _notes(made: Prediction, interval: sure.Interval) -> tuple[str, ...]:
    notes = [f"assumed: {text}" for text in made.request.assumed]
    if interval.outside:
        notes.append("outside of the validated range: no published run like it was at hand")
    known, generation = load_constants(), made.system.accelerator.generation
    if generation == "cpu":  # measured on the machine: nothing is fitted
        return tuple(notes)
    if not known.fitted("speed", generation):
        notes.append(f"assumed: no published run of {generation} accelerators was fitted")
    if not known.fitted("kernels", made.stack.name):
        notes.append(f"assumed: no published run under the stack {made.stack.name} was fitted")
    return tuple(notes)


def scaling(request: Request, stack: Stack) -> tuple[Scaled, ...]:
    """Step times at the same global batch and model parallelism on fewer and more accelerators, by doubles."""
    plan, curve = request.plan, []
    for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8):
        dp = plan.dp * factor
        if dp != int(dp) or plan.gbs % (plan.mbs * int(dp)):
            continue
        other = replace(plan, dp=int(dp), shard=0)
        try:
            validate(other, replace(request.config, plan=other), other.world_size)
            asked = dataclasses.replace(
                request, config=replace(request.config, plan=other), accelerators=other.world_size
            )
            made = predict(asked, stack=stack)
        except UserError:  # that many do not make a run; the curve goes without them
            continue
        curve.append(Scaled(other.world_size, made.step.seconds, made.tokens_per_s_per_gpu))
    return tuple(curve)


def dots(made: Prediction) -> tuple[PublishedRun, ...]:
    """Published runs of the same model on the same system."""
    return tuple(
        PublishedRun(f"{run.source}, {run.precision}", run.accelerators, run.published_s)
        for run in sure.validated()
        if run.model == made.request.model and run.system == made.system.name
    )
