"""What the plans of a search share: traces, kernels, their prices by placement, and what layers need of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from timetrial.config import Plan, RunConfig
from timetrial.predict import memory, placement, predict
from timetrial.predict.batches import traced
from timetrial.predict.bound import least_s
from timetrial.predict.constants import Constants
from timetrial.predict.events import LayerTrace
from timetrial.predict.kernels import Layer
from timetrial.predict.memory import Memory
from timetrial.predict.price import Pricing
from timetrial.predict.request import Request
from timetrial.predict.schedule import Durations
from timetrial.predict.space import Space
from timetrial.predict.step import Passes, Step, kind_seconds, passes, predict_step
from timetrial.systems.stack import Stack
from timetrial.systems.system import System

Key = tuple[str | int, ...]
Lies = tuple[placement.Placement, ...]
PipelineSeconds = Callable[[Plan, Durations], float]


@dataclass(frozen=True)
class Question:
    """What is asked of every plan."""

    base: Request
    space: Space
    system: System
    stack: Stack
    constants: Constants
    traces: Callable[[RunConfig], dict[str, LayerTrace]]

    def request(self, plan: Plan, precision: str) -> Request:
        """The request for one plan."""
        return replace(self.base, config=replace(self.base.config, plan=plan), precision=precision)


def trace_key(plan: Plan) -> Key:
    """What the traces of plans of one request depend on: see `cache.essence`."""
    other_loss = plan.pp > 1 and plan.tp == 1
    return (plan.tp, plan.cp, plan.ep, plan.mbs, plan.recompute, plan.precision, int(other_loss))


class Shelf:
    """The layers of one trace key in one precision. Raises UserError where they cannot be traced."""

    def __init__(self, question: Question, plan: Plan, precision: str) -> None:
        self.question, self.precision = question, precision
        self.key = trace_key(plan)
        self._request = question.request(plan, precision)
        self._traces = traced(self._request.config, question.traces)
        stack = question.stack
        self._measured = memory.measure(self._traces, stack.fuse)
        self._policy = memory.policy(stack, stack.recipe(self._request.recipe), self._request.attention)
        self._n_layers = self._request.config.model.n_layers
        self._priced: dict[Lies, tuple[Pricing, Passes]] = {}
        self._sums: dict[Lies, dict[str, float]] = {}
        self._lies: dict[tuple[str, int, int], Lies] = {}

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """The stack's kernels; some tens of milliseconds, not spent where no plan fits into memory."""
        return predict.compiled(self._request, self.question.stack, self._traces)

    def memory(self, plan: Plan) -> Memory:
        """Bytes of each pipeline rank."""
        return memory.memory(
            plan, self._n_layers, self._measured, self._policy, self.question.system.accelerator.memory_bytes
        )

    def least_s(self, plan: Plan) -> float:
        """Seconds that a step takes at least."""
        pricing, known = self._prices(plan)
        lies = self._lie(plan)
        if lies not in self._sums:
            self._sums[lies] = {kind: s.total for kind, s in kind_seconds(known, pricing).items()}
        return least_s(plan, self._n_layers, self._sums[lies], pricing.fitted.step_s, pricing.fitted.skew)

    def step(self, plan: Plan, pipeline_s: PipelineSeconds | None) -> Step:
        """The step, its pipeline by a formula; laid out where that is None."""
        pricing, known = self._prices(plan)
        config = self.question.request(plan, self.precision).config
        return predict_step(config, self.layers, self.question.system, pricing, known=known, pipeline_s=pipeline_s)

    def _prices(self, plan: Plan) -> tuple[Pricing, Passes]:
        """Prices of the layers as `plan` lies on the machine."""
        lies = self._lie(plan)
        if lies not in self._priced:
            q = self.question
            pricing = predict.pricing_of(q.request(plan, self.precision), q.system, q.stack, q.constants)
            self._priced[lies] = pricing, passes(self.layers, pricing)
        return self._priced[lies]

    def _lie(self, plan: Plan) -> Lies:
        """Where the groups are whose collectives are inside of layers."""
        key = (plan.order, plan.pp, plan.dp)
        if key not in self._lies:
            axes = ("tp", "cp", *(("ep",) if plan.ep > 1 else ()))
            self._lies[key] = tuple(placement.lie(plan, self.question.system, axis) for axis in axes)
        return self._lies[key]
