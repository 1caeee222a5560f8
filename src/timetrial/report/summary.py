"""What a run's files come to: the verdict, the headline figures, and a sentence for each chart.

The result's own figures are used where there is a result, so that page, log and table agree; for a
run without one the figures come from its steps, and say so. Each chart's sentence doubles as its
description for those who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from timetrial.report import text
from timetrial.report.run import PHASES, Run, clock, phase_columns


@dataclass(frozen=True)
class Verdict:
    kind: str
    """good, bad or open: how the page colours it."""
    mark: str
    words: str
    detail: str


@dataclass(frozen=True)
class Fact:
    """One headline figure."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Part:
    """One part of a whole, as the page's bars and tables show it."""

    name: str
    words: str
    seconds: float
    share: float


PHASE_WORDS = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "other": "other",
}


def verdict(run: Run) -> Verdict:
    """How the run ended, in words."""
    steps = f"{text.count(run.steps.step[-1])} step{'s' if run.steps.step[-1] != 1 else ''}"
    ran = text.duration(total_s(run))
    if run.result is None:
        return Verdict(
            "open",
            "\u25cb",
            "Unfinished",
            f"No result yet after {steps}: the run was ended from outside, or still goes on.",
        )
    if run.result["status"] == "success":
        return Verdict("good", "\u2713", "Target reached", f"in {text.duration(run.result['time_to_train_s'])}")
    lost = np.flatnonzero(~np.isfinite(run.steps.loss))
    if run.result["status"] == "aborted":
        if len(lost) and lost[-1] == len(run.steps) - 1:
            where = text.count(run.steps.step[lost[0]])
            return Verdict("bad", "\u2715", "Target not reached", f"The loss was no longer finite at step {where}.")
        return Verdict("bad", "\u2715", "Target not reached", f"The run ended after {steps} and {ran}.")
    return Verdict("open", "\u25cb", "Target not reached", f"Stopped as asked after {steps} and {ran}.")


def notice(run: Run) -> str | None:
    """What the page must say about the standing of its numbers."""
    said = run.result.get("notice") if run.result else None
    return str(said) if said else "mini preset: not an MLPerf result" if run.mini else None


def total_s(run: Run) -> float:
    """Seconds that the whole run took, as far as is known."""
    known = [float(clock(run)[-1]), *(e.elapsed_s for e in run.evaluations)]
    if run.result is not None:
        known.append(run.result["time_to_train_s"])
    return max(value for value in known if math.isfinite(value))


def headline(run: Run) -> list[Fact]:
    """The figures at the top of the page."""
    result, steps = run.result or {}, run.steps
    reached = result.get("status") == "success"
    last = run.evaluations[-1].value if run.evaluations else math.nan
    quality = result.get("value", math.nan) if math.isfinite(result.get("value", math.nan)) else last
    low, middle, high = np.percentile(steps.step_time_s, (10, 50, 90))
    middle = result["step_time_s"] if math.isfinite(result.get("step_time_s", math.nan)) else middle
    whole = whole_run(run)
    evaluating = next(part for part in whole if part.name == "evaluation")
    return [
        Fact(
            "Time to train",
            text.duration(result["time_to_train_s"]) if reached else text.NONE,
            "" if reached else f"{'target not reached' if result else 'unfinished'}; ran {text.duration(total_s(run))}",
        ),
        Fact(
            "Final quality",
            text.significant(quality, 4),
            f"{run.metric}; target {run.target:g} or "
            + ("higher" if run.config["evaluation"].get("higher_is_better") else "lower"),
        ),
        Fact("Samples", text.count(steps.samples[-1]), f"in {_times(int(steps.step[-1]), 'optimizer step')}"),
        Fact("Tokens per second", *_rate(run)),
        Fact(
            "Step time",
            text.duration(middle),
            f"median; p10\u2013p90 {_range(low, high)}" if len(steps) > 1 else "of the only step",
        ),
        Fact("MFU", *_mfu(run)),
        Fact("Waiting for data", text.percent(data_share(run)), "of step time"),
        Fact(
            "Evaluation",
            text.percent(evaluating.share),
            f"of the run; {len(run.evaluations)} evaluation{'s' if len(run.evaluations) != 1 else ''}",
        ),
    ]


