"""Samples that a workload needs at a batch size, and the time to train that follows from a step time.

The samples come from the reference convergence points (RCPs) of the rounds, as `mlperf_logging/rcp_checker`
of mlperf-logging 4.1.68 uses them: the mean without the fastest and the slowest run, and between two batch
sizes a straight line in the batch size. Of points that the checker's pruning leaves out, only those count
whose batch size is asked for: they were measured there, though a submission may well need fewer samples.

Outside of the measured batch sizes the checker compares with the smallest, or has no answer. Here
the mean is that of the smallest point below, and goes on in the last line above (samples grow about linearly
with the batch size, McCandlish et al. 2018, arXiv:1812.06162); the range is wider by as much as the line
moves, and `outside` says so.

The reference trains in bf16. Submissions in eight bits need as many samples (median of 109: 0.99 of it); those in
four bits more (13 runs of v5.1 and v6.0: 1.00 to 1.125, median 1.06).
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import itertools
import math
from dataclasses import dataclass

from timetrial.config import Evaluation, RunConfig, replace
from timetrial.errors import UserError

FOUR_BITS = ("nvfp4", "mxfp4")
FOUR_BITS_MORE = (1.06, 1.125)
"""Samples of published runs in four bits over the reference's: their median and their largest."""


@dataclass(frozen=True)
class Point:
    """A batch size at which the reference was trained to the target."""

    gbs: int
    """Global batch size, samples."""
    mean: float
    """Samples to converge, mean without the fastest and the slowest run."""
    stdev: float
    """Standard deviation over all runs, samples."""
    low: float
    """Of the fastest run, samples."""
    high: float
    """Of the slowest run, samples."""
    runs: int
    pruned: bool
    """Whether the checker's pruned set, which it interpolates in, has this point."""
    source: str
    """File of mlperf-logging 4.1.68 below `mlperf_logging/`."""


@dataclass(frozen=True)
class Samples:
    """Training samples until the target is reached."""

    mean: float
    """Expected of a run, as a score averages them; no whole number of steps or evaluations."""
    stdev: float
    """Between runs, samples."""
    low: float
    """Of a fast run, samples."""
    high: float
    """Of a slow run, samples."""
    outside: bool
    """Whether the batch size lies outside of the measured ones."""
    basis: str
    """Where the figure comes from, for people."""


@dataclass(frozen=True)
class TimeToTrain:
    """From the first touch of the data to the evaluation that meets the target."""

    minutes: float
    """Expected of a run."""
    low: float
    """Minutes where a fast run and a fast step come together as rarely as either alone; see `time_to_train`."""
    high: float
    """The same of a slow run and a slow step, minutes."""
    samples: float
    """Expected training samples."""
    samples_low: float
    """Of a fast run: whole evaluations."""
    samples_high: float
    """Of a slow run: whole evaluations."""
    steps: int
    """Optimizer steps, rounded up."""
    evaluations: int
    """Evaluations made, the last one among them, rounded up."""
    evaluation_s: float
    """Seconds of one evaluation."""
    outside: bool
    """Whether the batch size lies outside of the measured ones."""
    basis: str
    """Where the samples come from, for people."""


def points(workload: str, round_: str) -> tuple[Point, ...]:
    """The reference's points of a workload in a round, by batch size. Raises UserError where there are none."""
    table = _table()
    if (found := table.get((workload, round_))) is not None:
        return found
    if rounds := sorted(r for name, r in table if name == workload):
        raise UserError(f"{workload} has no convergence points of round {round_}; it has those of {', '.join(rounds)}")
    known = ", ".join(sorted({name for name, _ in table}))
    raise UserError(f"{workload} has no convergence points; those who have: {known}")


def samples(workload: str, round_: str, gbs: int, precision: str = "bf16") -> Samples:
    """Samples to converge of `workload` at global batch size `gbs` by the points of `round_`.

    `precision`: of linear layers; more samples in FOUR_BITS.
    """
    found = _reference(workload, round_, gbs)
    if precision not in FOUR_BITS:
        return found
    likely, most = FOUR_BITS_MORE
    return replace(
        found,
        mean=likely * found.mean,
        high=max(found.high, most * found.mean),
        basis=f"{found.basis}, x{likely:g} for {precision}",
    )


def _reference(workload: str, round_: str, gbs: int) -> Samples:
    if gbs < 1:
        raise UserError(f"gbs={gbs}: must be at least 1 to converge")
    known = points(workload, round_)
    exact = next((p for p in known if p.gbs == gbs), None)
    if exact is not None:
        return Samples(
            exact.mean, exact.stdev, exact.low, exact.high, False, f"{exact.runs} reference runs at GBS {gbs}"
        )
    line = [p for p in known if p.pruned]
    if gbs < line[0].gbs or gbs > line[-1].gbs:
        return _outside(line, gbs)
    below, above = next((a, b) for a, b in itertools.pairwise(line) if a.gbs < gbs < b.gbs)
    part = (gbs - below.gbs) / (above.gbs - below.gbs)

    def between(a: float, b: float) -> float:
        return a + part * (b - a)

    return Samples(
        mean=between(below.mean, above.mean),
        stdev=between(below.stdev, above.stdev),
        low=between(below.low, above.low),
        high=between(below.high, above.high),
        outside=False,
        basis=f"between the reference's GBS {below.gbs} and {above.gbs}",
    )


