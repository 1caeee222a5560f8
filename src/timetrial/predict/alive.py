"""What a rank of this machine has alive, tensor by tensor, through whole steps: one walk over the traces.

Each layer's trace says which tensors an operator makes, which of them the backward pass reads again and where it
reads them last; a tensor goes when nobody holds it any more, as reference counts do. Around the layers:

- a layer's result is the next one's input, its input's gradient is handed back the same way;
- gradients of weights stay until the optimizer has run; those of later micro batches are added and dropped;
- FSDP (`parallel/fsdp.py`) gathers a unit into one buffer, copies it out weight by weight, and lets the buffer go when
  the next unit has come; gradients are copied into a buffer, which stays until the next is reduced;
- a pipeline holds a buffer for each message of a step, and a stage's results until their backward pass;
- the optimizer's moments are made at the end of the first step, while gradients lie there.

The tensors lie on a `heap.Heap`, and what that has grown to is what the process has resident. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from timetrial.config import Plan
from timetrial.parallel.plan import split_layers, stage_rank
from timetrial.predict import actions
from timetrial.predict.alive_program import FLOAT, Program, program
from timetrial.predict.collectives import gathered_bytes
from timetrial.predict.events import LayerTrace, Weight
from timetrial.predict.heap import Heap

STEPS = 3
"""Walked through: the first has no moments yet, later ones repeat themselves."""
MOST_MICRO_BATCHES = 8
"""Walked through without a pipeline; more of them repeat themselves."""
THREADS = 2
"""Of a gloo group: each has a heap of its own."""
COPIES = 2
"""Of a call's tensor that such a thread makes: of what goes in and of what comes out."""
KINDS = ("weights", "gradients", "optimizer", "activations", "working")


@dataclass(frozen=True)
class Alive:
    """Bytes of one rank."""

    kinds: Mapping[str, int]
    """KINDS -> bytes when most is alive."""
    heap: int
    """What the heap has grown to."""

    @property
    def live(self) -> int:
        """Alive at once."""
        return sum(self.kinds.values())


def walk(traces: Mapping[str, LayerTrace], plan: Plan, n_layers: int, rank: int = 0, state: bool = True) -> Alive:
    """What pipeline rank `rank` has alive in a step of `plan`, whose layers are `traces` (of kind cpu). Some ms.

    Without `state` there are neither weights nor moments: a further lane, which shares those of the first.
    """
    return _Rank(traces, plan, n_layers, rank, state).run()


def threads_bytes(calls: Iterable[int]) -> int:
    """What gloo's threads take for calls of so many bytes."""
    return THREADS * COPIES * max(calls, default=0)


class _Tensor:
    """One tensor on the heap."""

    __slots__ = ("address", "bytes", "holders", "kind")

    def __init__(self, address: int, size: int, kind: str) -> None:
        self.address, self.bytes, self.kind, self.holders = address, size, kind, 1


class _Store:
    """Heap and counts."""

    def __init__(self) -> None:
        self.heap = Heap()
        self.now = dict.fromkeys(KINDS, 0)
        self.total = self.most = 0
        self.at_most = dict(self.now)

    def make(self, size: int, kind: str, pin: str = "") -> _Tensor:
        tensor = _Tensor(self.heap.take(size, pin), size, kind)
        self.now[kind] += size
        self.total += size
        if self.total > self.most:
            self.most, self.at_most = self.total, dict(self.now)
        return tensor

    def become(self, tensor: _Tensor, kind: str) -> None:
        self.now[tensor.kind] -= tensor.bytes
        self.now[kind] += tensor.bytes
        tensor.kind = kind

    def let_go(self, tensor: _Tensor) -> None:
        tensor.holders -= 1
        if tensor.holders == 0:
            self.heap.free(tensor.address)
            self.now[tensor.kind] -= tensor.bytes
            self.total -= tensor.bytes


ROOT = "root"
"""FSDP's unit of what lies outside the blocks."""
Unit = str | int


@dataclass
class _Layer:
    """One layer of a stage."""

    kind: str
    """Of its trace."""
    unit: Unit
    """FSDP's: the block's number, or the root."""
    program: Program


