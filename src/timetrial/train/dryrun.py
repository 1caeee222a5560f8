"""`train --dry-run`: what a run would be, without starting it.

Bytes per rank count what a step holds at once beside activations. Between steps there are weights and
AdamW's two moments, float32 (4 + 4 + 4 bytes), sharded. Within a step there are gradients, float32 (4), and
the weights in use: gathered, or copied, in bf16 (2) where matrix products take that, else gathered in
float32 (4). How much of these two a rank holds at once follows from `plan.zero` (`parallel/fsdp.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from timetrial.config import RunConfig, dumps
from timetrial.parallel.mesh import describe as describe_mesh
from timetrial.train.build import empty_model


@dataclass(frozen=True)
class Bytes:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    in_use: int
    """Copies of weights that a step computes with."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.in_use


def bytes_per_rank(config: RunConfig, model: nn.Module) -> Bytes:
    """What a rank holds of `model`, as if every part divided evenly by the ranks that share it.

    Tensor and pipeline ranks hold different weights; a shard group of data and context ranks shares its own.
    """
    plan = config.plan
    total, trainable = count_parameters(model)
    cut = plan.tp * plan.pp
    ranks = cut * plan.shard_size
    fsdp = plan.dp * plan.cp > 1
    blocks = [count_parameters(block)[0] for block in model.get_submodule("layers").children()]
    if fsdp and plan.zero_stage == 3:  # a block, the one fetched ahead of its use, and what is outside the blocks
        used = (total - sum(blocks)) / min(plan.pp, 2) + 2 * max(blocks, default=0)
        used /= plan.tp
    else:
        used = total / cut
    whole = fsdp and plan.zero_stage == 1 and (plan.pp > 1 or plan.grad_accumulation_steps > 1)
    size = 2 if plan.precision == "bf16" else 4 if fsdp else 0
    return Bytes(
        weights=math.ceil(4 * total / ranks),
        gradients=math.ceil(4 * trainable / (cut if whole else ranks)),
        optimizer=math.ceil(8 * trainable / ranks),
        in_use=math.ceil(size * min(used, total / cut)),
    )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(all, trainable) parameters, elements."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def describe(config: RunConfig, gpus_per_node: int = 8, domain: int | None = None) -> str:
    """The resolved configuration, parameter counts and bytes per rank, for people."""
    model = empty_model(config)
    total, trainable = count_parameters(model)
    size = bytes_per_rank(config, model)
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
        + (f", weights in use {human(size.in_use)}" if size.in_use else "")
        + " (activations not counted)",
    ]
    return "\n".join(lines)


def mapping(config: RunConfig) -> str:
    """`TP4 x CP2 x PP8 (VP8) x DP39, order tp-cp-pp-dp`."""
    plan = config.plan
    virtual = f" (VP{plan.vp})" if plan.vp > 1 else ""
    sharding = ""
    if plan.dp * plan.cp > 1:
        sharding = f", sharded over {plan.shard_size}, ZeRO-{plan.zero_stage}"
    return f"TP{plan.tp} x CP{plan.cp} x PP{plan.pp}{virtual} x DP{plan.dp}, order {plan.order}{sharding}"


def human(n: float) -> str:
    """Bytes with a binary unit: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")
