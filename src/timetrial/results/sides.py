"""One side of a comparison: a result's figures, from its published row or from its own runs, made comparable."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from timetrial.results.records import Figures, Result, Run, RunTime
from timetrial.results.reference import reference_samples, target


@dataclass(frozen=True)
class Side:
    """What a comparison uses of one result; None where it is unknown."""

    result: Result
    figures: Figures
    """Of the published row, or means over the runs that the score is made of."""
    accelerator_min: float | None
    """Score times accelerators, minutes."""
    rate: float | None
    """Training samples a second and accelerator."""
    rate_source: str
    """Where the rate comes from, or why there is none."""
    scored_samples: float | None
    """Samples that the score stands for: the runs' own times the scaling factor, in the figures' unit."""
    reference: float | None
    """Samples of the round's reference at the result's batch size."""
    eval_share: float | None
    """Evaluation's part of the run time, 0 to 1."""
    eval_note: str
    """Why there is no share; empty where there is one."""
    explained: float | None
    """Part of the run time that samples over throughput and evaluation make; far from 1, the throughput is doubtful."""
    warnings: tuple[str, ...]
    """What keeps this result from standing beside a published one."""


def side(result: Result) -> Side:
    """The side of a comparison that a result makes."""
    figures = result.figures or _from_runs(result)
    rate, rate_source = _rate(result, figures)
    share, note = _eval_share(result, figures)
    known = None not in (result.score_min, result.accelerators)
    return Side(
        result=result,
        figures=figures,
        accelerator_min=(result.score_min or 0.0) * (result.accelerators or 0) if known else None,
        rate=rate / result.accelerators if rate is not None and result.accelerators else None,
        rate_source=rate_source,
        scored_samples=None if figures.samples is None or figures.scale is None else figures.samples * figures.scale,
        reference=None if result.gbs is None else reference_samples(result.benchmark, result.round, result.gbs),
        eval_share=share,
        eval_note=note,
        explained=_explained(result, figures, rate),
        warnings=_warnings(result),
    )


def name(result: Result) -> str:
    """A result in few words: round, system, accelerators."""
    count = f" ({result.accelerators} accelerators)" if result.accelerators is not None else ""
    return f"{result.round or 'no round'} {result.organization} {result.system}{count}".replace("  ", " ")


def _from_runs(result: Result) -> Figures:
    scoring = [run for run in result.runs if run.converged and not run.dropped]
    times = [run.time for run in scoring if run.time is not None]
    minutes = [run.time_min for run in result.runs if run.time_min is not None]
    convergence = result.convergence
    scale = convergence.scaling_factor if convergence is not None else None
    if scale is None and result.score_min and result.unscaled_min:
        scale = result.score_min / result.unscaled_min
    samples = convergence.samples_mean if convergence is not None else None
    if samples is None:
        samples = _mean([run.samples for run in scoring])
    return Figures(
        samples=samples,
        unit=convergence.unit if convergence is not None else "",
        steps=_over(times, lambda time: time.steps),
        scale=scale,
        step_s=_over(times, lambda time: time.step_s),
        samples_per_s=_over(times, lambda time: time.samples_per_s),
        rate_source=" and ".join(sorted({time.step_source for time in times})),
        eval_s=_over(times, lambda time: time.eval_s),
        init_s=_over(times, lambda time: time.init_s),
        runs=len(result.runs),
        not_converged=_missed(result.runs),
        run_min=min(minutes, default=None),
        run_max=max(minutes, default=None),
        tflops_per_accelerator=_over(times, lambda time: time.tflops_per_accelerator),
        basis="own runs",
    )


def _missed(runs: Sequence[Run]) -> int:
    return sum(not run.converged for run in runs)


def _over(times: Sequence[RunTime], get: Callable[[RunTime], float | None]) -> float | None:
    return _mean([get(time) for time in times])


def _mean(values: Sequence[float | None]) -> float | None:
    """None unless every run has a value: a mean over some runs is not that of the score."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _offline(result: Result) -> bool:
    asked = target(result.benchmark, result.round)
    return asked is not None and asked.offline


def _rate(result: Result, figures: Figures) -> tuple[float | None, str]:
    if figures.samples_per_s is not None:
        return figures.samples_per_s, figures.rate_source
    outside = 0.0 if _offline(result) else figures.eval_s
    if figures.steps is None or result.gbs is None or result.unscaled_min is None or outside is None:
        return None, "no throughput and no number of steps"
    left = 60 * result.unscaled_min - outside
    if left <= 0:
        return None, "evaluation took longer than the run"
    return figures.steps * result.gbs / left, "steps over time outside of evaluation"


def _eval_share(result: Result, figures: Figures) -> tuple[float | None, str]:
    if _offline(result):
        return None, "evaluated outside of the clock"
    if figures.eval_s is None or not result.unscaled_min:
        return None, "no evaluation times"
    share = figures.eval_s / (60 * result.unscaled_min)
    return (share, "") if share <= 1 else (None, "evaluation took longer than the run")


def _explained(result: Result, figures: Figures, rate: float | None) -> float | None:
    outside = 0.0 if _offline(result) else figures.eval_s
    if not rate or not result.unscaled_min or outside is None or figures.steps is None or result.gbs is None:
        return None
    return (figures.steps * result.gbs / rate + outside) / (60 * result.unscaled_min)


def _warnings(result: Result) -> tuple[str, ...]:
    said = []
    if result.verdict == "mini":
        said.append(f"{name(result)}: mini preset, no MLPerf result")
    elif result.unverified:
        said.append(f"{name(result)}: unverified, not reviewed by MLCommons")
    if result.verdict == "fails":
        said.append(f"{name(result)}: does not stand by its round's rules")
    if result.score_min is None:
        said.append(f"{name(result)}: no score")
    said += [f"{name(result)}: {finding.found}" for finding in result.findings if finding.rule == "published.basis"]
    return tuple(said)
