"""Trace one layer of each kind by running the training code on tensors without memory.

The model, its adapters, its layout over tensor- and context-parallel ranks and its recomputation are those
of a run (`parallel/parallelize.py`); tensors are fake and the process group answers for ranks that do not
exist. So a trace takes a second on a laptop, of a layer of any size on any number of ranks.

What a trace is made of:

- one rank (the first) of the plan's tp x cp, with one micro batch. Data and pipeline parallelism change how
  often a layer runs and what is sent between layers, not the layer;
- for a GPU and bf16, weights and activations in bfloat16: what FSDP gathers and casts to. (Without data or
  context ranks there is no FSDP, and a run keeps float32 between its products. A trace does not show that.)
- "embed" is a model's forward pass with nothing but its embedding, rotation tables included; "head" is the
  last norm, the head and the loss, of which the tables are left out. In a pipeline without tensor parallelism
  the loss is another (`parallel/head.py`), and so is the trace;
- gradients as each layer makes them: adding them up over micro batches and ranks is not in it.

`saved` are the tensors that the forward pass makes or gets and that the rest reads again. Rotation tables,
which all layers share, are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from timetrial.config import Plan, RunConfig, replace
from timetrial.errors import UserError
from timetrial.models import lora
from timetrial.models.layers.rope import frequencies, rotation
from timetrial.models.llama.model import CausalAttention
from timetrial.parallel import context, cuda, parallelize, pipeline
from timetrial.parallel.engine import plain_name
from timetrial.parallel.head import model_loss_sum
from timetrial.parallel.loss import token_loss_sum
from timetrial.parallel.mesh import Mesh
from timetrial.parallel.plan import validate
from timetrial.predict.events import LayerTrace, Weight
from timetrial.predict.trace_modules import ModulePaths
from timetrial.predict.trace_record import Tracer, without_phantoms

DEVICES = ("cuda", "cpu")
MOST_CHUNKS = 128
"""Chunks of the loss in a trace; those of a longer sequence are longer here than in a run, so that a trace of any
sequence ends. By then a chunk's products take milliseconds, and what is launched around them does not count."""


def trace_layers(config: RunConfig, kind: str = "cuda") -> dict[str, LayerTrace]:
    """The traces of "embed", "block" and "head" under `config.plan`, as a device of `kind` would compute them.

    Makes a process group of its own and ends it, so the process must not have one (RuntimeError). Raises
    UserError on a plan that the model cannot be laid out by.
    """
    if kind not in DEVICES:
        raise ValueError(f"no way of tracing for {kind}; there are {', '.join(DEVICES)}")
    plan = config.plan
    local = Plan(tp=plan.tp, cp=plan.cp, mbs=plan.mbs, gbs=plan.mbs, precision=plan.precision, recompute=plan.recompute)
    one = replace(config, plan=local, model=replace(config.model, n_layers=1))
    validate(local, one, local.world_size)
    cuda.check(local, torch.device(kind))
    if dist.is_initialized():
        raise RuntimeError("tracing makes a process group of its own, and this process has one already")
    try:
        with _world(local) as mesh:
            return _Layers(one, plan.pp > 1, kind, mesh).trace()
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        mapping = f"tp={plan.tp}, cp={plan.cp}, ep={plan.ep}, mbs={plan.mbs}, recompute={plan.recompute}"
        raise UserError(f"--plan: {config.workload} cannot be traced with {mapping} ({reason}); change one") from error


@contextmanager
def _world(plan: Plan) -> Iterator[DeviceMesh | None]:
    """A mesh of the plan's ranks, none of which exist but this one; None where it is alone."""
    if plan.world_size == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    try:
        yield Mesh.of(plan).device_mesh("cpu")
    finally:
        dist.destroy_process_group()


class FlashAttention(CausalAttention):
    """Attention as the one operator that it is on a GPU, wherever its tensors are."""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return out.transpose(1, 2)


@dataclass(frozen=True)
class _Job:
    """One layer to run."""

    kind: str
    layer: nn.Module
    x: Tensor
    """What comes in from the layer before, or tokens."""
    run: Callable[[Tensor], Tensor]
    inputs: tuple[Tensor, ...]
    tables: tuple[Tensor, ...] = ()