def _rate(run: Run) -> tuple[str, str]:
    rate = run.result["tokens_per_s"] if run.result else math.nan
    if math.isfinite(rate):
        return text.count(rate) if rate >= 100 else text.significant(rate), "over all ranks"
    rate = _median(run.steps.tokens_per_s)
    return text.count(rate) if rate >= 100 else text.significant(rate), "over all ranks; median of the steps"


def _mfu(run: Run) -> tuple[str, str]:
    share = run.result["mfu"] if run.result else math.nan
    share = share if math.isfinite(share) else _median(run.steps.mfu)
    if not math.isfinite(share):
        return text.NONE, "not measured"
    peak = run.result["matmul_flops_per_s"] if run.result else math.nan
    known = f"{text.flops(peak)}, " if math.isfinite(peak) else ""
    doubt = "; above 100 %, so other work disturbed that measurement" if share > 1 else ""
    return text.percent(share), f"of {known}this machine\u2019s measured matrix-multiply rate{doubt}"


def data_share(run: Run) -> float:
    """Share of step time spent waiting for data, 0..1; NaN when it was not recorded."""
    if run.result and math.isfinite(run.result["data_wait_share"]):
        return float(run.result["data_wait_share"])
    waited, total = np.nansum(run.steps.phases["data"]), float(run.steps.step_time_s.sum())
    return float(waited) / total if total > 0 and np.isfinite(run.steps.phases["data"]).any() else math.nan


def phases(run: Run) -> list[Part]:
    """Mean seconds of each phase per step; empty when no phase was recorded."""
    columns = phase_columns(run)
    if columns is None:
        return []
    means = {name: float(columns[name].mean()) for name in PHASES}
    total = sum(means.values()) or 1.0
    return [Part(name, PHASE_WORDS[name], means[name], means[name] / total) for name in PHASES]


def whole_run(run: Run) -> list[Part]:
    """Seconds of the run's clock in training steps, in evaluation, and in neither."""
    training = float(run.steps.step_time_s.sum())
    evaluation = sum(e.duration_s for e in run.evaluations if math.isfinite(e.duration_s))
    total = max(total_s(run), training + evaluation) or 1.0
    rest = total - training - evaluation
    parts = (("training", "training steps", training), ("evaluation", "evaluation", evaluation))
    return [Part(name, words, s, s / total) for name, words, s in (*parts, ("other", "start-up and other", rest))]


def first_due(run: Run) -> int | None:
    """Samples after which the first evaluation is made; None when the configuration does not say."""
    evaluation = run.config["evaluation"]
    every, skipped = evaluation.get("every_samples"), evaluation.get("skip_first", 0)
    if not isinstance(every, int) or not isinstance(skipped, int) or every <= 0:
        return None
    return every * (skipped + 1)


# ---- sentences -----------------------------------------------------------------------------------


def loss_words(run: Run) -> str:
    losses, samples = run.steps.loss, run.steps.samples
    finite = np.flatnonzero(np.isfinite(losses))
    if not len(finite):
        return "No training loss was finite."
    first, last = (text.significant(losses[finite[i]], 4) for i in (0, -1))
    if len(losses) == 1:
        words = [f"Training loss was {first} at the only step."]
    else:
        words = [f"Training loss went from {first} to {last} over {text.count(samples[-1])} samples."]
    if len(finite) < len(losses):
        lost = np.flatnonzero(~np.isfinite(losses))
        words.append(
            f"It was not finite in {_times(len(lost), 'step')}, first at step {text.count(run.steps.step[lost[0]])}."
        )
    target = f"target of {run.target:g}"
    met = next((e for e in run.evaluations if e.reached), None)
    if met:
        words.append(f"The evaluation at {text.count(met.samples)} samples met the {target} ({run.metric}).")
    elif run.evaluations:
        values = [e.value for e in run.evaluations if math.isfinite(e.value)]
        if values:
            best = max(values) if run.config["evaluation"].get("higher_is_better") else min(values)
            nearest = f"the nearest was {text.significant(best, 4)}"
        else:
            nearest = "none gave a finite value"
        words.append(
            f"None of {_times(len(run.evaluations), 'evaluation')} met the {target} ({run.metric}); {nearest}."
        )
    else:
        words.append(f"No evaluation was made, so the {target} ({run.metric}) is not met.")
    return " ".join(words)


