"""The reference-convergence test: did the runs need about as many samples as the reference does?

The arithmetic of mlperf-logging 4.1.68, rcp_checker/rcp_checker.py (lines below), on the reference convergence
points of that package (rcp_checker/training_X.Y.0/rcps_BENCHMARK.json):

- A point's mean leaves out its fastest and slowest run (unet3d: four each), its deviation is over all runs (297-315).
- The fastest mean that passes is where a one-sided t-test at 5 %, equal variances, turns (378-423); n is what the
  reference has left, and two less than the runs of a submission.
- Pruned points: none below the batch size of the fastest one, none above the line of its neighbours (256-295).
- Between two points mean and deviation lie on a straight line, with n twice the runs of a submission (425-458).
- Above the largest point there is no test: it fails. Below the smallest, the smallest one is the reference (530-556).
- llama31_405b from v5.0 on may be 46,080 samples faster still (479-480).
- Time is multiplied by reference mean over mean of the runs where that is above 1 and the test passed (460-462).

The t-test is solved for its turning point; the bisection's steps are kept, so that the figures are equal to the last
digit where they decide.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlperf_logging.benchmark_meta import get_result_file_counts
from scipy.special import stdtrit

from timetrial.errors import UserError
from timetrial.results import rounds
from timetrial.results.margin import eval_interval, evals_to_fastest
from timetrial.results.records import Convergence, Run

ALPHA = 0.05
TOLERANCE = 0.0001
"""Where the bisection stops, in the benchmark's unit."""
NEVER = 1e9
"""What a run that did not converge counts as."""
ALLOWED_405B = 46080
"""Samples, one evaluation of v5.0, by which llama31_405b may be faster."""
EPOCH_FRACTIONS = frozenset(("dlrm_dcnv2", "gnn", "rgat"))
EPOCHS = frozenset(("maskrcnn", "resnet", "retinanet", "ssd", "rnnt"))
"""Others count samples, whatever the logs call them: bert's and unet3d's epoch_num counts samples too."""


@dataclass(frozen=True)
class Point:
    """One reference convergence point, measured or between two."""

    gbs: float
    """Global batch size, samples."""
    mean: float
    """To converge, in the benchmark's unit."""
    stdev: float
    fastest: float
    """The least mean that passes the t-test."""
    runs: int
    """Of the reference; 0 between two points."""

    @property
    def speedup(self) -> float:
        return self.mean / self.fastest if self.fastest else float("inf")


@dataclass(frozen=True)
class Reference:
    """All points of a benchmark in a round, by batch size."""

    benchmark: str
    round: str
    full: tuple[Point, ...]
    pruned: tuple[Point, ...]
    submission_runs: int


@dataclass(frozen=True)
class Choice:
    """Which point a batch size is compared with."""

    point: Point | None
    words: str
    official: str
    """What the official checker says where it passes, or why it fails."""


def unit(benchmark: str) -> str:
    """samples, epochs, epoch_fraction or tokens."""
    if benchmark == "gpt3":
        return "tokens"
    return "epoch_fraction" if benchmark in EPOCH_FRACTIONS else "epochs" if benchmark in EPOCHS else "samples"


def rejected(benchmark: str) -> int:
    """Runs left out at either end."""
    return 4 if benchmark == "unet3d" else 1


def submission_runs(benchmark: str) -> int | None:
    """Runs that a submission has; None for an unknown benchmark."""
    counts: dict[str, int] = get_result_file_counts("training")
    return counts.get(benchmark)


def fastest_mean(mean: float, stdev: float, reference_runs: int, runs: int) -> float:
    """The least mean of a submission of `runs` runs that the t-test lets pass."""
    if stdev == 0:
        return mean
    taken = runs - 2
    turn = -stdtrit(reference_runs + taken - 2, 1 - ALPHA) * stdev * (1 / reference_runs + 1 / taken) ** 0.5
    low, high = 0.0, mean
    middle = (low + high) / 2
    while high - low > TOLERANCE:
        if middle - mean > turn:
            high = middle
        else:
            low = middle
        if not low < (low + high) / 2 < high:  # floats are wider apart than the tolerance
            break
        middle = (low + high) / 2
    return middle


def between(gbs: float, low: Point, high: Point, runs: int) -> Point:
    """The point at `gbs` on the line from `low` to `high`."""
    mean = float(np.interp(gbs, [low.gbs, high.gbs], [low.mean, high.mean]))
    stdev = float(np.interp(gbs, [low.gbs, high.gbs], [low.stdev, high.stdev]))
    return Point(gbs, mean, stdev, fastest_mean(mean, stdev, runs * 2, runs), 0)


def pruned(points: Sequence[Point], runs: int) -> tuple[Point, ...]:
    """Without points below the fastest one's batch size and points above the line of their neighbours."""
    quickest = min(points, key=lambda point: point.mean)
    left = [point for point in points if point.gbs >= quickest.gbs]
    i = 1
    while i < len(left) - 1:
        if left[i].mean > between(left[i].gbs, left[i - 1], left[i + 1], runs).mean:
            del left[i]
            i -= 1
        i += 1  # what stands before a deleted point is not looked at again: no convex hull
    sizes = {point.gbs for point in left}
    return tuple(point for point in points if point.gbs in sizes)


