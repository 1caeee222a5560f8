"""`train --dry-run`: what a run would be, without starting it.

Bytes per rank count what is there between two steps: weights, gradients, optimizer state. Weights and
AdamW's two moments are float32 (4 + 4 + 4 bytes), gradients float32 (4), bf16 copies of the weights
where matrix products take bf16 (2). Activations are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from timetrial.config import RunConfig, dumps
from timetrial.parallel.mesh import describe as describe_mesh
from timetrial.train.build import count_parameters


@dataclass(frozen=True)
class Bytes:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    low_precision: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.low_precision


def bytes_per_rank(config: RunConfig, total: int, trainable: int) -> Bytes:
    """State of the largest rank, as if every part divided evenly by the ranks that share it.

    Tensor and pipeline ranks hold different weights; data and context ranks shard theirs (FSDP).
    """
    plan = config.plan
    ranks = plan.tp * plan.pp * plan.dp * plan.cp
    return Bytes(
        weights=-(-4 * total // ranks),
        gradients=-(-4 * trainable // ranks),
        optimizer=-(-8 * trainable // ranks),
        low_precision=-(-2 * total // (plan.tp * plan.pp)) if plan.precision == "bf16" else 0,
    )


def describe(config: RunConfig, gpus_per_node: int = 8, domain: int | None = None) -> str:
    """The resolved configuration, parameter counts and bytes per rank, for people."""
    total, trainable = count_parameters(config)
    size = bytes_per_rank(config, total, trainable)
    plan = config.plan
    lines = [
        dumps(config).rstrip(),
        "",
        f"parameters          {total:,}" + (f" ({trainable:,} trainable)" if trainable != total else ""),
        f"model FLOP          {config.flops_per_step:.4g} per step, {config.flops_per_step / plan.gbs:.4g} per sample",
        f"ranks               {plan.world_size} ({mapping(config)})",
        *(["", describe_mesh(plan, gpus_per_node, domain), ""] if plan.world_size > 1 else []),
        f"per optimizer step  {plan.gbs} samples = {plan.dp} data parallel x {plan.grad_accumulation_steps} "
        f"micro batches x {plan.mbs}",
        f"bytes per rank      {human(size.total)}: weights {human(size.weights)}, gradients {human(size.gradients)}, "
        f"optimizer {human(size.optimizer)}"
        + (f", bf16 weights {human(size.low_precision)}" if size.low_precision else "")
        + " (activations not counted)",
    ]
    return "\n".join(lines)


def mapping(config: RunConfig) -> str:
    """`TP4 x CP2 x PP8 (VP8) x DP39, order tp-cp-pp-dp`."""
    plan = config.plan
    virtual = f" (VP{plan.vp})" if plan.vp > 1 else ""
    return f"TP{plan.tp} x CP{plan.cp} x PP{plan.pp}{virtual} x DP{plan.dp}, order {plan.order}"


def human(n: float) -> str:
    """Bytes with a binary unit: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")
