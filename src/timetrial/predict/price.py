"""What the kernels of a layer cost on a system: seconds by part of the breakdown.

A kernel is priced by its kind: a product or attention by the system's measured rates, one bound by memory by
bytes over bandwidth, a collective by the network. What hides a collective is the work of its own kind beside
it: tensor-parallel gathers and scatters run under the products, the ring's sends under attention, all-to-alls
under the products of another micro batch. What is left over is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from timetrial.predict.kernels import Kernel, Layer
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


@dataclass(frozen=True)
class Pricing:
    """All that a kernel's price depends on besides the kernel."""

    rates: Rates
    stack: Stack
    collective_s: Callable[[str, str, int], float]
    """(kind, axis, bytes of the whole tensor) -> seconds on the plan's placement."""
    speed: float = 1.0
    """Sustained rate of the accelerator under training's load, as a share of its rate in single kernels."""
    graphs: str = "none"
    """Which launches cost the host nothing: none, layer or full."""
    tp_overlap: bool = True
    """Whether tensor-parallel communication runs beside the products."""
    launch_s: float = 6e-6
    """Host time of one launch, s."""

    def kernel_s(self, kernel: Kernel) -> float:
        """Seconds on the device."""
        rate = self.speed * self.stack.kernels
        if kernel.kind == "matmul":
            batch, m, n, k = kernel.shape
            return self.rates.matmul_s(kernel.format, m, n, k, batch) / rate
        if kernel.kind == "attention":
            batch, heads, kv_heads, tokens, kv_tokens, head_dim = kernel.shape
            causal, backward = kernel.role.endswith("causal"), kernel.role.startswith("backward")
            seconds = self.rates.attention_s(
                "bf16" if kernel.format != "fp32" else "fp32",
                batch, heads, kv_heads, tokens, kv_tokens, head_dim, causal=causal, backward=backward,
            )  # fmt: skip
            return seconds / rate / (self.stack.fp8_attention if kernel.format == "fp8" else 1.0)
        if kernel.kind == "memory":
            return self.rates.memory_s(int(kernel.bytes / self.stack.memory * self.rates.memory_share))
        return self.collective_s(kernel.role, kernel.part, kernel.bytes) / self.stack.network

    def phase_s(self, kernels: Iterable[Kernel]) -> Seconds:
        """One pass: what is exposed of each part, and what the host's launches add where it is slower."""
        parts = dict.fromkeys(PARTS, 0.0)
        launches = 0
        for kernel in kernels:
            parts[kernel.part] = parts.get(kernel.part, 0.0) + self.kernel_s(kernel)
            launches += 1
        device = parts["matmul"] + parts["attention"] + parts["other"] + parts["cast"]
        parts["tp"] = self._exposed(parts["tp"], self.stack.tp_overlap * self.tp_overlap, parts["matmul"])
        parts["cp"] = self._exposed(parts["cp"], self.stack.cp_overlap, parts["attention"])
        parts["ep"] = self._exposed(parts["ep"], self.stack.ep_overlap, parts["matmul"])
        gaps = launches * self.stack.gap_s
        host = launches * self.launch_s if self.graphs == "none" else 0.0
        parts["launch"] = gaps + max(0.0, host - device - gaps - parts["tp"] - parts["cp"])
        return Seconds(parts)

    def layer_s(self, layer: Layer) -> LayerSeconds:
        """Forward and backward of one micro batch."""
        backward = layer.only("recompute", "backward")
        weight = sum(self.kernel_s(k) for k in backward if k.kind == "matmul" and k.role == "wgrad")
        return LayerSeconds(self.phase_s(layer.only("forward")), self.phase_s(backward), weight)

    @staticmethod
    def _exposed(seconds: float, share: float, beside: float) -> float:
        """Of communication that may run beside `beside` seconds of computing, `share` of them at most."""
        return max(0.0, seconds - share * beside)