def reference_of(records: dict[str, Any], benchmark: str, round_: str) -> Reference:
    """A reference from the records of an rcps_*.json file."""
    runs = submission_runs(benchmark) or 0
    points = []
    for record in records.values():
        key = "samples to converge" if benchmark in ("llama2_70b_lora", "flux1") else "Epochs to converge"
        values = sorted(record[key])
        cut = rejected(benchmark)
        mean, stdev = float(np.mean(values[cut : len(values) - cut])), float(np.std(values))
        fastest = fastest_mean(mean, stdev, len(values) - 2 * cut, runs)
        points.append(Point(record["BS"], mean, stdev, fastest, len(values)))
    points.sort(key=lambda point: point.gbs)
    return Reference(benchmark, round_, tuple(points), pruned(points, runs), runs)


@functools.cache
def reference(benchmark: str, round_: str) -> Reference | None:
    """The reference of a benchmark in a round (`v5.0`); None where the round has none."""
    if round_ not in rounds.rounds() or submission_runs(benchmark) is None:
        return None
    path: Path = rounds.package() / "rcp_checker" / f"training_{rounds.ruleset(round_)}" / f"rcps_{benchmark}.json"
    if not path.is_file():
        return None
    try:
        return reference_of(json.loads(path.read_bytes()), benchmark, round_)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path.name} of mlperf-logging cannot be read ({error}); install it again") from None


def choose(reference: Reference, gbs: float, full: bool = False) -> Choice:
    """The point that a global batch size is compared with, by the checker's order of choice."""
    points = reference.full if full else reference.pruned
    name = "full" if full else "pruned"
    for point in points:
        if point.gbs == gbs:
            return Choice(point, f"the point at batch size {gbs:.12g} ({name} set)", "RCP found")
    below = max((point for point in points if point.gbs < gbs), key=lambda point: point.gbs, default=None)
    above = min((point for point in points if point.gbs > gbs), key=lambda point: point.gbs, default=None)
    missing = f"Missing RCP, please submit RCP with BS = {gbs:.12g}"
    if below and above:
        point = between(gbs, below, above, reference.submission_runs)
        words = f"between batch sizes {below.gbs:.12g} and {above.gbs:.12g} ({name} set)"
        return Choice(point, words, "RCP Interpolation")
    if above:
        words = f"the smallest point, batch size {above.gbs:.12g} ({name} set)"
        return Choice(above, words, "RCP not found but slower convergence on smaller batch size")
    if below:
        return Choice(None, f"none: {gbs:.12g} is above the largest batch size, {below.gbs:.12g} ({name} set)", missing)
    return Choice(None, "none: no points", "Cannot find any RCPs")


def judge(reference: Reference, point: Point, mean: float) -> tuple[bool, float, float]:
    """(passed, factor, least mean that passes) of runs with this mean; the factor is 1 or more."""
    speedup = point.speedup
    if reference.benchmark == "llama31_405b" and reference.round >= "v5.0":
        least = point.fastest - ALLOWED_405B
        speedup = point.mean / least if least else float("inf")
    least = point.mean / speedup
    factor = point.mean / mean if mean > 0 else float("inf")
    return bool(mean >= least), max(1.0, factor), least


def mean_of(runs: Sequence[Run], benchmark: str) -> tuple[float | None, int]:
    """(olympic mean of samples to converge, runs that did not converge); None for too few or too many such runs."""
    cut = rejected(benchmark)
    values = sorted(NEVER if run.samples is None else run.samples for run in runs)
    failed = sum(run.samples is None for run in runs)
    counted = values[cut : len(values) - cut]
    if failed > cut or not counted:
        return None, failed
    return float(np.mean(counted)), failed


def convergence_of(
    runs: Sequence[Run], benchmark: str, round_: str, gbs: int | None, full: bool = False
) -> Convergence:
    """The test of one result's runs, against the pruned points unless `full`."""
    mean, failed = mean_of(runs, benchmark)
    every = next((run.eval_every for run in runs if run.eval_every), None) or eval_interval(benchmark, round_, gbs)
    unit_ = unit(benchmark)
    known = reference(benchmark, round_)

    def without(passed: bool | None, why: str) -> Convergence:
        return Convergence(passed, mean, None, None, None, "", 1.0, "computed", unit_, None, why)

    if known is None:
        return without(
            None, f"{round_ or 'an unknown round'} has no reference for {benchmark or 'an unknown benchmark'}."
        )
    if gbs is None:
        return without(False, "The logs do not agree on one global_batch_size.")
    if mean is None:
        if failed > rejected(benchmark):
            return without(False, f"{failed} runs did not converge; {rejected(benchmark)} may.")
        return without(None, f"{len(runs)} runs are too few: the test takes {known.submission_runs}.")
    choice = choose(known, gbs, full)
    if choice.point is None:
        why = f"No reference at batch size {gbs}: {choice.words.removeprefix('none: ')}."
        return without(False, why)
    passed, factor, least = judge(known, choice.point, mean)
    evals = evals_to_fastest(mean, least, every)
    margin = ""
    if evals is not None:
        side = "after" if evals >= 0 else "before"
        margin = f", {abs(evals):.1f} evaluations {side} the fastest allowed"
    pace = "slower than" if mean > choice.point.mean else "as fast as" if mean == choice.point.mean else "faster than"
    why = f"{mean:,.7g} {unit_.replace('_', ' ')} are {pace} the reference's {choice.point.mean:,.7g}{margin}."
    if passed and factor > 1:
        why += f" The time is multiplied by {factor:.4f}."
    return Convergence(
        passed=passed,
        samples_mean=mean,
        reference_mean=choice.point.mean,
        reference_stdev=choice.point.stdev,
        reference_min=least,
        reference=choice.words,
        scaling_factor=factor if passed else 1.0,
        scaling_source="computed",
        unit=unit_,
        evals_to_fastest=evals,
        why=why,
    )