class _Rank:
    """The walk of one pipeline rank."""

    def __init__(self, traces: Mapping[str, LayerTrace], plan: Plan, n_layers: int, rank: int, state: bool) -> None:
        self.plan, self.state, self.store = plan, state, _Store()
        programs = {kind: program(trace) for kind, trace in traces.items()}
        self.stages: dict[int, list[_Layer]] = {}
        first = 0
        for index, (embed, blocks, head) in enumerate(split_layers(n_layers, plan.pp * plan.vp)):
            kinds = ["embed"] * embed + ["block"] * len(blocks) + ["head"] * head
            if stage_rank(index, plan) == rank:
                self.stages[index] = [
                    _Layer(kind, first + n if kind == "block" else ROOT, programs[kind]) for n, kind in enumerate(kinds)
                ]
            first += len(kinds)
        self.rank = rank
        self.passed = programs["block"].bytes[programs["block"].input]
        self.shard = plan.shard_size
        self.fsdp = plan.dp * plan.cp > 1
        self.weights: dict[Unit, list[Weight]] = {}
        for layer in (layer for stage in self.stages.values() for layer in stage):
            self.weights.setdefault(layer.unit, []).extend(traces[layer.kind].weights)
        self.often = plan.grad_accumulation_steps
        if plan.pp == 1:
            self.often = min(self.often, MOST_MICRO_BATCHES)
        # FSDP
        self.fetched: dict[Unit, _Tensor] = {}
        self.whole: dict[Unit, list[_Tensor]] = {}
        self.buffers: list[_Tensor | None] = [None, None]
        """The last gather's and the last reduction's."""
        # gradients
        self.gradients: dict[Unit, list[_Tensor]] = {}
        self.shards: dict[Unit, list[_Tensor]] = {}
        # a pipeline's messages, and what its micro batches wait for
        self.messages: dict[tuple[int, str, int], _Tensor] = {}
        self.running: dict[tuple[int, int], tuple[list[dict[int, _Tensor]], _Tensor]] = {}

    def run(self) -> Alive:
        if self.state:
            for unit in self.weights:
                self._make_state(unit, copies=1, trained=False)
        last = self.plan.pp * self.plan.vp - 1
        for index in self.stages:
            for way, exists in (("F", index > 0), ("B", index < last)):
                for m in range(self.often if exists and self.plan.pp > 1 else 0):
                    self.messages[index, way, m] = self.store.make(self.passed, "working")
        for step in range(STEPS):
            self._step()
            if step == 0 and self.state:
                for unit in self.weights:
                    self._make_state(unit, copies=2, trained=True)
            for kept in (self.gradients, self.shards, self.whole):
                for tensors in kept.values():
                    self._let_go(tensors)
                kept.clear()
            self.store.heap.unpin("forward")
        return Alive(self.store.at_most, self.store.heap.peak)

    def _make_state(self, unit: Unit, copies: int, trained: bool) -> None:
        for weight in self.weights[unit]:
            for _ in range(copies if weight.trained or not trained else 0):
                self.store.make(FLOAT * math.ceil(math.prod(weight.shape) / self.shard), "optimizer")

    def _step(self) -> None:
        done = dict.fromkeys(self.stages, 0)
        for stage, action, m in self._actions():
            if action == "F":
                self._forward(stage, m)
            elif action in "BI":
                done[stage] += 1
                self._backward(stage, m, done[stage] == self.often)
                self.store.heap.unpin("backward")
        for n, buffer in enumerate(self.buffers):
            if buffer is not None:
                self.store.let_go(buffer)
            self.buffers[n] = None

    def _actions(self) -> list[tuple[int, str, int]]:
        if self.plan.pp == 1:
            return [(0, action, m) for m in range(self.often) for action in "FB"]
        return [(a.stage, a.kind, a.micro_batch) for a in actions.table(self.plan)[self.rank]]

    # ---- a stage ---------------------------------------------------------------------------------

    def _forward(self, stage: int, m: int) -> None:
        layers = self.stages[stage]
        x = self.messages.get((stage, "F", m))
        if x is None:
            x = self.store.make(layers[0].program.bytes[layers[0].program.input], "working")
        else:
            x.holders += 1
        kept = []
        self._gather(ROOT)
        self._copy_out(ROOT)
        for n, layer in enumerate(layers):
            self._fetch(layer, layers[n + 1] if n + 1 < len(layers) else None)
            held, x = self._run_forward(layer.program, x)
            kept.append(held)
            if self.fsdp and self.plan.zero_stage == 3 and layer.unit != ROOT:
                self._let_go(self.whole.pop(layer.unit))
        self.running[stage, m] = kept, x

    def _backward(self, stage: int, m: int, last: bool) -> None:
        layers = self.stages[stage]
        kept, y = self.running.pop((stage, m))
        grad = self.messages.get((stage, "B", m))
        if grad is not None:
            grad.holders += 1
        for n in reversed(range(len(layers))):
            layer = layers[n]
            self._fetch(layer, layers[n - 1] if n else None)
            made, grad = self._run_backward(layer.program, kept[n], grad)
            self._add(layer.unit, made)
            if layer.unit != ROOT:
                self._finish(layer.unit, last)
        if grad is not None:
            self.store.let_go(grad)
        self.store.let_go(y)
        self._finish(ROOT, last)

    def _run_forward(self, program: Program, x: _Tensor) -> tuple[dict[int, _Tensor], _Tensor]:
        """What the layer keeps, and its result."""
        held = {program.input: x}
        if program.input in program.saved:
            self.store.become(x, "activations")
        for piece in program.forward:
            scratch = [self.store.make(size, "working", piece.phase) for size in piece.scratch]
            for i in piece.makes:
                kind = "activations" if i in program.saved or i == program.output else "working"
                held[i] = self.store.make(program.bytes.get(i, 0), kind, piece.phase)
            self._drop(held, piece.drops)
            self._let_go(scratch)
        y = held[program.output]
        for i in [i for i in held if i not in program.saved]:
            tensor = held.pop(i)
            if i != program.output:
                self.store.let_go(tensor)
        y.holders += program.output in program.saved
        return held, y

    def _run_backward(
        self, program: Program, held: dict[int, _Tensor], grad: _Tensor | None
    ) -> tuple[list[_Tensor], _Tensor | None]:
        """Gradients of weights, and of the input."""
        if grad is not None:
            for i in program.incoming:
                held[i] = grad
            grad.holders += len(program.incoming)
            self.store.let_go(grad)
        for piece in program.backward:
            scratch = [self.store.make(size, "working", piece.phase) for size in piece.scratch]
            for i in piece.makes:
                kind = "gradients" if i in program.gradients else "working"
                held[i] = self.store.make(program.bytes.get(i, 0), kind, piece.phase)
            self._drop(held, piece.drops)
            self._let_go(scratch)
        made = [held.pop(i) for i in program.gradients if i in held]
        for tensor in made:
            self.store.become(tensor, "gradients")
        out = held.pop(program.outgoing, None) if program.outgoing is not None else None
        self._let_go(held.values())
        self.store.heap.unpin("recompute")
        return made, out

    def _drop(self, held: dict[int, _Tensor], ids: Iterable[int]) -> None:
        self._let_go([held.pop(i) for i in ids if i in held])

    def _let_go(self, tensors: Iterable[_Tensor]) -> None:
        for tensor in tensors:
            self.store.let_go(tensor)

    # ---- gradients and FSDP ----------------------------------------------------------------------

    def _add(self, unit: Unit, made: list[_Tensor]) -> None:
        """Gradients of a unit; where it has some already they are added to those and dropped."""
        kept = self.gradients.setdefault(unit, [])
        room = sum(weight.trained for weight in self.weights[unit]) - len(kept)
        kept += made[: max(0, room)]
        self._let_go(made[max(0, room) :])

    def _finish(self, unit: Unit, last: bool) -> None:
        """After a unit's backward pass: reduce its gradients, drop its gathered weights."""
        if not self.fsdp:
            return
        zero = self.plan.zero_stage
        if unit in self.whole and (last or (zero == 3 and unit != ROOT)):
            self._let_go(self.whole.pop(unit))
        if not last and zero == 1:
            return
        trained = [weight for weight in self.weights.get(unit, []) if weight.trained]
        if not trained:
            return
        size = gathered_bytes(trained, self.shard, FLOAT)
        buffer = self.store.make(size, "working")
        self._let_go(self.gradients.pop(unit, []))
        shard = self.store.make(size // self.shard, "gradients")
        if unit in self.shards:
            self.store.let_go(shard)
        else:
            self.shards[unit] = [shard]
        self._replace(1, buffer)

    def _fetch(self, layer: _Layer, following: _Layer | None) -> None:
        """The layer's weights are whole when it runs, and the next one's are on their way."""
        if not self.fsdp:
            return
        self._gather(layer.unit)
        self._copy_out(layer.unit)
        if following is not None:
            self._gather(following.unit)

    def _gather(self, unit: Unit) -> None:
        if not self.fsdp or unit in self.whole or unit in self.fetched or not self.weights.get(unit):
            return
        size = gathered_bytes(self.weights[unit], self.shard, FLOAT)
        self.fetched[unit] = self.store.make(size, "weights")
        self.store.let_go(self.store.make(size, "working"))

    def _copy_out(self, unit: Unit) -> None:
        if unit not in self.fetched:
            return
        sizes = [FLOAT * math.prod(weight.shape) for weight in self.weights[unit]]
        self.whole[unit] = [self.store.make(size, "weights") for size in sizes]
        self._replace(0, self.fetched.pop(unit))

    def _replace(self, n: int, buffer: _Tensor) -> None:
        before, self.buffers[n] = self.buffers[n], buffer
        if before is not None:
            self.store.let_go(before)
