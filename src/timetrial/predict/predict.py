"""From a request to an answer: traces, the stack's kernels, their prices, the step, memory and time to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from timetrial.config import RunConfig
from timetrial.errors import UserError
from timetrial.predict import cache, network, placement
from timetrial.predict.constants import KINDS, Constants, on
from timetrial.predict.constants import load as load_constants
from timetrial.predict.events import LayerTrace
from timetrial.predict.kernels import Layer, compile_layer
from timetrial.predict.local import predict_local
from timetrial.predict.price import Fitted, Pricing
from timetrial.predict.request import Request
from timetrial.predict.step import Step, predict_step
from timetrial.systems import stack as stacks
from timetrial.systems import system as systems
from timetrial.systems.rates import Rates
from timetrial.systems.stack import Stack
from timetrial.systems.system import System

GRAPHS = {"full_iter": "full", "layer": "layer", "mcore": "layer"}
"""What a published table calls a CUDA graph -> which launches it takes off the host."""


@dataclass(frozen=True)
class Prediction:
    """What a run would cost."""

    request: Request
    system: System
    stack: Stack
    step: Step
    layers: Mapping[str, Layer]

    @property
    def tokens_per_s_per_gpu(self) -> float:
        plan = self.request.plan
        return plan.gbs * self.request.seq_len / self.step.seconds / plan.world_size

    @property
    def flops_per_s_per_gpu(self) -> float:
        """Model FLOP/s per accelerator: no recomputation, causal attention halved."""
        return self.request.config.flops_per_step / self.step.seconds / self.request.plan.world_size


def system_of(request: Request) -> System:
    """The system that a request names."""
    return systems.named(request.system)


def stack_of(request: Request, system: System) -> Stack:
    """The stack of a request's release or round."""
    vendor = system.accelerator.vendor
    hints = request.hints
    for text in (hints.release, hints.source):
        if text and (found := stacks.for_release(text)) is not None:
            return found
    round_ = request.round if request.round.startswith("v") or not request.round else f"v{request.round}"
    return stacks.for_round(round_ or request.config.round, vendor)


def predict(
    request: Request,
    *,
    stack: Stack | None = None,
    constants: Constants | None = None,
    traces: Callable[[RunConfig], dict[str, LayerTrace]] = cache.layers,
) -> Prediction:
    """Predict one request. Raises UserError where the system, stack or mapping cannot be."""
    system = system_of(request)
    stack = stack or stack_of(request, system)
    if system.accelerator.generation == "cpu":  # the engine's own eager code, operator by operator
        stack.recipe(request.recipe)
        return Prediction(request, system, stack, *predict_local(request.config, system))
    layers = compiled(request, stack, traces(request.config))
    pricing = pricing_of(request, system, stack, constants or load_constants())
    return Prediction(request, system, stack, predict_step(request.config, layers, system, pricing), layers)


def compiled(request: Request, stack: Stack, traces: Mapping[str, LayerTrace]) -> dict[str, Layer]:
    """The stack's kernels of each kind of layer; of one that may share attention in two ways, both."""
    recipe = stack.recipe({"tf32": "fp32"}.get(request.recipe, request.recipe))
    made: dict[str, Layer] = {}
    for kind, trace in traces.items():
        for context in stack.contexts if request.plan.cp > 1 else stack.contexts[:1]:
            name = kind if context == stack.contexts[0] else f"{kind} by {context}"
            layer = compile_layer(trace, stack, recipe, request.attention, context)
            if name == kind or layer != made[kind]:
                made[name] = layer
    return made


def pricing_of(
    request: Request,
    system: System,
    stack: Stack,
    constants: Constants,
    cached: dict[tuple[str, str, int], float] | None = None,
) -> Pricing:
    """Prices on the plan's placement, with the run's own switches where the request tells them.

    `cached`: collectives' seconds on that placement, for who prices it often.
    """
    plan, hints = request.plan, request.hints
    cached = {} if cached is None else cached

    def collective_s(kind: str, axis: str, size: int) -> float:
        key = (kind, axis, size)
        if key not in cached:
            cached[key] = network.collective_s(kind, size, placement.lie(plan, system, axis), system).seconds
        return cached[key]

    rates = Rates.load(system)
    overlaps = set(stack.overlaps)
    if hints.tp_comm_overlap is False:
        overlaps.discard("tp")
    if hints.overlap_grad_reduce is False and hints.overlap_param_gather is False:
        overlaps.discard("dp")
    return Pricing(
        rates,
        stack,
        fitted(constants, system, stack, "matmul.bf16" in rates.assumed),
        collective_s,
        graphs=GRAPHS.get(hints.cuda_graph, "none") if hints.cuda_graph else stack.graphs,
        overlaps=frozenset(overlaps),
        watts=system.accelerator.tdp_w,
        again=hints.recompute_layers / request.config.model.n_layers if plan.recompute == "none" else 0.0,
    )


def fitted(constants: Constants, system: System, stack: Stack, derived: bool) -> Fitted:
    """The constants of one system under one stack. `derived`: whether its rates are those of another machine."""
    generation, own = system.accelerator.generation, stack.constants

    def value(kind: str, of: str = "") -> float:
        return own.get(kind, constants.get(kind, of))

    return Fitted(
        speed=value("speed", generation) * value("kernels", stack.name) * value("ripeness", on(stack.name, generation)),
        fp4_kernels=value("fp4_kernels", stack.name),
        launch_s=value("launch_s", stack.name),
        step_s=value("step_s", stack.name),
        flops_per_joule=value("flops_per_joule", generation) if derived else None,
        **{name: value(name) for name, kind in KINDS.items() if kind.of == "all"},
    )


def refused(request: Request) -> None:
    """Raise UserError where the stack pass cannot stand for the request."""
    if request.plan.ep > 1:
        raise UserError("expert parallelism needs a mixture-of-experts workload; set ep=1")
