"""All that one rank sends in a step, in order: the layers' own collectives, FSDP's, the pipeline's and the sums.

The order is the host's: what `parallel/record.py` writes down of a real step, against which a test holds it.
How a layer is used follows from the engine:

- `parallel/fsdp.py` and `overlap.py`: the root's unit (what lies outside the blocks) is gathered when a forward
  pass begins, each block one block ahead; backward likewise. A block's gradients are reduced when its backward
  pass ends, the root's last. Each parameter's first dim is padded to a multiple of the shard group.
- Under tp the gradients of what every rank holds are partial sums: FSDP sums each when it reduces, and without
  FSDP they are summed in one at the step's end (`tensor.finish_gradients`).
- Loss, token count and gradient norm are scalars (`train/step.py`, `parallel/sharded.py`).

With interleaved and zero-bubble schedules the calls are the same, but messages may stand elsewhere among them.
No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from timetrial.config import RunConfig
from timetrial.parallel.mesh import Mesh
from timetrial.parallel.plan import split_layers, stage_rank
from timetrial.predict.actions import table
from timetrial.predict.events import LayerTrace, Op, Weight

ROOT = -1
"""FSDP's unit of what lies outside the blocks; blocks are 0, 1, ... of their stage."""
SCALAR, DOUBLE = 4, 8
"""bytes"""


@dataclass(frozen=True)
class Collective:
    """One call of one rank."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, send or receive."""
    axis: str
    """The group: tp, cp, dp, pp, shard and replicate (FSDP's), or world."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    bytes: int
    """Size of the whole tensor, as `parallel/record.py` counts it."""


def step_collectives(
    traces: Mapping[str, LayerTrace], config: RunConfig, rank: int = 0, kind: str = "cuda"
) -> list[Collective]:
    """What `rank` sends in one optimizer step of `config`, whose layers are `traces` (of the same `kind`)."""
    return _Rank(traces, config, rank, kind).step()


def gathered_bytes(weights: Iterable[Weight], shard: int, element: int) -> int:
    """Size of the tensor that FSDP gathers for `weights` over `shard` ranks: first dims padded, bytes."""
    return element * sum(_padded(weight.shape, shard) for weight in weights)


def _padded(shape: tuple[int, ...], shard: int) -> int:
    """Elements, with the first dim rounded up to a multiple of `shard`."""
    if not shape:
        return shard
    return -(-shape[0] // shard) * shard * math.prod(shape[1:])


@dataclass
class _Stage:
    """Some of the model's layers on this rank."""

    index: int
    embed: bool
    blocks: int
    head: bool
    gathered: set[int] = field(default_factory=set)
    """FSDP's units that are whole."""


