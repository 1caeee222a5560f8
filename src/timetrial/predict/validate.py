"""Published step times as points to fit and to check predictions against."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from timetrial.config import Plan
from timetrial.errors import UserError
from timetrial.predict import cache, predict
from timetrial.predict.actions import table
from timetrial.predict.constants import Constants
from timetrial.predict.fit import Point
from timetrial.predict.price import Totals
from timetrial.predict.quick import formula_s
from timetrial.predict.request import Request, clean, normal, request
from timetrial.predict.schedule import Durations, lay
from timetrial.predict.step import Step, passes, predict_step
from timetrial.systems.stack import Stack
from timetrial.systems.system import System


@dataclass(frozen=True)
class Published:
    """One published run that can be predicted."""

    request: Request
    system: System
    stack: Stack
    seconds: float
    """Published step time."""
    source: str
    """Round and submitter, or release."""
    step: Callable[[Constants], Step]
    """The predicted step under some constants."""

    @property
    def key(self) -> str:
        """Of the configuration: all that a prediction depends on, but for what differs in the noise."""
        q, p = self.request, self.request.plan
        run = (q.model, self.system.name, self.stack.name, q.recipe, q.attention, q.hints.cuda_graph, q.seq_len)
        mapping = (p.tp, p.pp, p.vp, p.cp, p.ep, p.dp, p.mbs, p.gbs, p.order, p.zero, q.hints.tp_comm_overlap)
        return "|".join(map(str, (*run, *mapping)))


def points(runs: Iterable[Published]) -> list[Point]:
    """One point a configuration: of several runs of it the median."""
    groups: dict[str, list[Published]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    return [_point(same) for same in groups.values()]


def _point(same: list[Published]) -> Point:
    one = same[0]
    return Point(
        one.system.name,
        one.system.accelerator.generation,
        one.stack.name,
        statistics.median(run.seconds for run in same),
        lambda constants: one.step(constants).seconds,
    )


def read(paths: Iterable[str | Path]) -> tuple[list[Published], list[str]]:
    """The runs of tables like `llm_step_times.csv` and `vendor_step_times.csv`, and why other rows are left out."""
    found, left_out = [], []
    for path in paths:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    found.append(published(row))
                except UserError as error:
                    left_out.append(f"{Path(path).name} line {number}: {error}")
    return found, left_out


def published(row: Mapping[str, str]) -> Published:
    """One row. Raises UserError where it cannot be predicted, tells no step time, or its configuration is a guess."""
    cells = {normal(name): clean(cell) for name, cell in row.items() if name and cell is not None}
    if int(cells.get("config_ties") or 1) > 1:
        raise UserError("several configurations fit the row (config_ties)")
    wanted = request(row)
    seconds = _seconds(cells, wanted)
    _check_work(cells, wanted)
    system = predict.system_of(wanted)
    stack = predict.stack_of(wanted, system)
    layers = predict.compiled(wanted, stack, cache.layers(wanted.config))
    memory: dict[tuple[str, str, int], float] = {}
    known: dict[str, tuple[Totals, Totals]] = {}

    pipeline = _Pipeline()

    def step(constants: Constants) -> Step:
        pricing = predict.pricing_of(wanted, system, stack, constants, memory)
        if not known:
            known.update(passes(layers, pricing))
            start = predict.pricing_of(wanted, system, stack, Constants({}), memory)
            predict_step(wanted.config, layers, system, start, known=known, pipeline_s=pipeline)  # for its ratio
        return predict_step(wanted.config, layers, system, pricing, known=known, pipeline_s=pipeline)

    source = " ".join(x for x in (wanted.round, cells.get("submitter", ""), wanted.hints.release) if x)
    return Published(wanted, system, stack, seconds, source or wanted.hints.source, step)


class _Pipeline:
    """The formula's seconds, put right by what the table makes of the first durations asked for: the priors'."""

    def __init__(self) -> None:
        self.ratio: float | None = None

    def __call__(self, plan: Plan, durations: Durations) -> float:
        formula = formula_s(plan, durations)
        if self.ratio is None:
            self.ratio = lay(table(plan), durations, trace=False).seconds / formula
        return formula * self.ratio


def _seconds(cells: Mapping[str, str], wanted: Request) -> float:
    for name in ("step_time_s", "step_s"):
        if cells.get(name):
            return float(cells[name])
    if cells.get("tok_s_gpu"):
        return wanted.plan.gbs * wanted.seq_len / wanted.plan.world_size / float(cells["tok_s_gpu"])
    raise UserError("the row tells no step time")


def _check_work(cells: Mapping[str, str], wanted: Request) -> None:
    """Raise UserError where the row's own rates say that it is another job than its labels do."""
    if cells.get("tok_s_gpu") and cells.get("tflops_gpu"):
        told = float(cells["tflops_gpu"]) * 1e12 / float(cells["tok_s_gpu"])
        ours = wanted.config.flops_per_step / wanted.plan.gbs / wanted.seq_len
        if not 0.8 < told / ours < 1.25:
            raise UserError(
                f"the row's rates make {told:.2e} FLOP a token where {wanted.model} takes {ours:.2e}: another job "
                f"than its labels say (adapters alone take two thirds)"
            )
