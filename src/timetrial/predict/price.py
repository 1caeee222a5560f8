"""What the kernels of a layer cost on a system: seconds by part of the breakdown.

A kernel is priced by its kind: a product or attention by the system's measured rates, one bound by memory by
bytes over bandwidth, a collective by the network. What hides a collective is the work of its own kind beside
it: tensor-parallel gathers and scatters run under the products, the ring's sends under attention, all-to-alls
under the products of another micro batch. What is left over is exposed; what is hidden slows the computing
beside it by the share of the device that carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from timetrial.predict.events import Op, flops
from timetrial.predict.kernels import Kernel
from timetrial.systems.rates import Rates
from timetrial.systems.stack import Stack

PARTS = ("matmul", "attention", "other", "cast", "tp", "cp", "ep", "launch")
"""Of one micro batch's time in one layer; the step adds pp, bubble, dp, optimizer and fixed."""


@dataclass(frozen=True)
class Seconds:
    """Time by part."""

    parts: Mapping[str, float] = field(default_factory=dict)
    """Part of the breakdown -> seconds."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __add__(self, other: Seconds) -> Seconds:
        keys = (*self.parts, *(k for k in other.parts if k not in self.parts))
        return Seconds({k: self.parts.get(k, 0.0) + other.parts.get(k, 0.0) for k in keys})

    def __mul__(self, factor: float) -> Seconds:
        return Seconds({k: v * factor for k, v in self.parts.items()})


@dataclass(frozen=True)
class LayerSeconds:
    """One micro batch through one layer."""

    forward: Seconds
    backward: Seconds
    """With recomputation."""
    weight: float = 0.0
    """The part of the backward pass that only weights' gradients need: a zero-bubble schedule may put it off."""

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total


@dataclass(frozen=True)
class Fitted:
    """The constants that hold for one system under one stack; `constants.py` says what they mean."""

    speed: float
    """Rate of products and attention under training's load, as a share of single kernels'."""
    memory: float
    """The same of kernels bound by memory."""
    network: float
    """The same of collectives."""
    fp4_kernels: float
    """Rate of products in four bits, as a further share."""
    skew: float
    """What each doubling of the accelerators that keep step costs, as a share of the step: the slowest of them is
    waited for, and fabrics are shared."""
    mx_kernels: float
    """Rate of products in MXFP8, as a share of that of the format whose curve they borrow."""
    fp8_attention: float
    """Rate of attention in fp8, as a share of that in bf16."""
    launch_s: float
    """Host time of one kernel, s."""
    step_s: float
    """Of a step, outside of the model, s."""
    tp_overlap: float
    """Share of the products' time that can hide tensor-parallel communication."""
    cp_overlap: float
    """Share of attention's time that can hide context-parallel communication."""
    dp_overlap: float
    """Share of the last backward and the first forward pass that can hide gradients' and parameters' communication."""
    contention: float
    """What a second of hidden communication costs the computing beside it, s."""
    flops_per_joule: float | None = None
    """Of bf16 products; what the design power lets an accelerator sustain. None: no limit."""


@dataclass(frozen=True)
class Totals:
    """One pass through one layer: seconds by single kernels' rates, before any constant."""

    products: Mapping[str, float]
    """Format -> seconds of the products in it."""
    weights: Mapping[str, float]
    """The same of those that make weights' gradients alone."""
    work: Mapping[str, float]
    """Format -> FLOP of the products in it."""
    attention: Mapping[str, float]
    """Format -> seconds at the rate of bf16 (fp32 at its own)."""
    memory: Mapping[str, float]
    """other, cast -> seconds."""
    hidden: Mapping[str, float]
    """Axis -> seconds of its collectives that may run beside computing."""
    bare: Mapping[str, float]
    """Axis -> seconds of those that may not: what attention waits for."""
    launches: int