class _Rank:
    def __init__(self, traces: Mapping[str, LayerTrace], config: RunConfig, rank: int, kind: str) -> None:
        self.traces, self.config, self.plan = traces, config, config.plan
        plan, mesh = config.plan, Mesh.of(config.plan)
        here = mesh.coordinates(rank)
        self.pp_rank = here["pp"]
        data = mesh.group(rank, *mesh.data_axes)
        place, shard = data.index(rank), mesh.shard
        self.groups = {axis: tuple(mesh.group(rank, axis)) for axis in ("tp", "cp", "dp", "pp")} | {
            "shard": tuple(data[place // shard * shard :][:shard]),
            "replicate": tuple(data[place % shard :: shard]),
            "world": tuple(range(mesh.world_size)),
        }
        self.fsdp = len(data) > 1
        self.plain = plan.vp == 1 and plan.schedule == "1f1b"
        self.at_once = plan.pp == 1 or plan.zero_stage > 1
        """Whether a unit's gradients are reduced when its backward pass ends, not when the stage's last one has."""
        self.half = plan.precision == "bf16" and kind != "cpu"
        self.calls: list[Collective] = []
        parts = split_layers(config.model.n_layers, plan.pp * plan.vp)
        self.stages = {
            index: _Stage(index, embed, len(blocks), head)
            for index, (embed, blocks, head) in enumerate(parts)
            if stage_rank(index, plan) == self.pp_rank
        }
        tied = getattr(config.model, "tied", False)
        self.weights = {
            kind: [w for w in trace.weights if not (tied and w.name == "head.weight")] for kind, trace in traces.items()
        }

    def step(self) -> list[Collective]:
        plan = self.plan
        self._call("all_reduce", "dp", DOUBLE)  # counted tokens
        done: dict[int, int] = dict.fromkeys(self.stages, 0)
        for stage_index, action in self._actions():
            stage = self.stages[stage_index]
            if action == "F":
                self._message("receive", stage_index - 1, stage_index)
                self._forward(stage)
                self._message("send", stage_index + 1, stage_index)
                continue
            if action in "BI":
                self._message("receive", stage_index + 1, stage_index)
            done[stage_index] += action in "BW"
            last = action in "BW" and done[stage_index] == plan.grad_accumulation_steps
            self._backward(stage, action, last)
            if action in "BI":
                self._message("send", stage_index - 1, stage_index)
            if last and not self.at_once and not self.plain:
                self._reduce_stage(stage)
        if not self.at_once and self.plain:
            for stage in self.stages.values():
                self._reduce_stage(stage)
        self._finish_gradients()
        loss = SCALAR if plan.pp == 1 else DOUBLE  # a pipeline's is multiplied by a float64 count
        for axis in ("cp", "pp"):
            self._call("all_reduce", axis, loss)
        self._call("all_reduce", "dp", DOUBLE)
        self._call("all_reduce", "world", SCALAR)  # the gradient norm
        return self.calls

    def _actions(self) -> Iterable[tuple[int, str]]:
        if self.plan.pp == 1:
            return [(0, action) for _ in range(self.plan.grad_accumulation_steps) for action in "FB"]
        return [(action.stage, action.kind) for action in table(self.plan)[self.pp_rank]]

    def _call(self, kind: str, axis: str, size: int) -> None:
        if len(self.groups[axis]) > 1:
            self.calls.append(Collective(kind, axis, self.groups[axis], size))

    def _message(self, kind: str, other: int, own: int) -> None:
        """Activations or their gradients between two neighbouring stages, where they lie on two ranks."""
        if 0 <= other < self.plan.pp * self.plan.vp and stage_rank(other, self.plan) != self.pp_rank:
            block = self.traces["block"]
            self._call(kind, "pp", block.tensor_bytes[block.inputs[0]])

    # ---- a stage ---------------------------------------------------------------------------------

    def _forward(self, stage: _Stage) -> None:
        self._gather(stage, ROOT, 0)
        if stage.embed:
            self._layer("embed", "forward")
        for i in range(stage.blocks):
            self._gather(stage, i, i + 1)
            self._layer("block", "forward")
            if self.plan.zero_stage == 3:
                stage.gathered.discard(i)
        if stage.head:
            self._layer("head", "forward")

    def _backward(self, stage: _Stage, action: str, last: bool) -> None:
        """`action` B does all. I and W share it out, and both recompute: W for each weight anew, since torch asks for
        one weight's gradient at a time. The first stage has no input gradient, and W does all."""
        if stage.embed and action != "B":
            if action == "I":
                return
            action = "B"
        sends = action != "W"
        final = stage.blocks - 1
        # hooks of one tensor run in the order in which they were made: without a head the root's is the block's too
        self._gather(stage, *((ROOT, final) if stage.head else (final, final - 1, ROOT)))
        if stage.head and sends:
            self._layer("head", "backward")
        for i in reversed(range(stage.blocks)):
            self._gather(stage, i, i - 1)
            if sends:
                self._layer("block", "recompute", "backward", whole=i > 0 or not self._input_is_frozen(stage))
            else:
                for _ in range(sum(weight.trained for weight in self.weights["block"])):
                    self._layer("block", "recompute")
            if self.at_once:
                self._reduce(stage, i, last)
        if stage.embed and sends:
            self._layer("embed", "backward")
        if self.at_once:
            self._reduce(stage, ROOT, last)

    def _reduce_stage(self, stage: _Stage) -> None:
        for unit in range(ROOT, stage.blocks):
            self._reduce(stage, unit, last=True)

    def _layer(self, kind: str, *phases: str, whole: bool = True) -> None:
        """Without `whole`, the layer's input needs no gradient: what only that is for is left out."""
        ops = [op for op in self.traces[kind].only(*phases) if op.kind == "collective"]
        if not whole:
            ops = _without_input_gradient(ops)
        for op in ops:
            self._call(op.name, op.axis, op.bytes)

    def _input_is_frozen(self, stage: _Stage) -> bool:
        return stage.embed and not any(weight.trained for weight in self.weights["embed"])

    # ---- FSDP ------------------------------------------------------------------------------------

    def _unit(self, stage: _Stage, unit: int) -> list[Weight]:
        if unit != ROOT:
            return self.weights["block"]
        return self.weights["embed"] * stage.embed + self.weights["head"] * stage.head

    def _gather(self, stage: _Stage, *units: int) -> None:
        for unit in units:
            exists = ROOT <= unit < stage.blocks and self._unit(stage, unit)
            if exists and unit not in stage.gathered:
                stage.gathered.add(unit)
                size = gathered_bytes(self._unit(stage, unit), self.plan.shard_size, 2 if self.half else 4)
                self._call("all_gather", "shard", size)

    def _reduce(self, stage: _Stage, unit: int, last: bool) -> None:
        zero, plan = self.plan.zero_stage, self.plan
        if zero == 3 or last:
            stage.gathered.discard(unit)
        trained = [weight for weight in self._unit(stage, unit) if weight.trained]
        if not self.fsdp or not trained or (zero == 1 and not last):
            return
        # what is kept for a later reduction is kept in float32
        element = 2 if self.half and self.at_once and (zero > 1 or plan.grad_accumulation_steps == 1) else 4
        for weight in trained:
            if weight.axis_sum:
                self._call("all_reduce", weight.axis_sum, element * math.prod(weight.shape))
        size = gathered_bytes(trained, plan.shard_size, 4)
        self._call("reduce_scatter", "shard", size)
        if last:
            self._call("all_reduce", "replicate", size // plan.shard_size)

    def _finish_gradients(self) -> None:
        if self.fsdp:
            return
        elements = sum(
            math.prod(weight.shape)
            for stage in self.stages.values()
            for unit in range(ROOT, stage.blocks)
            for weight in self._unit(stage, unit)
            if weight.axis_sum
        )
        if elements:
            self._call("all_reduce", "tp", 4 * elements)


def _without_input_gradient(ops: list[Op]) -> list[Op]:
    """Without the last reduce-scatter, which takes the gradient of the gathered input apart."""
    last = max((i for i, op in enumerate(ops) if op.name == "reduce_scatter" and op.phase == "backward"), default=-1)
    return [op for i, op in enumerate(ops) if i != last]
