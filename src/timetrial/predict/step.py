"""One step: layers to stages, stages to a pipeline, gradients over data-parallel ranks, the optimizer.

    step = pipeline(micro batches) with what of gradient and parameter communication computing does not hide
           + optimizer + what a step costs outside of the model

The pipeline is the action table that the trainer executes (`actions.py`), laid on streams (`schedule.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from timetrial.config import Plan, RunConfig
from timetrial.parallel.plan import split_layers, stage_rank
from timetrial.predict import actions, network, placement, schedule
from timetrial.predict.kernels import Layer
from timetrial.predict.price import LayerSeconds, Pricing, Seconds, Totals
from timetrial.systems.system import System

OPTIMIZER_BYTES = 30.0
"""Moved by AdamW for one element: gradient read (4) and scaled (2), master weight and two moments read and written
(24); the new weight's copy is counted with the gathers."""


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
    """Part of the breakdown -> seconds of the busiest pipeline rank; they add up to `seconds`."""
    stages: tuple[Stage, ...]
    micro_batches: int
    timeline: schedule.Timeline | None
    """None without a pipeline."""
    durations: schedule.Durations
    """What the pipeline is laid with; without one, of the single stage."""
    evaluation_s: float
    """Forward passes over one evaluation's samples, s."""


Passes = Mapping[str, tuple[Totals, Totals]]
"""Kind of layer -> its forward and its backward pass, added up: all of a price but the constants."""


def passes(layers: Mapping[str, Layer], pricing: Pricing) -> Passes:
    """The passes of each kind of layer on the pricing's placement."""
    return {
        kind: (pricing.totals(layer.only("forward")), pricing.totals(layer.only("recompute", "backward")))
        for kind, layer in layers.items()
    }


def stages_of(config: RunConfig, layers: Mapping[str, Layer], pricing: Pricing, known: Passes) -> list[Stage]:
    """The virtual stages of the plan, in the order of the model, each with its time."""
    plan = config.plan
    cost: dict[str, LayerSeconds] = {}
    for name, totals in known.items():  # "block by heads" is another way of "block": the faster counts
        kind, found = name.partition(" by ")[0], pricing.layer_s(*totals)
        if kind not in cost or found.total < cost[kind].total:
            cost[kind] = found
    alike: dict[tuple[bool, int, bool], tuple[LayerSeconds, int, int]] = {}
    made = []
    for i, (embed, kept, head) in enumerate(split_layers(config.model.n_layers, plan.pp * plan.vp)):
        key = (embed, len(kept), head)
        if key not in alike:
            counts = {kind: n for kind, n in (("embed", int(embed)), ("block", len(kept)), ("head", int(head))) if n}
            seconds = LayerSeconds(
                sum((cost[kind].forward * n for kind, n in counts.items()), Seconds()),
                sum((cost[kind].backward * n for kind, n in counts.items()), Seconds()),
                sum(cost[kind].weight * n for kind, n in counts.items()),
            )
            weights = sum(layers[kind].weights * n for kind, n in counts.items())
            alike[key] = seconds, weights, sum(layers[kind].trained * n for kind, n in counts.items())
        made.append(Stage(stage_rank(i, plan), len(kept), embed, head, *alike[key]))
    return made


