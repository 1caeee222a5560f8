"""Pipeline parallelism: a model cut into stages by layers, run by PyTorch's schedules.

Embedding and loss count as a layer each (`plan.split_layers`). A rank holds `vp` stages: rank r has stages
r, r + pp, r + 2 pp, ... or, in the V-shaped schedule, r and 2 pp - 1 - r.

| plan              | schedule (class of torch.distributed.pipelining)                      |
| ----------------- | ---------------------------------------------------------------------- |
| 1f1b, vp = 1      | Schedule1F1B (Narayanan et al. 2019, PipeDream-Flush)                   |
| 1f1b, vp > 1      | ScheduleInterleaved1F1B (Narayanan et al. 2021, arXiv:2104.04473)       |
| zb                | ScheduleInterleavedZeroBubble (Qi et al. 2023, arXiv:2401.10241, ZB1P)  |
| zbv, vp = 2       | ScheduleZBVZeroBubble (the same, section 6)                            |

Micro batches keep the gradient of one rank: their losses are sums divided by the step's token count, so
schedules must not scale (`scale_grads=False`), and FSDP reduces after the last of them, unless the plan's
`zero` is above 1, which the plain 1F1B allows.

Shapes are known from the plan, so nothing is sent to agree on them. Evaluation is a plain forward chain
here, for a schedule prepares itself anew each time it changes between training and evaluation; its batches
may be of any size, since all ranks of a pipeline read the same ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.microbatch import _Replicate

from timetrial.config import Plan
from timetrial.errors import UserError
from timetrial.parallel import fsdp
from timetrial.parallel.engine import NoTimer, Timer
from timetrial.parallel.plan import split_layers, stage_rank


def cut(model: nn.Module, plan: Plan, pp_rank: int) -> dict[int, nn.Module]:
    """This rank's stages: index -> the model with all but its layers and ends taken out.

    Stages share the whole model's parameters and modules; what no stage of this rank keeps is freed with it.
    """
    layers = model.get_submodule("layers")
    parts = split_layers(len(list(layers.children())), plan.pp * plan.vp)
    stages = {}
    for index, (embedding, kept, head) in enumerate(parts):
        if stage_rank(index, plan) != pp_rank:
            continue
        stage = shallow(model)
        names = [name for name, _ in layers.named_children()]
        stage._modules["layers"] = nn.ModuleDict({names[i]: layers.get_submodule(names[i]) for i in kept})
        if not embedding:
            stage._modules["embed"] = None
        if not head:
            stage._modules["norm"] = stage._modules["head"] = None
        stages[index] = stage
    return stages


def shallow(model: nn.Module) -> nn.Module:
    """A copy of `model` that shares its parameters and modules but not its tables: what is taken out of one stays in
    the other, and a hook of one (FSDP puts some on each stage) does not run with the other."""
    made = copy.copy(model)
    for name, value in vars(model).items():
        if isinstance(value, (dict, set)):
            setattr(made, name, copy.copy(value))
    return made


def joined(model: nn.Module, stages: dict[int, nn.Module]) -> nn.Module:
    """One module with everything that `stages` of the uncut `model` hold, under the whole model's names."""
    if len(stages) == 1:
        return next(iter(stages.values()))
    whole = shallow(model)
    whole._modules = dict.fromkeys(model._modules)
    blocks: dict[str, nn.Module] = {}
    for stage in stages.values():
        for name, child in stage.named_children():
            if name == "layers":
                blocks.update(child.named_children())
            else:
                whole._modules[name] = child
    whole._modules["layers"] = nn.ModuleDict(blocks)
    return whole