def _outside(line: list[Point], gbs: int) -> Samples:
    smaller = gbs < line[0].gbs
    edge, other = (line[0], line[1]) if smaller else (line[-1], line[-2])
    slope = (edge.mean - other.mean) / (edge.gbs - other.gbs)
    moved = abs(slope * (gbs - edge.gbs))
    mean = edge.mean if smaller else edge.mean + moved
    return Samples(
        mean=mean,
        stdev=edge.stdev + moved,
        low=max(float(gbs), mean - (edge.mean - edge.low) - moved),
        high=mean + (edge.high - edge.mean) + moved,
        outside=True,
        basis=f"GBS {gbs} is {'below' if smaller else 'above'} the reference's {edge.gbs}: a guess, range widened",
    )


def evaluations(evaluation: Evaluation, consumed: float) -> float:
    """Evaluations made until a run ends after `consumed` samples; a fraction for a mean over runs."""
    return max(1.0, consumed / evaluation.every_samples - evaluation.skip_first)


def whole(evaluation: Evaluation, consumed: float) -> float:
    """`consumed` samples rounded up to the evaluation that sees them, no earlier than the first one made."""
    point = math.ceil(consumed / evaluation.every_samples - 1e-9)
    return float(evaluation.every_samples * max(point, evaluation.skip_first + 1))


def time_to_train(
    config: RunConfig,
    step_s: float,
    eval_s: float,
    *,
    needed: Samples | None = None,
    start_s: float = 0.0,
    step_range: tuple[float, float] | None = None,
    precision: str = "bf16",
) -> TimeToTrain:
    """Time to train of an official `config` whose steps take `step_s` and whose evaluations take `eval_s` seconds.

    `needed`: samples to converge, those of the reference where None (which minis have not). `start_s`: from
    the start of the clock to the first step, s. `step_range`: (low, high) of `step_s`, s; None: it is known.
    `precision`: of linear layers, as in `samples`.

    The range joins that of the samples and that of the step, which have nothing to do with each other: each makes the
    time so many times shorter or longer, and the two logarithms are added as squares. What a step is off by, so is
    an evaluation, whose time comes from the same prices; the start is not.

    The mean over runs, each of which ends with an evaluation, is a mean of whole evaluations and no whole
    number itself, so only the range's ends are rounded. No run ends before the first evaluation.
    Raises UserError where there are no convergence points, and for times that are not above 0.
    """
    if not (step_s > 0 and eval_s >= 0 and start_s >= 0 and math.isfinite(step_s + eval_s + start_s)):
        raise UserError(
            f"step_s={step_s}, eval_s={eval_s}, start_s={start_s}: seconds must be finite, a step's above 0"
        )
    fast, slow = (end / step_s for end in step_range or (step_s, step_s))
    if not 0 < fast <= 1 <= slow < math.inf:
        raise UserError(f"step_range={step_range}: must hold step_s={step_s} and be above 0")
    rule, gbs = config.evaluation, config.plan.gbs
    if needed is None:
        if not config.official:
            raise UserError(f"{config.workload} {config.preset}: only official presets have convergence points")
        needed = samples(config.workload, config.round, gbs, precision)

    def minutes(consumed: float, pace: float = 1.0) -> float:
        return (start_s + pace * (consumed / gbs * step_s + evaluations(rule, consumed) * eval_s)) / 60

    first = float(rule.every_samples * (rule.skip_first + 1))
    mean = max(needed.mean, first)
    expected = minutes(mean)
    # the reference's fastest run is rounded up to an evaluation of its own already
    fewest = max(first, rule.every_samples * math.floor(needed.low / rule.every_samples + 1e-9))
    fewest, most = min(fewest, mean), whole(rule, max(needed.high, mean))

    def joined(consumed: float, pace: float) -> float:
        by_samples, by_step = minutes(consumed) / expected, minutes(mean, pace) / expected
        return math.hypot(math.log(by_samples), math.log(by_step))

    basis = needed.basis
    if needed.mean < first:
        late = f"the first evaluation, after {first:,.0f} samples, comes later than the target"
        basis = late if needed.high <= first else f"{basis}; {late}"
    if rule.max_samples and mean > rule.max_samples:
        basis += f"; more than the {rule.max_samples:,} samples after which a run has failed"
    return TimeToTrain(
        minutes=expected,
        low=expected / math.exp(joined(fewest, fast)),
        high=expected * math.exp(joined(most, slow)),
        samples=mean,
        samples_low=fewest,
        samples_high=most,
        steps=math.ceil(mean / gbs - 1e-9),
        evaluations=math.ceil(evaluations(rule, mean) - 1e-9),
        evaluation_s=eval_s,
        outside=needed.outside,
        basis=basis,
    )


@functools.cache
def _table() -> dict[tuple[str, str], tuple[Point, ...]]:
    text = importlib.resources.files("timetrial.predict").joinpath("data/convergence.csv").read_text(encoding="utf-8")
    table: dict[tuple[str, str], list[Point]] = {}
    for row in csv.DictReader(text.splitlines()):
        point = Point(
            gbs=int(row["gbs"]),
            mean=float(row["mean_samples"]),
            stdev=float(row["stdev_samples"]),
            low=float(row["min_samples"]),
            high=float(row["max_samples"]),
            runs=int(row["runs"]),
            pruned=row["pruned"] == "yes",
            source=row["source"],
        )
        for round_ in row["rounds"].split():
            table.setdefault((row["benchmark"], round_), []).append(point)
    return {key: tuple(sorted(found, key=lambda p: p.gbs)) for key, found in table.items()}