class _Layers:
    """A one-block model laid out over `mesh`."""

    def __init__(self, config: RunConfig, pipelined: bool, kind: str, mesh: DeviceMesh | None) -> None:
        self.config, self.pipelined, self.kind, self.mesh = config, pipelined, kind, mesh
        plan = config.plan
        self.dtype = torch.bfloat16 if plan.precision == "bf16" and kind == "cuda" else torch.float32
        with torch.device("meta"):
            model: nn.Module = config.model.create()
            if config.lora is not None:
                lora.apply(model, config.lora, seed=config.seed)
        # before it is laid out: a fake or a distributed parameter cannot change its type
        self.model = model.to(self.dtype).train()
        parallelize.choose(model, plan, kind)
        if kind == "cuda":
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if type(child) is CausalAttention:
                        parent.register_module(name, FlashAttention())
        if mesh is None:
            parallelize.recomputed(model, plan)
        else:
            parallelize.lay_out(model, config, mesh, kind)

    def trace(self) -> dict[str, LayerTrace]:
        # a mesh cannot be made inside, so that all of it lies there already
        with FakeTensorMode(allow_non_fake_inputs=True):
            self.model.to_empty(device="cpu")
            return {job.kind: self._trace(job) for job in self._jobs()}

    def _jobs(self) -> Iterator[_Job]:
        config, model, plan = self.config, self.model, self.config.plan
        tokens_here = config.data.seq_len // plan.cp
        tokens = torch.empty((plan.mbs, tokens_here), dtype=torch.int64)
        labels = torch.empty_like(tokens)
        places = context.positions(config.data.seq_len, plan.cp, 0)
        blocks = model.get_submodule("layers")

        def activations() -> Tensor:
            shape = (plan.mbs, tokens_here // plan.tp, config.model.dim)
            return torch.empty(shape, dtype=self.dtype, requires_grad=True)

        embed = _part(model, ("norm", "head"))
        yield _Job("embed", embed, tokens, lambda x: embed(x, places), (tokens,))

        shape = config.model
        tables = rotation(places, frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, tokens.device))
        cos, sin = (table.to(self.dtype) for table in tables)
        block = next(iter(blocks.children()))
        x = activations()
        yield _Job("block", block, x, lambda x: block(x, cos, sin), (x,), (cos, sin))

        head = _part(model, ("embed",))
        group = None if self.mesh is None or plan.tp == 1 else self.mesh.get_group("tp")

        def loss(x: Tensor) -> Tensor:
            if self.pipelined:
                return token_loss_sum(head(x, places), labels, group)
            return model_loss_sum(head, x, labels, places, group, self.kind, MOST_CHUNKS)

        x = activations()
        yield _Job("head", head, x, loss, (x, labels))

    def _trace(self, job: _Job) -> LayerTrace:
        named = {plain_name(name): p for name, p in job.layer.named_parameters()}
        with ModulePaths(job.layer) as paths:
            tracer = Tracer(paths, self._axes(), [_local(p) for p in named.values()])
            inputs = tuple(map(tracer.id_of, job.inputs))
            tables = set(map(tracer.id_of, job.tables))
            with without_phantoms(tracer):
                with tracer:
                    y = job.run(job.x)
                outputs = (tracer.id_of(y),)
                tracer.begin_backward()
                if y.requires_grad:
                    grad = torch.empty_like(y)
                    with tracer:
                        torch.autograd.backward(y, grad)
        lived = tracer.touched_before | set(inputs)
        saved = (lived & tracer.read_after) - tracer.weights - tables
        # a stage without blocks makes the rotation tables all the same; they are the embedding's
        ops = [op for op in tracer.ops if not (job.kind == "head" and op.phase == "forward" and op.module == "")]
        used = {i for op in ops for i in (*op.reads, *op.writes)} | {*inputs, *outputs}
        return LayerTrace(
            kind=job.kind,
            ops=tuple(ops),
            tensor_bytes={i: n for i, n in tracer.tensor_bytes.items() if i in used},
            weights=tuple(_weight(name, p) for name, p in named.items()),
            inputs=inputs,
            outputs=outputs,
            saved=tuple(sorted(saved & used)),
            precision=self.config.plan.precision,
        )

    def _axes(self) -> dict[tuple[int, ...], str]:
        """Global ranks of this rank's groups -> axis."""
        if self.mesh is None:
            return {}
        axes = [axis for axis in ("tp", "cp") if getattr(self.config.plan, axis) > 1]
        return {tuple(dist.get_process_group_ranks(self.mesh.get_group(axis))): axis for axis in axes}


def _part(model: nn.Module, without: tuple[str, ...]) -> nn.Module:
    """`model` without its blocks and some of its ends, as pipeline stages are (`pipeline.cut`)."""
    part = pipeline.shallow(model)
    part._modules |= dict.fromkeys(without)
    part._modules["layers"] = nn.ModuleDict()
    return part


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _weight(name: str, parameter: nn.Parameter) -> Weight:
    replicated = isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate()
    axis_sum = "tp" if replicated and parameter.requires_grad else ""
    return Weight(name, tuple(_local(parameter).shape), parameter.requires_grad, axis_sum)
