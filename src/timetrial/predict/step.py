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
from timetrial.predict.data_parallel import DataParallel, Waits
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


def kind_seconds(known: Passes, pricing: Pricing) -> dict[str, LayerSeconds]:
    """Seconds of one micro batch through each kind of layer; of several ways of a kind those of the fastest."""
    cost: dict[str, LayerSeconds] = {}
    for name, totals in known.items():  # "block by heads" is another way of "block": the faster counts
        kind, found = name.partition(" by ")[0], pricing.layer_s(*totals)
        if kind == "block" and pricing.again:
            found = LayerSeconds(found.forward, found.backward + found.forward * pricing.again, found.weight)
        if kind not in cost or found.total < cost[kind].total:
            cost[kind] = found
    return cost


def stages_of(config: RunConfig, layers: Mapping[str, Layer], cost: Mapping[str, LayerSeconds]) -> list[Stage]:
    """The virtual stages of the plan, in the order of the model, each with its time. `cost`: of `kind_seconds`."""
    plan = config.plan
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
    cost = kind_seconds(known or passes(layers, pricing), pricing)
    stages = stages_of(config, layers, cost)
    by_rank = [[s for s in stages if s.rank == rank] for rank in range(plan.pp)]
    work = [sum((s.seconds.forward + s.seconds.backward for s in own), Seconds()) * m for own in by_rank]
    busiest = max(range(plan.pp), key=lambda r: work[r].total)
    parts = dict(work[busiest].parts)
    data = _data_parallel(config, stages, DataParallel(plan, system, pricing, layers, cost))
    timeline = None
    durations = _durations(config, stages, data, system, pricing)
    if plan.pp > 1:
        if pipeline_s is not None:
            parts["bubble"] = pipeline_s(plan, durations) - work[busiest].total
        else:
            timeline = schedule.lay(actions.table(plan), durations, trace=False)
            rank = timeline.ranks[busiest]
            parts["pp"], parts["dp"] = rank.exposed_sends_s, rank.exposed_data_s
            parts["bubble"] = timeline.seconds - work[busiest].total - parts["pp"] - parts["dp"]
    else:
        parts["dp"] = _exposed(plan, stages[0], data[0], pricing)
    held = max(sum(s.trained for s in own) for own in by_rank) / plan.shard_size
    parts["optimizer"] = pricing.rates.memory_s(held * OPTIMIZER_BYTES / fit.memory)
    parts["skew"] = sum(parts.values()) * fit.skew * math.log2(plan.world_size)
    parts["fixed"] = fit.step_s
    evaluation = _evaluation(config, stages, [waits.forward for waits in data])
    return Step(sum(parts.values()), parts, tuple(stages), m, timeline, durations, evaluation)


def _buckets(plan: Plan, elements: int, pricing: Pricing) -> int:
    """In how many parts gradients leave and parameters come."""
    size = pricing.stack.bucket_elements or max(40e6, 1e6 * plan.dp * plan.cp)
    return max(1, math.ceil(elements / size))


def _data_parallel(config: RunConfig, stages: list[Stage], prices: DataParallel) -> list[Waits]:
    """What each stage waits for over its data-parallel ranks; stages of the same layers for the same."""
    alike: dict[tuple[int, bool, bool], Waits] = {}
    for s in stages:
        key = (s.layers, s.embed, s.head)
        if key not in alike:
            alike[key] = prices.waits(*key)
    return [alike[s.layers, s.embed, s.head] for s in stages]


def _exposed(plan: Plan, stage: Stage, waits: Waits, pricing: Pricing) -> float:
    """Seconds of data-parallel communication in a step without a pipeline."""
    m, overlap = plan.grad_accumulation_steps, pricing.fitted.dp_overlap
    hidden = 1 - 1 / _buckets(plan, stage.trained, pricing)  # the last bucket leaves when nothing is left to do
    first, last = (overlap * way.total for way in (stage.seconds.forward, stage.seconds.backward))
    reduce = waits.reduce
    if plan.zero_stage == 1:
        reduce = pricing.exposed_s("dp", waits.reduce, min(last, hidden * waits.reduce))
    every = m * (waits.forward + waits.backward) + (m - 1) * waits.between
    return pricing.exposed_s("dp", waits.gather, min(first, hidden * waits.gather)) + every + reduce


def _durations(
    config: RunConfig, stages: list[Stage], data: list[Waits], system: System, pricing: Pricing
) -> schedule.Durations:
    plan, edges = config.plan, len(stages) - 1
    link = latency = 0.0
    if plan.pp > 1:
        size = 2 * plan.mbs * config.data.seq_len // plan.cp // plan.tp * config.model.dim
        link, latency = network.send_s(size, placement.lie(plan, system, "edge"), system)
    backward = [s.seconds.backward.total for s in stages]
    weight = [s.seconds.weight for s in stages]
    piped = data if plan.pp > 1 else []  # without a pipeline the step adds what is exposed
    every = [waits.every_pass(plan.grad_accumulation_steps) for waits in piped]
    return schedule.Durations(
        forward_s=tuple(s.seconds.forward.total for s in stages),
        backward_s=tuple(backward),
        backward_input_s=tuple(b - w for b, w in zip(backward, weight, strict=True)),
        backward_weight_s=tuple(weight),
        link_s=(link / pricing.fitted.network,) * edges,
        latency_s=(latency,) * edges,
        gather_s=tuple(waits.gather for waits in piped),
        reduce_s=tuple(waits.reduce for waits in piped),
        forward_data_s=tuple(forward for forward, _ in every),
        backward_data_s=tuple(backward for _, backward in every),
        overlap_sends="pp" in pricing.stack.overlaps,
        overlap_data="dp" in pricing.overlaps,
    )


def _evaluation(config: RunConfig, stages: list[Stage], waits: list[float]) -> float:
    """Forward passes alone, over one evaluation's samples. `waits` of a pass for parameters, by stage, s."""
    plan = config.plan
    by_rank = [0.0] * plan.pp
    for stage, gathers in zip(stages, waits, strict=True):
        by_rank[stage.rank] += stage.seconds.forward.total + gathers
    batches = math.ceil(config.evaluation.samples / (plan.mbs * plan.dp))
    return max(by_rank) * (batches + (plan.pp - 1) / plan.vp)
