"""What data-parallel ranks send in a step, and what of it a step waits for.

Parameters lie in shards over `plan.shard` ranks of dp x cp, and such groups are replicas of each other. A unit is a
block, or what lies outside of the blocks (`parallel/fsdp.py`). Of m micro batches in a step, by the stage of ZeRO:

| `zero` | a block is gathered | the other unit | each is reduce-scattered | each shard is all-reduced over replicas |
| ------ | ------------------- | -------------- | ------------------------ | --------------------------------------- |
| 1      | once                | once           | once                     | once                                    |
| 2      | once                | once           | m times                  | once                                    |
| 3      | 2 m times           | m times        | m times                  | once                                    |

Stages 1 and 2 gather what the optimizer has changed, in one piece for each pipeline stage: record software sends
buckets of its own. What goes out for each micro batch goes out unit by unit, and hides as FSDP2 lets it:

- a forward pass waits for the other unit; the first block comes beside the embedding, each further block beside the
  block before it;
- a backward pass gathers its last block beside the head, each further block beside the block behind it, and reduces
  each block beside the next, the first one beside the embedding;
- the other unit is reduced beside the passes that follow; nothing follows the last backward pass;
- shards are all-reduced on a stream of their own, beside the last backward pass. Where the replicas lie in several
  scale-up domains and a shard group in one, they share no network with the rest.

No group of one rank sends anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from timetrial.config import Plan
from timetrial.predict import network, placement
from timetrial.predict.kernels import Layer
from timetrial.predict.price import LayerSeconds, Pricing
from timetrial.systems.system import System


@dataclass(frozen=True)
class Unit:
    """What is gathered and reduced in one piece, on one rank of tp and pp."""

    weights: int
    """Elements."""
    trained: int
    """Those of them that are trained."""


@dataclass(frozen=True)
class Call:
    """A collective of one pipeline stage."""

    kind: str
    """all_gather, reduce_scatter or all_reduce."""
    group: str
    """shard or replicate."""
    elements: int
    """Of the whole tensor."""
    times: int
    """In a step."""


def units(layers: Mapping[str, Layer], blocks: int, embed: bool, head: bool) -> tuple[Unit, Unit]:
    """A block, and what a stage has outside of its blocks. Without blocks, or without ends, a unit is empty."""
    ends = [layers[kind] for kind in ("embed",) * embed + ("head",) * head]
    block = Unit(layers["block"].weights, layers["block"].trained) if blocks else Unit(0, 0)
    return block, Unit(sum(x.weights for x in ends), sum(x.trained for x in ends))


def calls(plan: Plan, blocks: int, block: Unit, ends: Unit) -> list[Call]:
    """All that a stage of `blocks` blocks sends over its data-parallel ranks in a step, by the table above."""
    m, shard = plan.grad_accumulation_steps, plan.shard_size
    made = []
    for unit, count, in_three in ((block, blocks, 2 * m), (ends, 1, m)):
        every = plan.zero_stage == 3
        gathered = unit.weights if every else unit.trained
        reductions = m if plan.zero_stage > 1 else 1
        made += [
            Call("all_gather", "shard", gathered, count * (in_three if every else 1)),
            Call("reduce_scatter", "shard", unit.trained, count * reductions),
            Call("all_reduce", "replicate", -(-unit.trained // shard), count),
        ]
    ranks = {"shard": shard, "replicate": plan.dp * plan.cp // shard}
    return [call for call in made if call.elements and call.times and ranks[call.group] > 1]


@dataclass(frozen=True)
class Waits:
    """Seconds of one pipeline stage."""

    gather: float = 0.0
    """Stages 1 and 2 of ZeRO: parameters, once a step, hidden or not."""
    forward: float = 0.0
    """What each forward pass waits for, and what hidden communication slows it by."""
    backward: float = 0.0
    """The same of each backward pass."""
    between: float = 0.0
    """The same of each pass behind a backward pass."""
    reduce: float = 0.0
    """Gradients after the last backward pass: with stage 1 of ZeRO all of them, hidden or not; otherwise what is left
    to wait for."""

    def every_pass(self, micro_batches: int) -> tuple[float, float]:
        """What a forward and a backward pass of a pipeline wait for, `between` counted with the backward passes."""
        return self.forward, self.backward + self.between * (micro_batches - 1) / micro_batches


class DataParallel:
    """Prices of one plan's data-parallel communication."""

    def __init__(
        self,
        plan: Plan,
        system: System,
        pricing: Pricing,
        layers: Mapping[str, Layer],
        seconds: Mapping[str, LayerSeconds],
    ) -> None:
        """`seconds` of one micro batch by kind of layer."""
        self.plan, self.system, self.pricing, self.layers, self.seconds = plan, system, pricing, layers, seconds
        copies = plan.dp * plan.cp
        ranks = {"shard": plan.shard_size, "replicate": copies // plan.shard_size}
        self.lies = {group: placement.lie(plan, system, group) for group, n in ranks.items() if n > 1}
        """Where groups of several ranks lie."""
        self._known: dict[tuple[str, int], float] = {}

    @property
    def apart(self) -> bool:
        """Whether replicas are reduced over another network than shards."""
        shard, replicate = self.lies.get("shard"), self.lies.get("replicate")
        return shard is not None and replicate is not None and shard.inside and not replicate.inside

    def waits(self, blocks: int, embed: bool, head: bool) -> Waits:
        """Of a stage with these layers."""
        if not self.lies:
            return Waits()
        block, ends = units(self.layers, blocks, embed, head)
        whole = Unit(blocks * block.weights + ends.weights, blocks * block.trained + ends.trained)
        if self.plan.zero_stage == 1:
            gather, scatter, replicas = self._gather(whole.trained), self._scatter(whole), self._replicas(whole)
            if self.apart:  # bucket by bucket: the last one's replicas alone have nothing beside them
                reduce = max(scatter, replicas) + min(scatter, replicas) / (blocks + 1)
            else:
                reduce = scatter + replicas
            return Waits(gather=gather, reduce=reduce)
        return self._unit_by_unit(blocks, embed, head, block, ends, whole)

    def _unit_by_unit(self, blocks: int, embed: bool, head: bool, block: Unit, ends: Unit, whole: Unit) -> Waits:
        sharded = self.plan.zero_stage == 3
        first, last = (self._gather(u.weights) if sharded else 0.0 for u in (block, ends))
        scatter, final = self._scatter(block), self._scatter(ends)
        ov = self.pricing.fitted.dp_overlap

        def computing(kind: str, backward: bool) -> float:
            one = self.seconds[kind]
            return ov * (one.backward if backward else one.forward).total

        more = max(0, blocks - 1)
        f, b = computing("block", False), computing("block", True)
        embed_f, embed_b = (computing("embed", way) if embed else 0.0 for way in (False, True))
        head_f, head_b = (computing("head", way) if head else 0.0 for way in (False, True))
        forward = last + self._slot(first, embed_f) + more * self._slot(first, f) if sharded else 0.0
        backward = self._slot(first, head_b) + self._slot(scatter, embed_b)
        if more:  # beside each block the gather of the next one and the reduction of the one before
            backward += self._slot(first, b) + (more - 1) * self._slot(first + scatter, b) + self._slot(scatter, b)
        in_forward = embed_f + blocks * f + head_f
        in_backward = embed_b + blocks * b + head_b
        beside = max(0.0, in_forward - blocks * first)
        free = in_backward if self.apart else max(0.0, in_backward - blocks * (first + scatter))
        replicas = blocks * self._replicas(block)
        return Waits(
            gather=0.0 if sharded else self._gather(whole.trained),
            forward=forward,
            backward=backward,
            between=self._slot(final, beside),
            reduce=final + self._replicas(ends) + self._slot(replicas, free),
        )

    def _slot(self, seconds: float, beside: float) -> float:
        return self.pricing.exposed_s("dp", seconds, beside)

    def _gather(self, elements: int) -> float:
        return self._seconds("all_gather", "shard", elements * self.pricing.stack.parameter_bytes)

    def _scatter(self, unit: Unit) -> float:
        return self._seconds("reduce_scatter", "shard", unit.trained * self.pricing.stack.gradient_bytes)

    def _replicas(self, unit: Unit) -> float:
        size = unit.trained * self.pricing.stack.gradient_bytes / self.plan.shard_size
        return self._seconds("all_reduce", "replicate", size)

    def _seconds(self, kind: str, group: str, size: float) -> float:
        key = (kind, int(size))
        if group not in self.lies:
            return 0.0
        if key not in self._known:
            found = network.collective_s(kind, int(size), self.lies[group], self.system).seconds
            self._known[key] = found / self.pricing.fitted.network
        return self._known[key]
