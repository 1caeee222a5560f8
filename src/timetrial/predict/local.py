"""Prediction for the machine itself: the engine's eager code, operator by operator, at measured rates.

What runs here is what a trace shows: nothing is fused, nothing runs beside anything else, and each operator costs
the host some microseconds more. So a step is a sum:

    step = micro batches x layers (operators + host) + what data-parallel ranks send and copy + optimizer + host

A pipeline's stages are laid out by its action table as everywhere (`schedule.py`). Lanes (`parallel/lanes.py`) are
a rank that computes a part of each micro batch while as many others do the same, and adds up their gradients.
Kernels are slower while other processes compute too: by the measured factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from timetrial.config import Plan, RunConfig
from timetrial.errors import UserError
from timetrial.parallel.mesh import Mesh
from timetrial.parallel.plan import split_layers, stage_rank
from timetrial.predict import actions, alive, cache, schedule
from timetrial.predict.collectives import Collective, step_collectives
from timetrial.predict.events import LayerTrace, Op
from timetrial.predict.kernels import Kernel, Layer
from timetrial.predict.memory import Memory, RankMemory
from timetrial.predict.price import LayerSeconds, Seconds
from timetrial.predict.step import Stage, Step
from timetrial.systems.eager import Eager, HostCost
from timetrial.systems.rates import Rates
from timetrial.systems.system import System

FLOAT = 4
"""bytes"""
SUM_BYTES = 3 * FLOAT
"""Moved to add one element of a gradient to another's."""
MEASURED = 3 * FLOAT << 20
"""What the heap has held before the first step: three square matrices of 1,024 (`train/peak.py`), bytes."""
LAYER_AXES = ("tp", "cp", "pp")
"""Axes whose calls are priced within layers and between stages; their few scalars are part of a step's host cost."""

Traces = Callable[[RunConfig, str], dict[str, LayerTrace]]


def predict_local(
    config: RunConfig, system: System, traces: Traces = cache.layers, rates: Rates | None = None
) -> tuple[Step, dict[str, Layer]]:
    """One optimizer step of `config` on the calibrated machine `system`, and the kernels of its layers.

    `config.lanes` counts as in `train`; None is one. `rates` in place of those that `system` names. Raises UserError
    where the system has not been calibrated or the plan asks for more ranks than it has cores.
    """
    rates = rates or Rates.load(system)
    if rates.eager is None:
        raise UserError(f"system {system.name} has no measured costs of eager code; run `timetrial calibrate`")
    plan, lanes = config.plan, config.lanes or 1
    if plan.world_size > system.node.accelerators:
        raise UserError(f"{plan.world_size} ranks on {system.node.accelerators} cores of {system.name}; use fewer")
    if plan.compile:
        raise UserError("compile=true cannot be predicted on a CPU; its kernels are not those of the trace")
    part = replace(config, plan=part_of_a_lane(plan, lanes))
    found = traces(part, "cpu")
    layers = {kind: eager_layer(trace) for kind, trace in found.items()}
    return _Local(part, lanes, system, rates, rates.eager, found, layers).step(), layers


