"""Runs and comparisons of runs that the claims of announcements are made of: prediction beside publication."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from timetrial.predict import answer, cache, placement, refit, sure
from timetrial.predict.constants import load as load_constants
from timetrial.predict.converge import TimeToTrain
from timetrial.predict.predict import Prediction, compiled, pricing_of, stack_of, system_of
from timetrial.predict.request import clean, request
from timetrial.predict.step import predict_step
from timetrial.predict.sure import Interval, Validated
from timetrial.systems.stack import Stack
from timetrial.systems.system import System

Cells = Mapping[str, str]
"""Column of `data/step_times.csv` -> cell."""

FOUR_OF_FIVE = 0.8
PAIRS = 10
"""Pairs of validated runs that a range of ratios needs."""
GROUPS = {"tp": "tensor parallel", "cp": "context parallel", "edge": "pipeline neighbours", "dp-cp": "gradients"}
"""Group of `placement.lie` -> words."""
ONLY_OF_THE_RUN = ("step_time_s", "tok_s_gpu", "tflops_gpu", "ttt_min", "samples_to_converge", "DP")
"""Columns that hold for the published run alone, and not for a run that differs from it."""


@dataclass(frozen=True)
class Run:
    """One run, predicted, and published where somebody ran it."""

    label: str
    prediction: Prediction
    interval: Interval
    """Within what the step time lies."""
    verdict: str
    """Whether it fits into memory, for people."""
    time: TimeToTrain | None
    """None where there is no target."""
    published_s: float | None
    """Published step time, s."""
    published_min: float | None
    """Published time to train, minutes."""
    source: str
    """Of the published figures; "" where nobody published it."""

    @property
    def gpus(self) -> int:
        return self.prediction.request.plan.world_size

    @property
    def seconds(self) -> float:
        """Predicted step time, s."""
        return self.prediction.step.seconds

    @property
    def gpu_s(self) -> float:
        """Predicted GPU seconds of one sample."""
        return self.seconds * self.gpus / self.prediction.request.plan.gbs

    @property
    def parts(self) -> dict[str, float]:
        """Part of the breakdown -> GPU seconds of one sample; they add up to `gpu_s`."""
        share = self.gpus / self.prediction.request.plan.gbs
        return {part: seconds * share for part, seconds in self.prediction.step.parts.items()}

    @property
    def mapping(self) -> str:
        """The plan: degrees above one, micro and global batch, order."""
        p = self.prediction.request.plan
        degrees = {"tp": p.tp, "cp": p.cp, "pp": p.pp, "vp": p.vp, "dp": p.dp, "mbs": p.mbs, "gbs": p.gbs}
        return " ".join([*(f"{k}{n}" for k, n in degrees.items() if n > 1 or k in ("mbs", "gbs")), p.order])


@dataclass(frozen=True)
class Measure:
    """What two runs are compared by: less is better."""

    words: str
    predicted: Callable[[Run], float]
    published: Callable[[Run], float | None]


def _gpu_minutes(run: Run) -> float:
    if run.time is None:
        raise ValueError(f"{run.label} has no time to train")
    return run.time.minutes * run.gpus


def _published_gpu_s(run: Run) -> float | None:
    return run.published_s and run.published_s * run.gpus / run.prediction.request.plan.gbs


def _published_gpu_minutes(run: Run) -> float | None:
    return run.published_min and run.published_min * run.gpus


THROUGHPUT = Measure("samples/s per GPU", lambda run: run.gpu_s, _published_gpu_s)
TIME = Measure("time to train", lambda run: _gpu_minutes(run) / run.gpus, lambda run: run.published_min)
GPU_TIME = Measure("GPU time to train", _gpu_minutes, _published_gpu_minutes)


@dataclass(frozen=True)
class Compared:
    """How many times better `after` is than `before`."""

    before: Run
    after: Run
    measure: Measure

    @property
    def ratio(self) -> float:
        """Predicted; above 1 where `after` is better."""
        return self.measure.predicted(self.before) / self.measure.predicted(self.after)

    @property
    def published(self) -> float | None:
        """Published; None where one of the two was not published."""
        before, after = self.measure.published(self.before), self.measure.published(self.after)
        return before / after if before and after else None

    @property
    def range(self) -> tuple[float, float, int]:
        """(low, high, pairs): within what the ratio lies, four times of five, by pairs of validated runs.

        Errors that both runs share cancel in a ratio. How much is seen at pairs of validated runs that are related
        as these two are: of one model, and of one system, stack and precision where these two are.
        """
        width, pairs = _width(_relation(_as_validated(self.before), _as_validated(self.after)), sure.validated())
        return self.ratio * math.exp(-width), self.ratio * math.exp(width), pairs


def _as_validated(run: Run) -> Validated:
    p = run.prediction
    q = p.request
    generation = p.system.accelerator.generation
    return Validated("", q.model, p.system.name, generation, p.stack.name, q.precision, run.gpus, "", 0.0, 0.0, 0.0)


def _relation(a: Validated, b: Validated) -> tuple[bool, bool, bool]:
    return a.system == b.system, a.stack == b.stack, a.precision == b.precision


@lru_cache(maxsize=32)
def _width(wanted: tuple[bool, bool, bool], runs: tuple[Validated, ...]) -> tuple[float, int]:
    """Half width in the logarithm, and the pairs behind it; fewer things must agree where there are too few pairs."""
    once = refit.distinct(runs)
    for kept in (3, 2, 1, 0):
        sizes = sorted(
            abs(math.log((1 + a.error) / (1 + b.error)))
            for i, a in enumerate(once)
            for b in once[:i]
            if a.model == b.model and _relation(a, b)[:kept] == wanted[:kept]
        )
        if len(sizes) >= PAIRS:
            return sizes[math.ceil(FOUR_OF_FIVE * len(sizes)) - 1], len(sizes)
    return math.log1p(sure.DEFAULT), 0


@lru_cache(maxsize=1)
def _table() -> tuple[Cells, ...]:
    with refit.bundled().open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def published(**wanted: str) -> Cells:
    """The row of the package's published step times with these cells. ValueError unless it is the only one."""
    found = [row for row in _table() if all(row[column] == cell for column, cell in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{len(found)} published rows have {wanted}; exactly one must")
    return found[0]


def entry(round_: str, benchmark: str, system_id: str) -> Cells:
    """The row of a submission."""
    return published(round=round_, benchmark=benchmark, system_id=system_id)


def changed(row: Cells, **cells: str) -> Cells:
    """A run that nobody published: a row with other cells, without what was measured."""
    unknown = set(cells) - set(row)
    if unknown:
        raise ValueError(f"no column {', '.join(sorted(unknown))}")
    return {**row, **dict.fromkeys(ONLY_OF_THE_RUN, ""), **cells}


def run(label: str, row: Cells, *, stack: Stack | None = None, domain: int | None = None) -> Run:
    """Predict a row. `stack`: in place of the row's own; `domain`: accelerators of a scale-up domain, the same."""
    wanted = request(row)
    system = system_of(wanted)
    if domain is not None:
        system = _with_domain(system, domain)
    stack = stack or stack_of(wanted, system)
    layers = compiled(wanted, stack, cache.layers(wanted.config))
    pricing = pricing_of(wanted, system, stack, load_constants())
    prediction = Prediction(wanted, system, stack, predict_step(wanted.config, layers, system, pricing), layers)
    cells = {name: clean(cell) for name, cell in row.items()}
    step = cells["step_time_s"]
    if not step and cells["tok_s_gpu"]:
        step = str(wanted.plan.gbs * wanted.seq_len / wanted.plan.world_size / float(cells["tok_s_gpu"]))
    return Run(
        label=label,
        prediction=prediction,
        interval=answer.interval_of(prediction),
        verdict=answer.memory_of(prediction).verdict(system.accelerator.memory_bytes).text,
        time=answer.time_of(prediction)[0],
        published_s=float(step) if step else None,
        published_min=float(cells["ttt_min"]) if cells["ttt_min"] else None,
        source=cells["source"] + (f", {cells['release']}" if cells["release"] else "") if step else "",
    )


def lies(one: Run) -> str:
    """Which groups of a run share a scale-up domain."""
    plan, system = one.prediction.request.plan, one.prediction.system
    words = []
    for group, name in GROUPS.items():
        if (group == "edge" and plan.pp == 1) or (group in ("tp", "cp") and getattr(plan, group) == 1):
            continue
        at = placement.lie(plan, system, group)
        across = f"{at.in_domain} of {at.ranks} ranks in each of {at.domains} domains"
        words.append(f"{name} {'inside one domain' if at.inside else across}")
    return "; ".join(words)


def _with_domain(system: System, domain: int) -> System:
    """The same accelerators, network and rates in scale-up domains of another size, and the name of none."""
    node = replace(system.node, accelerators=min(domain, system.node.accelerators))
    return replace(system, node=node, scale_up=replace(system.scale_up, domain=domain))
