"""Fill in all that is said about one prediction: memory, time to train, energy, its range, its neighbours."""

from __future__ import annotations

import dataclasses

from timetrial.config import replace
from timetrial.errors import UserError
from timetrial.parallel.plan import validate
from timetrial.predict import sure
from timetrial.predict.answer import GRAPHS, energy_of, interval_of, memory_of, time_of
from timetrial.predict.constants import load as load_constants
from timetrial.predict.predict import Prediction, predict
from timetrial.predict.request import Request
from timetrial.report.prediction_record import Answered, PublishedRun, Scaled
from timetrial.report.text import duration, percent
from timetrial.systems.stack import Stack

MANY_LAUNCHES = 0.1
"""Share of a step above which launches are worth a word."""
HELPS = 0.98
"""Of the step's time; what saves less is not recommended."""


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
        notes=(*_launches(made), *_notes(made, interval), *([f"no time to train: {why}"] if why else [])),
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


def _launches(made: Prediction) -> tuple[str, ...]:
    """What launches cost where they are much of the step, and what the step takes with the launches recorded."""
    step, request = made.step, made.request
    share = step.parts.get("launch", 0.0) / step.seconds
    if share <= MANY_LAUNCHES or made.system.accelerator.vendor == "cpu":
        return ()
    said = f"the host's launches and the gaps between kernels are {percent(share)} of the step"
    recorded = {
        option: predict(
            dataclasses.replace(request, hints=dataclasses.replace(request.hints, cuda_graph=name)), stack=made.stack
        ).step.seconds
        for option, name in GRAPHS.items()
        if option != "none"
    }
    helping = [f"--graphs {option}: {duration(s)}" for option, s in recorded.items() if s < HELPS * step.seconds]
    if helping:
        return (f"{said}; CUDA graphs would shorten it ({', '.join(helping)})",)
    return (f"{said}; a larger micro batch (mbs in --plan) makes fewer and longer kernels",)


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
    """Published runs of the same model on the same system; alike are those of one precision and global batch."""
    request = made.request
    ours = (request.precision, f"gbs{request.plan.gbs}")
    return tuple(
        PublishedRun(
            f"{run.source}, {run.precision}",
            run.accelerators,
            run.published_s,
            run.mapping,
            (run.precision, run.mapping.rpartition(" ")[2]) == ours,
        )
        for run in sure.validated()
        if run.model == made.request.model and run.system == made.system.name
    )