@dataclass(frozen=True)
class Pricing:
    """All that a layer's price depends on besides the layer."""

    rates: Rates
    stack: Stack
    fitted: Fitted
    collective_s: Callable[[str, str, int], float]
    """(kind, axis, bytes of the whole tensor) -> seconds on the plan's placement."""
    graphs: str = "none"
    """Which launches cost the host nothing: none, layer or full."""
    overlaps: frozenset[str] = frozenset({"tp", "cp", "dp"})
    """Axes whose communication runs beside computing."""
    watts: float = 0.0
    """Design power of the accelerator, W."""
    again: float = 0.0
    """Share of the blocks whose forward pass runs again in the backward pass, beside what their traces say."""

    def kernel_s(self, kernel: Kernel) -> float:
        """Seconds of one kernel by the rates of single kernels."""
        if kernel.kind == "matmul":
            batch, m, n, k = kernel.shape
            return self.rates.matmul_s(kernel.format, m, n, k, batch)
        if kernel.kind == "attention":
            batch, heads, kv_heads, tokens, kv_tokens, head_dim = kernel.shape
            causal, backward = kernel.role.endswith("causal"), kernel.role.startswith("backward")
            fmt = "bf16" if kernel.format == "fp8" else kernel.format
            return self.rates.attention_s(
                fmt, batch, heads, kv_heads, tokens, kv_tokens, head_dim, causal=causal, backward=backward
            )
        if kernel.kind == "memory":
            return self.rates.memory_s(kernel.bytes)
        return self.collective_s(kernel.role, kernel.part, kernel.bytes)

    def totals(self, kernels: Iterable[Kernel]) -> Totals:
        """One pass, added up."""
        sums: dict[str, dict[str, float]] = {name: {} for name in _SUMS}
        launches = 0

        def add(name: str, key: str, value: float) -> None:
            sums[name][key] = sums[name].get(key, 0.0) + value

        for kernel in kernels:
            seconds = self.kernel_s(kernel)
            launches += 1
            if kernel.kind == "matmul":
                add("products", kernel.format, seconds)
                add("work", kernel.format, flops(Op("matmul", "", "", "", shape=kernel.shape)))
                if kernel.role == "wgrad":
                    add("weights", kernel.format, seconds)
            elif kernel.kind == "attention":
                add("attention", kernel.format, seconds)
            elif kernel.kind == "memory":
                add("memory", kernel.part, seconds)
            else:
                add("bare" if kernel.role == "all_to_all" else "hidden", kernel.part, seconds)
        return Totals(launches=launches, **sums)

    def pass_s(self, totals: Totals) -> Seconds:
        """What is exposed of each part, and what the host's launches add where it is slower."""
        fit, parts = self.fitted, dict.fromkeys(PARTS, 0.0)
        for fmt, seconds in totals.products.items():
            speed = fit.speed * (fit.fp4_kernels if fmt in FOUR_BITS else fit.mx_kernels if fmt == "mxfp8" else 1.0)
            parts["matmul"] += _both(seconds / speed, self._powered_s(fmt, totals.work[fmt]))
        for fmt, seconds in totals.attention.items():
            parts["attention"] += seconds / fit.speed / (fit.fp8_attention if fmt == "fp8" else 1.0)
        for part, seconds in totals.memory.items():
            parts[part] += seconds / fit.memory
        device = sum(parts.values())
        beside = {
            "tp": fit.tp_overlap * parts["matmul"],
            "cp": fit.cp_overlap * parts["attention"],
            "ep": self.stack.ep_overlap * parts["matmul"],
        }
        for axis, seconds in totals.hidden.items():
            parts[axis] += self.exposed_s(axis, seconds / fit.network, beside[axis])
        for axis, seconds in totals.bare.items():
            parts[axis] += seconds / fit.network
        gaps = totals.launches * self.stack.gap_s
        host = totals.launches * fit.launch_s if self.graphs == "none" else 0.0
        parts["launch"] = gaps + max(0.0, host - device - gaps - parts["tp"] - parts["cp"])
        return Seconds(parts)

    def layer_s(self, forward: Totals, backward: Totals) -> LayerSeconds:
        """One micro batch through a layer; `backward` with recomputation."""
        weight = sum(backward.weights.values()) / self.fitted.speed
        return LayerSeconds(self.pass_s(forward), self.pass_s(backward), weight)

    def _powered_s(self, fmt: str, work: float) -> float:
        """The least time that the design power allows products of `work` FLOP."""
        if self.fitted.flops_per_joule is None:
            return 0.0
        return work * ENERGY.get(fmt, 1.0) / (self.fitted.flops_per_joule * self.watts)

    def exposed_s(self, axis: str, seconds: float, beside: float) -> float:
        """What communication over `axis` adds to a pass when `beside` seconds of computing can hide it."""
        hidden = min(seconds, beside) if axis in self.overlaps else 0.0
        return seconds - hidden + self.fitted.contention * hidden


def _both(a: float, b: float) -> float:
    """The larger of two limits, rounded off where they are alike."""
    return float((a**4 + b**4) ** 0.25)


FOUR_BITS = ("nvfp4", "mxfp4")
_SUMS = ("products", "weights", "work", "attention", "memory", "hidden", "bare")

ENERGY = {"fp32": 2.0, "bf16": 1.0, "fp8": 0.55, "fp8_block": 0.55, "mxfp8": 0.55, "nvfp4": 0.33, "mxfp4": 0.33}
"""Energy of one multiply-add as a share of bf16's: between the operands' widths and their squares; assumed."""
