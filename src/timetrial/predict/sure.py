"""How sure a prediction is: the errors of the published runs nearest to it, each from a fit without its system.

An error of predicted / published - 1 is kept for every published run that was validated (`validate.py`). The
interval of a prediction spans four fifths of the errors of the nearest of them, widened where none is near.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from timetrial.predict.request import Request
from timetrial.systems.stack import Stack
from timetrial.systems.system import System

NEAREST = 12
"""Validated runs that make an interval."""
FAR = 2.0
"""Distance from which on a prediction counts as outside of what was validated."""
LOCAL = 0.25
"""Half width on a machine that was calibrated: what `benchmarks/predict_local.py` holds predictions to at worst."""
DEFAULT = 0.25
"""Half width where nothing was validated."""


@dataclass(frozen=True)
class Validated:
    """One published run, and how far its prediction was off."""

    source: str
    """Round and submitter, or release."""
    model: str
    system: str
    generation: str
    stack: str
    precision: str
    accelerators: int
    mapping: str
    """As in "tp4 pp8 vp8 cp2 dp8 mbs1 gbs896"."""
    published_s: float
    """Step time, s."""
    error: float
    """Predicted / published - 1, under constants fitted without this system."""
    fitted_error: float
    """The same under the package's constants."""


@dataclass(frozen=True)
class Interval:
    """Within what a step time lies four times of five, by what was seen nearby."""

    low_s: float
    high_s: float
    basis: str
    """For people."""
    outside: bool
    """Whether nothing like it was validated."""


COLUMNS = tuple(Validated.__dataclass_fields__)


@lru_cache(maxsize=1)
def validated() -> tuple[Validated, ...]:
    """All validated runs; empty where no fit has been made."""
    try:
        text = (resources.files("timetrial.predict") / "data" / "validated.csv").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    return tuple(_row(row) for row in csv.DictReader(io.StringIO(text)))


def dumps(runs: Sequence[Validated]) -> str:
    """As the CSV that `validated` reads."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        values = [getattr(run, name) for name in COLUMNS]
        writer.writerow([f"{v:.5g}" if isinstance(v, float) else v for v in values])
    return out.getvalue()


def interval(request: Request, system: System, stack: Stack, seconds: float) -> Interval:
    """The interval around a predicted step time of `seconds`."""
    if system.accelerator.generation == "cpu":
        basis = "a machine that was calibrated; benchmarks/predict_local.py compares with runs on it"
        return Interval(seconds / (1 + LOCAL), seconds * (1 + LOCAL), basis, False)
    near = sorted(((_distance(run, request, system, stack), run) for run in validated()), key=lambda pair: pair[0])
    near = near[:NEAREST]
    if not near:
        return Interval(
            seconds / (1 + DEFAULT), seconds * (1 + DEFAULT), "nothing validated: the range is assumed", True
        )
    errors = sorted(run.error for _, run in near)
    low, high = _quantile(errors, 0.1), _quantile(errors, 0.9)
    farthest = near[0][0]
    widen = max(1.0, farthest)  # what differs in kind, not in degree, makes the errors of others count less
    low, high = min(low, -0.01) * widen, max(high, 0.01) * widen
    outside = farthest >= FAR
    names = f"{near[0][1].source}" if len(near) == 1 else f"{near[0][1].source} and {len(near) - 1} others"
    where = "outside of the validated range; " if outside else ""
    return Interval(
        seconds / (1 + max(high, 0.01)),
        seconds / (1 + max(low, -0.9)),
        f"{where}errors of the {len(near)} nearest validated runs ({names}), four of five of them within it",
        outside,
    )


def _distance(run: Validated, request: Request, system: System, stack: Stack) -> float:
    """Nought for the same machine, software, model and precision at the same scale; 1 for each that differs much."""
    far = abs(math.log2(run.accelerators / request.plan.world_size)) / 4
    far += 0.0 if run.system == system.name else 0.5 if run.generation == system.accelerator.generation else 1.5
    far += 0.0 if run.model == request.model else 0.7
    far += 0.0 if run.precision == request.precision else 0.5
    far += 0.0 if run.stack == stack.name else 0.3
    return far


def _quantile(values: list[float], share: float) -> float:
    at = share * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def _row(row: dict[str, str]) -> Validated:
    numbers = {"accelerators": int, "published_s": float, "error": float, "fitted_error": float}
    return Validated(**{name: numbers.get(name, str)(row[name]) for name in COLUMNS})