class Stage(PipelineStage):
    """A stage that tells a timer its forward and backward work; waiting for others is in neither."""

    timer: Timer = NoTimer()
    zero: int = 1

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.timer.phase("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.timer.phase("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.timer.phase("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self.zero == 1:  # torch's own way: nothing is reduced or dropped before the step ends
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        fsdp.last_micro_batch(self.submod, self.zero, last_backward)
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None


class Pipeline:
    """This rank's stages and the schedule that runs them."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        plan: Plan,
        group: dist.ProcessGroup,
        shape_BTD: tuple[int, int, int],
        dtype: torch.dtype,
        vocab_part: int,
        seq_len: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """`shape_BTD` of the activations between stages, `seq_len` tokens a rank reads, `vocab_part` logits wide.

        `loss_fn(logits, labels)` is what the backward pass starts from.
        """
        self.stages, self.plan, self.group, self.device = stages, plan, group, device
        self.shape_BTD, self.dtype = shape_BTD, dtype
        self.n_micro_batches = plan.grad_accumulation_steps
        total = plan.pp * plan.vp
        mbs = shape_BTD[0]
        with torch.device("meta"):  # shapes only
            tokens = torch.empty(mbs, seq_len, dtype=torch.int64)
            between = torch.empty(shape_BTD, dtype=dtype, requires_grad=True)
            logits = torch.empty(mbs, seq_len, vocab_part, dtype=dtype, requires_grad=True)
        self.torch_stages = [
            Stage(
                module,
                index,
                total,
                device,
                input_args=tokens if index == 0 else between,
                output_args=logits if index == total - 1 else between,
                group=group,
            )
            for index, module in stages.items()
        ]
        for stage in self.torch_stages:
            stage.zero = plan.zero_stage
        self.schedule = self._schedule(loss_fn)

    def _schedule(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> Any:
        kind = schedule_class(self.plan)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        return kind(
            self.torch_stages[0] if single else self.torch_stages,
            self.n_micro_batches,
            loss_fn=loss_fn,
            kwargs_chunk_spec={"positions_T": _Replicate},
            scale_grads=False,
        )

    @property
    def has_first(self) -> bool:
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        return self.plan.pp * self.plan.vp - 1 in self.stages

    def step(self, tokens: list[Tensor], labels: list[Tensor], positions_T: Tensor, timer: Timer) -> list[Tensor]:
        """Forward and backward of all micro batches; the losses of the last stage, else an empty list."""
        if len(tokens) != self.n_micro_batches:
            raise UserError(f"this pipeline runs {self.n_micro_batches} micro batches a step, not {len(tokens)}")
        for stage in self.torch_stages:
            stage.timer = timer
        losses: list[Tensor] = []
        self.schedule.step(
            *([torch.cat(tokens)] if self.has_first else []),
            target=torch.cat(labels) if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
            positions_T=positions_T,
        )
        return losses

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions_T: Tensor) -> Tensor | None:
        """One batch through all stages, without gradients; the logits on the last stage's rank, else None."""
        x: Tensor = tokens
        mbs = tokens.shape[0]
        last = self.plan.pp * self.plan.vp - 1
        for index in range(last + 1):
            here, before = stage_rank(index, self.plan), stage_rank(index - 1, self.plan) if index else None
            if index not in self.stages:
                continue
            if before is not None and before != here:
                x = torch.empty((mbs, *self.shape_BTD[1:]), dtype=self.dtype, device=self.device)
                dist.recv(x, group=self.group, group_src=before)
            x = self.stages[index](x, positions_T)
            after = stage_rank(index + 1, self.plan) if index < last else here
            if after != here:
                dist.send(x.contiguous(), group=self.group, group_dst=after)
        return x if self.has_last else None


class Action(NamedTuple):
    """One piece of work of a pipeline rank."""

    stage: int
    kind: str
    """F forward, B backward; zero-bubble schedules split B into I (for the input) and W (for the weights)."""
    micro_batch: int


def action_table(plan: Plan) -> list[list[Action]]:
    """What each pipeline rank computes, in order. Needs no process group."""
    kind = schedule_class(plan)
    if kind is schedules.Schedule1F1B:
        # written out: the table that torch's class gives of itself numbers the last rank's forwards from 1
        return [_one_forward_one_backward(rank, plan.pp, plan.grad_accumulation_steps) for rank in range(plan.pp)]
    stub = SimpleNamespace(num_stages=plan.pp * plan.vp, group_size=plan.pp, group_rank=0, submod=None)
    order = kind([stub] * plan.vp, plan.grad_accumulation_steps).pipeline_order
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            Action(a.stage_index, letters[a.computation_type.name], a.microbatch_index)
            for a in order[rank]
            if a is not None and a.computation_type.name in letters
        ]
        for rank in range(plan.pp)
    ]


def _one_forward_one_backward(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """As many forwards as there are stages from here on, then one backward and one forward in turn."""
    ahead = min(micro_batches, pp - rank)
    actions = [Action(rank, "F", i) for i in range(ahead)]
    for i in range(micro_batches):
        actions.append(Action(rank, "B", i))
        if ahead + i < micro_batches:
            actions.append(Action(rank, "F", ahead + i))
    return actions


def schedule_class(plan: Plan) -> Any:
    """The class that runs `plan`."""
    if plan.schedule == "zbv":
        return schedules.ScheduleZBVZeroBubble
    if plan.schedule == "zb":
        return schedules.ScheduleInterleavedZeroBubble
    return schedules.ScheduleInterleaved1F1B if plan.vp > 1 else schedules.Schedule1F1B
