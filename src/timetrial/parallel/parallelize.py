"""The one entry of the engine: a run's configuration and a model in, something to step out.

Order of what is applied: precision -> attention -> pipeline cut -> tensor -> context -> recomputation ->
compile -> FSDP. Each rewrites the model in place and keeps its parameters' names (`engine.plain_name`). All of it
happens on the meta device; what a rank then holds gets its values last (`initial.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from timetrial.config import Plan, RunConfig
from timetrial.parallel import attention, cuda
from timetrial.parallel.engine import Engine, OneRank
from timetrial.parallel.initial import Values, fill
from timetrial.parallel.lanes import Lanes
from timetrial.parallel.plan import validate
from timetrial.precision import bf16

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def build(config: RunConfig, model: nn.Module, values: Values, device: torch.device | str = "cpu") -> Engine:
    """Lay `model` out over the ranks of this job as `config.plan` says, and give it its initial values.

    `model` is the whole model on the meta device; it is changed and must not be used afterwards. `values`
    gives whole parameters by name and must give the same on every rank.

    For more than one rank the process group must exist (`train.process.start`); the call is collective.
    Dropout draws from torch's generator, which is left to the caller. Raises UserError on a plan that
    cannot work.
    """
    device = torch.device(device)
    plan = config.plan
    validate(plan, config, dist.get_world_size() if dist.is_initialized() else 1)
    cuda.check(plan, device)
    choose(model, plan, device.type)
    if plan.world_size == 1:
        recomputed(model, plan)
        fill(model, values, device)
        lanes = config.lanes or 1
        engine = Lanes(model, lanes, config.threads or lanes) if lanes > 1 else OneRank(model, device)
        for replica in engine.replicas:
            compile_blocks(replica, plan)
        return engine
    return _distributed(config, model, values, device)


def choose(model: nn.Module, plan: Plan, device_type: str) -> None:
    """Put into `model` the ways of computing of a kind of device: its products and its attention."""
    if plan.precision == "bf16":
        bf16.convert(model, device_type)
    if device_type == "cpu":
        attention.apply(model)


def lay_out(stage: nn.Module, config: RunConfig, mesh: DeviceMesh, device_type: str) -> None:
    """Lay `stage` out over the tensor- and context-parallel ranks of `mesh`, in place, and wrap what is recomputed."""
    from timetrial.parallel import context, tensor

    plan = config.plan
    if plan.tp > 1:
        tensor.apply(stage, tensor.table_of(config.model), mesh["tp"])
    if plan.cp > 1:
        context.apply(stage, mesh.get_group("cp"), device_type)
    recomputed(stage, plan)


def recomputed(model: nn.Module, plan: Plan) -> None:
    """Wrap the blocks of `model` whose activations the plan recomputes, in place."""
    if plan.recompute != "none":
        from timetrial.parallel import recompute

        recompute.apply(model, plan.recompute, same_random_numbers=not plan.graph)


def compile_blocks(model: nn.Module, plan: Plan) -> None:
    """Run each block of `model` under torch.compile from its first call on, where the plan says so."""
    if plan.compile:
        # inductor takes a rounding to bfloat16 and back for nothing to do, and on a CPU that is what bf16 is
        options = {"emulate_precision_casts": True} if plan.precision == "bf16" else None
        for block in model.get_submodule("layers").children():
            block.compile(options=options)


def _distributed(config: RunConfig, model: nn.Module, values: Values, device: torch.device) -> Engine:
    # imported here: one rank should not wait for torch's distributed parts
    from timetrial.parallel import fsdp, pipeline, sharded
    from timetrial.parallel.mesh import Mesh

    plan = config.plan
    ranks = Mesh.of(plan)
    mesh = ranks.device_mesh(device.type)
    if plan.async_tp:
        cuda.asynchronous_tp(mesh.get_group("tp"))
    stages = pipeline.cut(model, plan, mesh.get_local_rank("pp"))
    shard = ranks.fsdp_mesh(mesh)
    for stage in stages.values():
        lay_out(stage, config, mesh, device.type)
        compile_blocks(stage, plan)
        if shard is not None:
            fsdp.apply(stage, shard, plan.precision, plan.zero_stage)
    part = pipeline.joined(model, stages)
    fill(part, values, device)
    if plan.pp == 1:
        return sharded.Sharded(part, plan, mesh, device)
    seq_len = config.data.seq_len // plan.cp
    half = plan.precision == "bf16" and shard is not None and device.type != "cpu"
    return sharded.Pipelined(
        part,
        stages,
        plan,
        mesh,
        device,
        shape_BTD=(plan.mbs, seq_len // plan.tp, config.model.dim),
        dtype=torch.bfloat16 if half else torch.float32,
        vocab_part=config.model.vocab_size // plan.tp,
        seq_len=seq_len,
    )
