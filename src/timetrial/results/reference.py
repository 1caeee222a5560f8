"""What the rounds ask of a benchmark, and how many samples their references need at a batch size.

Tables of the package: `data/reference.csv` (reference convergence points of mlperf-logging 4.1.68, the pruned set that
its checker interpolates in) and `data/targets.csv` (target and evaluation, training_policies training_rules.adoc).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from timetrial.results.lookup import benchmark_of, rows


@dataclass(frozen=True)
class Target:
    """When a run of a benchmark ends."""

    metric: str
    """What is measured, e.g. `eval loss`."""
    target: str
    """The value to reach, as the rules write it."""
    evaluation: str
    """How often is evaluated, in words."""
    offline: bool
    """Whether evaluation is outside of the clock."""


def target(benchmark: str, round_: str) -> Target | None:
    """What `round_` (`v5.0`) asks of a benchmark; None where the table does not say."""
    return _targets().get((benchmark_of(benchmark), round_))


def reference_samples(benchmark: str, round_: str, gbs: int) -> float | None:
    """Samples (or epochs) to converge that the reference of `round_` needs at a global batch size.

    As the checker has it (rcp_checker.py): a straight line in the batch size between two points, the smallest point
    for all smaller batches; None above the largest and where the round has no reference.
    """
    line = _lines().get((benchmark_of(benchmark), round_), ())
    if not line or gbs > line[-1][0]:
        return None
    if gbs <= line[0][0]:
        return line[0][1]
    (low, below), (high, above) = next((a, b) for a, b in itertools.pairwise(line) if a[0] < gbs <= b[0])
    return below + (gbs - low) / (high - low) * (above - below)


def smallest(benchmark: str, round_: str) -> int | None:
    """The smallest batch size of the reference; None where the round has none."""
    line = _lines().get((benchmark_of(benchmark), round_), ())
    return line[0][0] if line else None


@functools.cache
def _lines() -> dict[tuple[str, str], tuple[tuple[int, float], ...]]:
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows("reference.csv"):
        key = (benchmark_of(row["benchmark"]), row["round"])
        found.setdefault(key, []).append((int(row["gbs"]), float(row["mean"])))
    return {key: tuple(sorted(points)) for key, points in found.items()}


@functools.cache
def _targets() -> dict[tuple[str, str], Target]:
    return {
        (benchmark_of(row["benchmark"]), row["round"]): Target(
            row["metric"], row["target"], row["evaluation"], row["offline"] == "yes"
        )
        for row in rows("targets.csv")
    }