def predict_step(
    config: RunConfig,
    layers: Mapping[str, Layer],
    system: System,
    pricing: Pricing,
    *,
    known: Passes | None = None,
    pipeline_s: Callable[[Plan, schedule.Durations], float] | None = None,
) -> Step:
    """Seconds of one optimizer step.

    `known`: `passes` of these layers, for who prices them often. `pipeline_s`: seconds of a pipeline by formula
    (`quick.quick_s`) instead of by its table, for searches and fits; there is no timeline then.
    """
    plan, fit = config.plan, pricing.fitted
    m = plan.grad_accumulation_steps
    stages = stages_of(config, layers, pricing, known or passes(layers, pricing))
    by_rank = [[s for s in stages if s.rank == rank] for rank in range(plan.pp)]
    work = [sum((s.seconds.forward + s.seconds.backward for s in own), Seconds()) * m for own in by_rank]
    busiest = max(range(plan.pp), key=lambda r: work[r].total)
    parts = dict(work[busiest].parts)
    gathers, scatters = _data_parallel(plan, stages, system, pricing)
    timeline = None
    durations = _durations(config, stages, gathers, scatters, system, pricing)
    if plan.pp > 1:
        if pipeline_s is not None:
            parts["bubble"] = pipeline_s(plan, durations) - work[busiest].total
        else:
            timeline = schedule.lay(actions.table(plan), durations, trace=False)
            rank = timeline.ranks[busiest]
            parts["pp"], parts["dp"] = rank.exposed_sends_s, rank.exposed_data_s
            parts["bubble"] = timeline.seconds - work[busiest].total - parts["pp"] - parts["dp"]
    else:
        first, last = stages[0].seconds.forward.total, stages[0].seconds.backward.total
        often = m if plan.zero_stage == 3 else 1  # sharded parameters come for each pass, and gradients leave
        parts["dp"] = pricing.exposed_s("dp", sum(gathers) * often, fit.dp_overlap * first * often)
        again = sum(gathers) * often if plan.zero_stage == 3 else 0.0
        parts["dp"] += pricing.exposed_s("dp", sum(scatters) * often + again, fit.dp_overlap * last * often)
    held = max(sum(s.trained for s in own) for own in by_rank) / plan.shard_size
    parts["optimizer"] = pricing.rates.memory_s(held * OPTIMIZER_BYTES / fit.memory)
    parts["fixed"] = fit.step_s
    return Step(sum(parts.values()), parts, tuple(stages), m, timeline, durations, _evaluation(config, by_rank))


def _data_parallel(
    plan: Plan, stages: list[Stage], system: System, pricing: Pricing
) -> tuple[list[float], list[float]]:
    """Seconds of each stage's parameter all-gather and gradient reduce-scatter over its data-parallel ranks."""
    if plan.dp * plan.cp == 1:
        return [0.0] * len(stages), [0.0] * len(stages)
    stack = pricing.stack
    lies = placement.lie(plan, system, "dp-cp")

    def seconds(kind: str, elements: int, size: float) -> float:
        return network.collective_s(kind, int(elements * size), lies, system).seconds / pricing.fitted.network

    # sharded parameters are gathered whether they are trained or not; others only after they have changed
    gathered = [s.weights if plan.zero_stage == 3 else s.trained for s in stages]
    gather = {n: seconds("all_gather", n, stack.parameter_bytes) for n in set(gathered)}
    scatter = {n: seconds("reduce_scatter", n, stack.gradient_bytes) for n in {s.trained for s in stages}}
    return [gather[n] for n in gathered], [scatter[s.trained] for s in stages]


def _durations(
    config: RunConfig,
    stages: list[Stage],
    gathers: list[float],
    scatters: list[float],
    system: System,
    pricing: Pricing,
) -> schedule.Durations:
    plan, edges = config.plan, len(stages) - 1
    link = latency = 0.0
    if plan.pp > 1:
        size = 2 * plan.mbs * config.data.seq_len // plan.cp // plan.tp * config.model.dim
        link, latency = network.send_s(size, placement.lie(plan, system, "edge"), system)
    backward = [s.seconds.backward.total for s in stages]
    weight = [s.seconds.weight for s in stages]
    return schedule.Durations(
        forward_s=tuple(s.seconds.forward.total for s in stages),
        backward_s=tuple(backward),
        backward_input_s=tuple(b - w for b, w in zip(backward, weight, strict=True)),
        backward_weight_s=tuple(weight),
        link_s=(link / pricing.fitted.network,) * edges,
        latency_s=(latency,) * edges,
        gather_s=tuple(gathers) if plan.pp > 1 else (),  # without a pipeline the step adds what is exposed
        reduce_s=tuple(scatters) if plan.pp > 1 else (),
        overlap_sends="pp" in pricing.stack.overlaps,
        overlap_data="dp" in pricing.overlaps,
    )


def _evaluation(config: RunConfig, by_rank: list[list[Stage]]) -> float:
    """Forward passes alone, over one evaluation's samples."""
    plan = config.plan
    forward = max(sum(s.seconds.forward.total for s in own) for own in by_rank)
    batches = math.ceil(config.evaluation.samples / (plan.mbs * plan.dp))
    return forward * (batches + (plan.pp - 1) / plan.vp)
