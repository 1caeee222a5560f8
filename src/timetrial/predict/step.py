"""One step: layers to stages, stages to a pipeline, gradients over data-parallel ranks, the optimizer.

step = pipeline(micro batches) + gradient and parameter communication that computing does not hide
       + optimizer + what a step costs outside of the model
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from timetrial.config import Plan, RunConfig
from timetrial.parallel.plan import split_layers, stage_rank
from timetrial.predict import network, placement
from timetrial.predict.kernels import Layer
from timetrial.predict.price import LayerSeconds, Pricing, Seconds
from timetrial.systems.rates import Rates
from timetrial.systems.stack import Stack
from timetrial.systems.system import System


@dataclass(frozen=True)
class Stage:
    """One virtual pipeline stage."""

    rank: int
    """Pipeline rank that holds it."""
    layers: int
    embed: bool
    head: bool
    seconds: LayerSeconds
    """Of one micro batch."""
    weights: int
    """Elements on one rank before sharding over data-parallel ranks."""
    trained: int
    """Those of them that are trained."""


@dataclass(frozen=True)
class Step:
    """The predicted step."""

    seconds: float
    parts: Mapping[str, float]
    """Part of the breakdown -> seconds of the slowest pipeline rank; they add up to `seconds`."""
    stages: tuple[Stage, ...]
    micro_batches: int
    evaluation_s: float
    """Forward passes over one evaluation's samples, s."""


def stages_of(config: RunConfig, layers: Mapping[str, Layer], pricing: Pricing) -> list[Stage]:
    """The virtual stages of the plan, in the order of the model, each with its time."""
    plan = config.plan
    cost = {kind: pricing.layer_s(layer) for kind, layer in layers.items()}
    made = []
    for i, (embed, kept, head) in enumerate(split_layers(config.model.n_layers, plan.pp * plan.vp)):
        counts = {"embed": int(embed), "block": len(kept), "head": int(head)}
        forward, backward, weight = Seconds(), Seconds(), 0.0
        for kind, count in counts.items():
            if count:
                forward += cost[kind].forward * count
                backward += cost[kind].backward * count
                weight += cost[kind].weight * count
        made.append(
            Stage(
                stage_rank(i, plan),
                len(kept),
                embed,
                head,
                LayerSeconds(forward, backward, weight),
                weights=sum(layers[kind].weights * n for kind, n in counts.items() if n),
                trained=sum(layers[kind].trained * n for kind, n in counts.items() if n),
            )  # fmt: skip
        )
    return made


def pricing_of(
    config: RunConfig, system: System, stack: Stack, rates: Rates, *, graphs: str | None, tp_overlap: bool | None,
    speed: float = 1.0,
) -> Pricing:  # fmt: skip
    """Prices on the plan's placement. `graphs` and `tp_overlap` are the run's switches; the stack's where None."""
    plan = config.plan
    cached: dict[tuple[str, str, int], float] = {}

    def collective_s(kind: str, axis: str, size: int) -> float:
        key = (kind, axis, size)
        if key not in cached:
            lies = placement.lie(plan, system, axis)
            cached[key] = network.collective_s(kind, size, lies, system).seconds
        return cached[key]

    return Pricing(
        rates,
        stack,
        collective_s,
        speed,
        graphs or stack.graphs,
        True if tp_overlap is None else tp_overlap,
        launch_s=stack.launch_s if system.accelerator.generation != "cpu" else system.host.launch_s,
    )


def predict_step(config: RunConfig, layers: Mapping[str, Layer], system: System, pricing: Pricing) -> Step:
    """Seconds of one optimizer step."""
    plan, stack = config.plan, pricing.stack
    m = plan.grad_accumulation_steps
    stages = stages_of(config, layers, pricing)
    ranks: list[Seconds] = []
    for rank in range(plan.pp):
        own = [s.seconds for s in stages if s.rank == rank]
        ranks.append(sum((s.forward + s.backward for s in own), Seconds()) * m)
    slowest = max(range(plan.pp), key=lambda r: ranks[r].total)
    parts = dict(ranks[slowest].parts)
    busy = ranks[slowest].total
    if plan.pp > 1:
        mean = sum(r.total for r in ranks) / plan.pp / m  # one micro batch through one rank's stages
        parts["bubble"] = (plan.pp - 1) / plan.vp * mean if plan.schedule == "1f1b" else 0.3 * (plan.pp - 1) * mean
        edge = placement.lie(plan, system, "edge")
        dim = getattr(config.model, "dim", 0)
        size = plan.mbs * config.data.seq_len // plan.cp // plan.tp * dim * 2
        send = network.collective_s("send", size, edge, system).seconds / stack.network
        exposed = 2 * (plan.pp - 1) * send + (0 if stack.pp_overlap else 2 * m * plan.vp * send)
        parts["pp"] = exposed
    window = busy / m  # the last backward and the first forward pass are beside the communication of data parallelism
    parts["dp"] = _data_parallel(plan, stages, slowest, system, pricing, window)
    held = max(sum(s.trained for s in stages if s.rank == r) for r in range(plan.pp)) / plan.shard_size
    parts["optimizer"] = pricing.rates.memory_s(int(held * 30 / stack.memory * pricing.rates.memory_share))
    parts["fixed"] = stack.step_s
    total = sum(parts.values())
    return Step(total, parts, tuple(stages), m, _evaluation(config, stages, m))


def _data_parallel(
    plan: Plan, stages: list[Stage], rank: int, system: System, pricing: Pricing, window: float
) -> float:
    """Seconds of gradient and parameter communication that computing does not hide."""
    copies = plan.dp * plan.cp
    if copies == 1:
        return 0.0
    stack = pricing.stack
    trained = max(sum(s.trained for s in stages if s.rank == r) for r in range(plan.pp))
    lies = placement.lie(plan, system, "dp-cp")
    scatter = network.collective_s("reduce_scatter", int(trained * stack.gradient_bytes), lies, system).seconds
    gather = network.collective_s("all_gather", int(trained * stack.parameter_bytes), lies, system).seconds
    seconds = (scatter + gather) / stack.network
    return max(0.0, seconds - stack.dp_overlap * window)


def _evaluation(config: RunConfig, stages: list[Stage], m: int) -> float:
    plan = config.plan
    forward = max(sum(s.seconds.forward.total for s in stages if s.rank == r) for r in range(plan.pp))
    batches = math.ceil(config.evaluation.samples / (plan.mbs * plan.dp))
    return forward * (batches + (plan.pp - 1) / plan.vp)
