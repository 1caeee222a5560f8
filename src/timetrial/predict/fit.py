"""Fit the constants to published step times, and say how well they predict machines they were not fitted to.

Damped Gauss-Newton on log(predicted / published) with a prior on every constant (`constants.KINDS`) and Huber's
weights, so that single odd rows do not steer. Nothing is fitted per row: the constants are those of `constants.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timetrial.predict.constants import KINDS, Constants, on

Floats = NDArray[np.float64]

HUBER = 0.06
"""Residual beyond which a row's pull grows no more."""
NOISE = 0.03
"""Of a published step time between submitters of one configuration, relative."""


@dataclass(frozen=True)
class Point:
    """One configuration with published step times."""

    system: str
    generation: str
    stack: str
    published_s: float
    """Of several published runs the median."""
    predict: Callable[[Constants], float]
    """Seconds under some constants."""


def names(points: Sequence[Point]) -> list[str]:
    """The constants that these points bear on."""
    generations = sorted({p.generation for p in points})
    stacks = sorted({p.stack for p in points})
    both = sorted({on(p.stack, p.generation) for p in points})
    found = []
    for kind, about in KINDS.items():
        of = {"generation": generations, "stack": stacks, "both": both, "all": [""]}[about.of]
        found += [f"{kind}.{name}" if name else kind for name in of]
    return found


def fit(
    points: Sequence[Point], wanted: Sequence[str], basis: str, *, rounds: int = 10, first: Constants | None = None
) -> Constants:
    """Constants `wanted` that explain `points` best within their ranges, searched from `first` on."""
    problem = _Problem(points, wanted)
    x = problem.start if first is None else np.log([max(first.values[name], 1e-9) for name in wanted])
    x, damping = np.clip(x, problem.low, problem.high), 1e-2
    r = problem.residuals(x)
    cost = problem.cost(r, x)
    for _ in range(rounds):
        jacobian = problem.jacobian(x, r)
        w = np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-12)) / NOISE**2
        normal = jacobian.T @ (w[:, None] * jacobian) + np.diag(1 / problem.spread**2)
        gradient = jacobian.T @ (w * r) + (x - problem.start) / problem.spread**2
        before = cost
        for _ in range(6):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial = np.clip(x + np.clip(move, -0.5, 0.5), problem.low, problem.high)
            trial_r = problem.residuals(trial)
            if (trial_cost := problem.cost(trial_r, trial)) < cost:
                x, r, cost, damping = trial, trial_r, trial_cost, damping / 3
                break
            damping *= 5
        if before - cost < 1e-3 * before:
            break
    return problem.constants(x, basis)


class _Problem:
    """The logarithms of the constants, and what they make of the points."""

    def __init__(self, points: Sequence[Point], wanted: Sequence[str]) -> None:
        self.points, self.wanted = points, wanted
        kinds = [KINDS[name.partition(".")[0]] for name in wanted]
        self.start = np.log([max(k.start, 1e-9) for k in kinds])
        self.low = np.log([max(k.low, k.start / 50, 1e-9) for k in kinds])
        self.high = np.log([k.high for k in kinds])
        self.spread = np.array([k.spread for k in kinds])
        self.bears = [[_bears(name, p) for p in points] for name in wanted]

    def constants(self, x: Floats, basis: str = "") -> Constants:
        return Constants(dict(zip(self.wanted, np.exp(x).tolist(), strict=True)), basis)

    def residuals(self, x: Floats) -> Floats:
        constants = self.constants(x)
        return np.array([math.log(p.predict(constants) / p.published_s) for p in self.points])

    def jacobian(self, x: Floats, r: Floats) -> Floats:
        found = np.zeros((len(self.points), len(x)))
        for j, bears in enumerate(self.bears):
            step = 0.02 if x[j] + 0.02 <= self.high[j] else -0.02
            constants = self.constants(x + step * np.eye(len(x))[j])
            for i, point in enumerate(self.points):
                if bears[i]:
                    found[i, j] = (math.log(point.predict(constants) / point.published_s) - r[i]) / step
        return found

    def cost(self, r: Floats, x: Floats) -> float:
        size = np.abs(r)
        huber = np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return float(huber.sum() / NOISE**2 + (((x - self.start) / self.spread) ** 2).sum() / 2)


def _bears(name: str, point: Point) -> bool:
    of = name.partition(".")[2]
    return of in ("", point.generation, point.stack, on(point.stack, point.generation))


def left_out(
    points: Sequence[Point], wanted: Sequence[str], whole: Constants, say: Callable[[str], None] = lambda _: None
) -> dict[str, Constants]:
    """For each system the constants fitted to all other systems' points; `whole`: those fitted to all, to begin at."""
    found = {}
    for system in sorted({p.system for p in points}):
        others = [p for p in points if p.system != system]
        bearing = set(names(others))
        kept = [name for name in wanted if name in bearing]
        say(f"  without {system}")
        found[system] = fit(others, kept, f"all systems but {system}", rounds=5, first=whole)
    return found


def summary(errors: Sequence[float]) -> Mapping[str, float]:
    """n, median and 90th percentile of the sizes of errors, and their median with its sign."""
    sizes = sorted(abs(e) for e in errors)
    if not sizes:
        return {"n": 0}
    at = min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)
    return {
        "n": len(sizes),
        "median": float(np.median(sizes)),
        "p90": sizes[at],
        "bias": float(np.median(np.array(errors))),
    }