def throughput_words(run: Run) -> str:
    rates = run.steps.tokens_per_s[np.isfinite(run.steps.tokens_per_s)]
    if not len(rates):
        return ""
    low, middle, high = np.percentile(rates, (10, 50, 90))
    return (
        f"Median {text.compact(middle)} tokens/s in a step; p10\u2013p90 {text.compact(low)} to {text.compact(high)}. "
        "Evaluation and start-up do not count here."
    )


def breakdown_words(run: Run) -> str:
    parts = sorted(phases(run), key=lambda part: -part.seconds)
    if not parts:
        return ""
    first, second = parts[:2]
    return (
        f"A step took {text.duration(float(run.steps.step_time_s.mean()))} on average: {first.words} "
        f"{text.percent(first.share)}, {second.words} {text.percent(second.share)}, the rest "
        f"{text.percent(max(0.0, 1 - first.share - second.share))}."
    )


def learning_rate_words(run: Run) -> str:
    rates = run.steps.lr[np.isfinite(run.steps.lr)]
    if not len(rates):
        return ""
    return f"Peak {rates.max():.4g}, at the end {rates[-1]:.4g}."


def gradient_norm_words(run: Run) -> str:
    norms = run.steps.grad_norm[np.isfinite(run.steps.grad_norm)]
    if not len(norms):
        return ""
    words = f"Median {text.significant(float(np.median(norms)))} before clipping"
    clip = run.config["optim"].get("clip_norm")
    if isinstance(clip, int | float) and clip > 0:
        words += f"; above the limit of {clip:g} in {text.percent(float((norms > clip).mean()))} of steps"
    return words + "."


# ---- the plan ------------------------------------------------------------------------------------


def plan_rows(run: Run) -> list[tuple[str, str, str]]:
    """(what, value, explanation) of how the run was laid out."""
    plan, get = run.config["plan"], run.config["plan"].get
    degrees = (("tp", "tensor"), ("cp", "context"), ("dp", "data"), ("pp", "pipeline"))
    numbers = {key: value for key, value in plan.items() if isinstance(value, int) and not isinstance(value, bool)}
    ranks = math.prod(numbers.get(key, 1) for key, _ in degrees)
    extra = [f"{key.upper()} {numbers[key]}" for key in ("vp", "ep") if numbers.get(key, 1) > 1]
    rows = [
        (
            "Mapping",
            f" {text.DOT} ".join([f"{key.upper()}{text.NBSP}{numbers.get(key, 1)}" for key, _ in degrees] + extra),
            f"{_times(ranks, 'rank')}: " + ", ".join(f"{words} {numbers.get(key, 1)}" for key, words in degrees),
        ),
        ("Order", text.plain(get("order", text.NONE)), "axes from the fastest to the slowest varying over the ranks"),
        ("Global batch", *_batch(numbers)),
        ("Precision", text.plain(get("precision", text.NONE)), "what matrix products take"),
        ("Recomputation", text.plain(get("recompute", text.NONE)), "of activations, in the backward pass"),
    ]
    if get("compile"):
        rows.append(("Compiled", "yes", "each block under torch.compile"))
    return rows


def _batch(plan: dict[str, Any]) -> tuple[str, str]:
    gbs, mbs, dp = plan.get("gbs", 1), plan.get("mbs", 1), plan.get("dp", 1)
    accumulated = gbs // (mbs * dp) if mbs * dp else 0
    return (
        f"{_times(gbs, 'sample')}",
        f"{mbs} micro batch \u00d7 {accumulated} accumulated \u00d7 {dp} data parallel",
    )


def _range(low: float, high: float) -> str:
    """Two durations that stay on one line, with the unit once where both have the same."""
    first, second = text.duration(low), text.duration(high)
    head, _, unit = first.rpartition(text.NBSP)
    same = text.NBSP not in head and second.endswith(text.NBSP + unit)
    return f"{head if same else first}\u2060\u2013\u2060{second}"  # word joiners: no line break at the dash


def _times(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _median(values: Sequence[float] | np.ndarray[Any, Any]) -> float:
    finite = np.asarray(values)[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan
