"""What the answers of predictors are worth: errors, the efficiency that favours one best, and ratios of rates."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence

GRID = [n / 1000 for n in range(50, 1001)]
"""Efficiencies that are tried."""


def errors(predicted: Sequence[float], published: Sequence[float]) -> list[float]:
    """Predicted / published - 1 of each run."""
    return [a / b - 1 for a, b in zip(predicted, published, strict=True)]


def typical(found: Sequence[float]) -> float:
    """The median size of errors."""
    return statistics.median(abs(error) for error in found)


def efficiency(runs: Sequence[tuple[float, float]]) -> float:
    """The efficiency of `GRID` at which step times of ideal / efficiency have the smallest median error.

    `runs`: (ideal step time, published step time) of each.
    """
    return min(GRID, key=lambda share: typical([ideal / share / published - 1 for ideal, published in runs]))


def favoured(
    ideal: Sequence[float], published: Sequence[float], kinds: Sequence[Hashable]
) -> tuple[list[float], dict[Hashable, float]]:
    """Step times with the best efficiency of each kind, chosen on the very runs that it is judged by; and which."""
    every = list(zip(ideal, published, kinds, strict=True))
    best = {kind: efficiency([(a, b) for a, b, k in every if k == kind]) for kind in set(kinds)}
    return [one / best[kind] for one, _, kind in every], best


def left_out(
    ideal: Sequence[float], published: Sequence[float], kinds: Sequence[Hashable], groups: Sequence[Hashable]
) -> list[float | None]:
    """Step times with the efficiency that is best for the same kind on all other groups; None where there is none."""
    every = list(zip(ideal, published, kinds, groups, strict=True))
    shares: dict[tuple[Hashable, Hashable], float | None] = {}
    for kind, group in set(zip(kinds, groups, strict=True)):
        others = [(a, b) for a, b, k, g in every if k == kind and g != group]
        shares[kind, group] = efficiency(others) if others else None
    found = [(one, shares[kind, group]) for one, _, kind, group in every]
    return [one / share if share else None for one, share in found]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and largest."""
    return statistics.median(values), min(values), max(values)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """`spread` of ours / theirs, round by round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])