def part_of_a_lane(plan: Plan, lanes: int) -> Plan:
    """What the fullest of `lanes` lanes computes of `plan`."""
    mbs = math.ceil(plan.mbs / lanes)
    return replace(plan, mbs=mbs, gbs=plan.gbs // plan.mbs * mbs)


def local_memory(config: RunConfig, system: System, traces: Traces = cache.layers) -> Memory:
    """Bytes of each pipeline rank at the peak of a step, what an idle rank takes counted in (`alive.py`)."""
    rates = Rates.load(system)
    if rates.eager is None:
        raise UserError(f"system {system.name} has no measured costs of eager code; run `timetrial calibrate`")
    plan, eager = config.plan, rates.eager
    share = heap_share(eager, plan)
    return Memory(tuple(_rank_memory(held, eager.idle(plan.world_size), share) for held in _held(config, traces)))


def heap_share(eager: Eager, plan: Plan) -> float:
    """What heaps hold beyond what `alive.py` says, as measured of the way of running that shapes them most."""
    ways = [plan.recompute, *["accumulating"] * (plan.grad_accumulation_steps > 1)]
    ways += ["several"] * (plan.world_size > 1)
    return next((eager.reserved[way] for way in ways if way in eager.reserved), eager.reserved["one"])


def _rank_memory(held: _Held, idle: float, share: float) -> RankMemory:
    kinds = held.alive.kinds
    heap = max(held.alive.heap, MEASURED) + held.lanes
    return RankMemory(
        weights=kinds["weights"],
        gradients=kinds["gradients"],
        optimizer=kinds["optimizer"],
        activations=kinds["activations"],
        working=kinds["working"],
        fixed=idle + held.threads,
        fragmentation=heap - held.alive.live + share * held.passing,
    )


@dataclass(frozen=True)
class _Held:
    """Bytes of one pipeline rank beside what it takes idle."""

    alive: alive.Alive
    lanes: int
    """What the heaps of further lanes grow to."""
    threads: int
    """What gloo's threads take."""

    @property
    def passing(self) -> int:
        """What heaps grow to beyond weights and moments."""
        return self.alive.heap - self.alive.kinds["optimizer"] + self.lanes + self.threads


def _held(config: RunConfig, traces: Traces) -> list[_Held]:
    """By pipeline rank."""
    lanes, part = config.lanes or 1, replace(config, plan=part_of_a_lane(config.plan, config.lanes or 1))
    found, layers = traces(part, "cpu"), config.model.n_layers
    held = []
    for rank in range(part.plan.pp):
        calls = step_collectives(found, part, Mesh.of(part.plan).group(0, "pp")[rank], "cpu")
        others = [alive.walk(found, part.plan, layers, rank, state=False).heap] * (lanes - 1)
        threads = alive.threads_bytes(call.bytes for call in calls)
        held.append(_Held(alive.walk(found, part.plan, layers, rank), sum(others), threads))
    return held


def heap_bytes(config: RunConfig, traces: Traces = cache.layers) -> tuple[float, float]:
    """(weights and moments, what heaps grow to beyond them) of the fullest rank, bytes."""
    fullest = max(_held(config, traces), key=lambda held: held.passing)
    return fullest.alive.kinds["optimizer"], fullest.passing


def eager_layer(trace: LayerTrace) -> Layer:
    """The kernels of a trace as eager code runs them: one for each operator, in its own format."""
    sizes = [(math.prod(w.shape), w.trained) for w in trace.weights]
    return Layer(
        kind=trace.kind,
        kernels=tuple(_kernel(op, trace) for op in trace.ops if op.kind != "wait"),
        saved_bytes=trace.saved_bytes,
        weights=sum(n for n, _ in sizes),
        trained=sum(n for n, trained in sizes if trained),
    )


def _kernel(op: Op, trace: LayerTrace) -> Kernel:
    if op.kind == "collective":
        return Kernel("collective", op.axis, op.phase, op.module, role=op.name, bytes=op.bytes)
    if op.kind == "elementwise":
        moved = sum(trace.tensor_bytes.get(i, 0) for i in (*op.reads, *op.writes))
        return Kernel("memory", "other", op.phase, op.module, "fp32", role=op.name, bytes=moved)
    return Kernel(op.kind, op.kind, op.phase, op.module, "fp32", op.shape, op.role)


@dataclass(frozen=True)
class _Local:
    """All that a step's price depends on."""

    config: RunConfig
    """Of one lane."""
    lanes: int
    system: System
    rates: Rates
    eager: Eager
    traces: Mapping[str, LayerTrace]
    layers: Mapping[str, Layer]

    @property
    def busy(self) -> int:
        """Processes or lanes that compute at once."""
        return max(self.config.plan.world_size, self.lanes)

    def host(self) -> HostCost:
        """What host work costs in this layout: of one rank, and what each axis adds to that."""
        one, plan = self.eager.host("one"), self.config.plan
        used = [axis for axis in ("tp", "cp", "pp") if getattr(plan, axis) > 1]
        used += [f"zero{3 if plan.zero_stage == 3 else 1}"] * (plan.dp > 1) + ["lanes"] * (self.lanes > 1)
        used += [plan.recompute] * (plan.recompute != "none")
        costs = [self.eager.host(layout) for layout in used]
        return HostCost(
            one.operator_s + sum(max(0.0, cost.operator_s - one.operator_s) for cost in costs),
            one.step_s + sum(max(0.0, cost.step_s - one.step_s) for cost in costs),
        )

    # ---- kernels ---------------------------------------------------------------------------------

    def kernel_s(self, kernel: Kernel) -> float:
        """Seconds of one kernel, while all ranks or lanes compute."""
        if kernel.kind == "matmul":
            batch, m, n, k = kernel.shape
            return self.rates.matmul_s("fp32", m, n, k, batch) * self.eager.factor("matmul", self.busy)
        if kernel.kind == "attention":
            batch, heads, kv_heads, tokens, kv_tokens, head_dim = kernel.shape
            causal, backward = kernel.role.endswith("causal"), kernel.role.startswith("backward")
            fmt = "ring" if self.config.plan.cp > 1 and "ring" in self.rates.attention else "fp32"
            seconds = self.rates.attention_s(
                fmt, batch, heads, kv_heads, tokens, kv_tokens, head_dim, causal=causal, backward=backward
            )
            return seconds * self.eager.factor("attention", self.busy)
        if kernel.kind == "memory":
            return self.memory_s(kernel.role, kernel.bytes)
        ranks = getattr(self.config.plan, kernel.part)
        return self.collective_s(kernel.role, ranks, kernel.bytes, ring=kernel.part == "cp")

    def memory_s(self, operator: str, moved: float) -> float:
        """One operator bound by memory."""
        line = self.eager.operators.get(operator)
        seconds = line.seconds(moved) if line else self.rates.memory_s(moved)
        return seconds * self.eager.factor("elementwise", self.busy)

    def collective_s(self, kind: str, ranks: int, size: float, ring: bool = False) -> float:
        """One collective or message. Round a ring each rank sends and receives at once: the two are one exchange."""
        if ring and kind in ("send", "receive"):
            return self.rates.nccl_s("exchange", 2, size) if kind == "receive" else 0.0
        if kind in ("send", "receive"):
            return self.rates.nccl_s("send", 2, size)
        return self.rates.nccl_s(kind, ranks, size)

    def pass_s(self, kernels: Iterable[Kernel]) -> Seconds:
        """One pass through one layer, by part."""
        parts: dict[str, float] = {}
        count = 0
        for kernel in kernels:
            parts[kernel.part] = parts.get(kernel.part, 0.0) + self.kernel_s(kernel)
            count += 1
        parts["launch"] = count * self.host().operator_s
        return Seconds(parts)

    # ---- the step --------------------------------------------------------------------------------

    def step(self) -> Step:
        config, plan = self.config, self.config.plan
        m = plan.grad_accumulation_steps
        stages = self._stages()
        by_rank = [[s for s in stages if s.rank == rank] for rank in range(plan.pp)]
        work = [sum((s.seconds.forward + s.seconds.backward for s in own), Seconds()) * m for own in by_rank]
        busiest = max(range(plan.pp), key=lambda r: work[r].total)
        parts = dict(work[busiest].parts)
        timeline, durations = None, self._durations(stages)
        if plan.pp > 1:
            timeline = schedule.lay(actions.table(plan), durations, trace=False)
            rank = timeline.ranks[busiest]
            parts["pp"] = rank.exposed_sends_s
            parts["bubble"] = timeline.seconds - work[busiest].total - parts["pp"]
        trained = max(sum(s.trained for s in own) for own in by_rank)
        whole = float(trained * (self.lanes - 1))
        if m > 1:  # each micro batch after the first adds its gradients to those that are there
            whole += trained * (m - 1) / (plan.shard_size if plan.zero_stage > 1 and plan.dp * plan.cp > 1 else 1)
        parts["other"] += sum(
            self.memory_s("add", SUM_BYTES * whole / pieces) * pieces for pieces in [self._tensors()] if whole
        )
        parts["dp"] = sum(self._data_s(call) for call in step_collectives(self.traces, config, 0, "cpu"))
        held = max(1.0, trained / plan.shard_size)
        parts["optimizer"] = self.eager.optimizer.seconds(held) * self.eager.factor("elementwise", plan.world_size)
        parts["fixed"] = self.host().step_s
        evaluation = max(sum(s.seconds.forward.total for s in own) for own in by_rank)
        evaluation *= math.ceil(config.evaluation.samples / (plan.mbs * self.lanes * plan.dp))
        return Step(sum(parts.values()), parts, tuple(stages), m, timeline, durations, evaluation)

    def _tensors(self) -> int:
        """Trained tensors of a rank: each is added on its own."""
        blocks = sum(w.trained for w in self.traces["block"].weights) * self.config.model.n_layers
        return max(1, int(blocks) // self.config.plan.pp)

    def _stages(self) -> list[Stage]:
        plan = self.config.plan
        forward = {kind: self.pass_s(layer.only("forward")) for kind, layer in self.layers.items()}
        backward = {kind: self.pass_s(layer.only("recompute", "backward")) for kind, layer in self.layers.items()}
        wgrad = {
            kind: sum(self.kernel_s(k) for k in layer.kernels if k.role == "wgrad")
            for kind, layer in self.layers.items()
        }
        made = []
        for i, (embed, kept, head) in enumerate(split_layers(self.config.model.n_layers, plan.pp * plan.vp)):
            counts = {k: n for k, n in (("embed", int(embed)), ("block", len(kept)), ("head", int(head))) if n}
            seconds = LayerSeconds(
                sum((forward[kind] * n for kind, n in counts.items()), Seconds()),
                sum((backward[kind] * n for kind, n in counts.items()), Seconds()),
                sum(wgrad[kind] * n for kind, n in counts.items()),
            )
            weights = sum(self.layers[kind].weights * n for kind, n in counts.items())
            trained = sum(self.layers[kind].trained * n for kind, n in counts.items())
            made.append(Stage(stage_rank(i, plan), len(kept), embed, head, seconds, weights, trained))
        return made

    def _durations(self, stages: list[Stage]) -> schedule.Durations:
        block = self.traces["block"]
        message = self.collective_s("send", 2, block.tensor_bytes[block.inputs[0]]) if len(stages) > 1 else 0.0
        backward = [s.seconds.backward.total for s in stages]
        weight = [s.seconds.weight for s in stages]
        return schedule.Durations(
            forward_s=tuple(s.seconds.forward.total for s in stages),
            backward_s=tuple(backward),
            backward_input_s=tuple(b - w for b, w in zip(backward, weight, strict=True)),
            backward_weight_s=tuple(weight),
            link_s=(message,) * (len(stages) - 1),
            latency_s=(0.0,) * (len(stages) - 1),
            gather_s=(0.0,) * len(stages),
            reduce_s=(0.0,) * len(stages),
            overlap_sends=False,
            overlap_data=False,
        )

    def _data_s(self, call: Collective) -> float:
        """A call between steps or over data-parallel ranks, with FSDP's copies into and out of its buffers."""
        if call.axis in LAYER_AXES:
            return 0.0
        seconds = self.collective_s(call.kind, len(call.ranks), call.bytes)
        if call.kind in ("all_gather", "reduce_scatter"):
            seconds += self.memory_s("copy_", 2 * call.bytes) + self.memory_s("copy_", 2 * call.bytes / len(call.ranks))
        return seconds
