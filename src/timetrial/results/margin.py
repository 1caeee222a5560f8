"""How much room is left: evaluations to the fastest mean that passes the convergence test, quality at the target."""

from __future__ import annotations

import math
import re

from timetrial.results import reference
from timetrial.results.records import Convergence

DIRECTIONS = {"perplexity": -1, "ppl": -1, "loss": -1, "accuracy": 1, "auc": 1, "map": 1, "dice": 1, "pass": 1}
"""Word of a metric -> 1 where more is better, -1 where less is; the first that is found."""

EVERY = {
    "llama31_405b": 18_432,
    "llama31_8b": 12_288,
    "gpt_oss_20b": 12_288,
    "llama2_70b_lora": 384,
    "flux1": 262_144,
    "gpt3": 24_576,
    "stable_diffusion": 512_000,
    "deepseekv3_671b": 1,
}
"""Samples between evaluations, before rounding up to whole batches; 1: after each step
(mlcommons/training_policies training_rules.adoc)."""
EVERY_EPOCHS = {"dlrm_dcnv2": 0.05, "rgat": 0.05, "gnn": 0.05, "retinanet": 1.0, "ssd": 1.0}
"""Epochs between evaluations (training_rules.adoc; retinanet and ssd: after each epoch)."""
EVERY_V50 = {"llama31_405b": 46_080}
"""What v5.0 had in place of the above."""


def eval_interval(benchmark: str, round_: str, gbs: int | None) -> float | None:
    """Distance of two evaluations in the unit of the convergence test (samples, else epochs).

    None where the rules' interval is not known here.
    """
    if benchmark in EVERY_EPOCHS:
        return EVERY_EPOCHS[benchmark]
    if not gbs:
        return None
    if benchmark == "bert":  # floor(0.05 (230.23 GBS + 3,000,000), 25,000): down to whole 25,000
        return math.floor(0.05 * (230.23 * gbs + 3_000_000) / 25_000) * 25_000.0
    samples = (EVERY_V50 if round_ == "v5.0" else {}).get(benchmark, EVERY.get(benchmark))
    return None if samples is None else math.ceil(samples / gbs) * float(gbs)


def evals_to_fastest(samples_mean: float | None, fastest: float | None, interval: float | None) -> float | None:
    """Evaluations by which a mean lies after (+) or before (-) `fastest`, the least mean that passes."""
    if samples_mean is None or fastest is None or not interval or interval <= 0:
        return None
    return (samples_mean - fastest) / interval


def convergence_sentence(convergence: Convergence, interval: float | None = None) -> str:
    """Samples to converge against the reference, and the room left, in one or two sentences."""
    mean, unit = convergence.samples_mean, convergence.unit.replace("_", " ")
    if mean is None:
        return convergence.why or "Samples to converge are not known."
    text = f"Converged after {_number(mean)} {unit}"
    if convergence.reference_mean is None:
        return f"{text}; there is no reference" + (f": {convergence.why}" if convergence.why else ".")
    more = 100 * (mean / convergence.reference_mean - 1) if convergence.reference_mean else 0.0
    than = f"{abs(more):.1f} % {'more' if more >= 0 else 'less'} than" if abs(more) >= 0.05 else "as many as"
    text += f", {than} the reference's {_number(convergence.reference_mean)}"
    away = convergence.evals_to_fastest
    if away is None:
        away = evals_to_fastest(mean, convergence.reference_min, interval)
    if away is None or convergence.reference_min is None:
        return text + "."
    fastest = f"the fastest allowed ({_number(convergence.reference_min)})"
    if abs(away) < 0.05:
        return f"{text}; that is {fastest}: there is no room left."
    side = "slower" if away >= 0 else "faster"
    return f"{text}; {abs(away):.1f} evaluations {side} than {fastest}."


def quality_margin(quality: float | None, target: float | None, lower_is_better: bool) -> float | None:
    """How far the last evaluation lies beyond the target, as a share of it; negative where it was missed."""
    if quality is None or not target:
        return None
    return (target - quality if lower_is_better else quality - target) / abs(target)


def quality_sentence(benchmark: str, round_: str, quality: float | None) -> str | None:
    """The last evaluation against the round's target; None where the round's table has no single number."""
    wanted = reference.target(benchmark, round_)
    if wanted is None or quality is None or not re.fullmatch(r"[0-9.]+", wanted.target):
        return None
    metric = wanted.metric.lower()
    direction = next((sign for word, sign in DIRECTIONS.items() if word in metric), None)
    if direction is None:
        return None
    share = quality_margin(quality, float(wanted.target), direction < 0)
    if share is None:
        return None
    side = "beyond" if share >= 0 else "short of"
    return f"Last {wanted.metric} {quality:.6g}: {abs(100 * share):.2g} % {side} the target {wanted.target}."


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
