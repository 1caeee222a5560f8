"""The engine over several ranks: data, tensor, context and pipeline parallelism in one mesh.

`Sharded` runs whole micro batches one after another, `Pipelined` gives them to a schedule. Both cut
sequences for context parallelism by themselves, so that the reader of data never knows of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from timetrial.config import Plan
from timetrial.parallel import context, fsdp, tensor
from timetrial.parallel.engine import Batch, Engine, NoTimer, Timer, counted_tokens
from timetrial.parallel.head import model_loss_sum
from timetrial.parallel.loss import token_loss_sum
from timetrial.parallel.mesh import CANONICAL
from timetrial.parallel.pipeline import Pipeline


class _Distributed(Engine):
    """What both ways of running a step share: groups, cutting, norms, sums."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
        """`model` is this rank's part, already laid out over `mesh`."""
        self.model, self.plan, self.mesh, self.device = model, plan, mesh, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.dp_rank, self.dp_size = mesh.get_local_rank("dp"), plan.dp
        self.coordinates = {axis: mesh.get_local_rank(axis) for axis in CANONICAL}
        dp, cp, pp = (self.coordinates[axis] for axis in ("dp", "cp", "pp"))
        self.stream_name = f"{dp}" if plan.cp * plan.pp == 1 else f"{dp}.{cp}.{pp}"
        self.vocab_group = mesh.get_group("tp") if plan.tp > 1 else None
        self._positions: dict[int, Tensor] = {}

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor]:
        keep = all(self.coordinates[axis] == 0 for axis in ("dp", "cp", "tp"))  # rank 0's pipeline
        weights = {}
        for name, p in self.parameters_named():
            whole = gathered(p) if isinstance(p, DTensor) else p.detach()
            if keep:
                weights[name] = whole.cpu()
        if self.plan.pp == 1 or not keep:
            return weights if self.rank == 0 else {}
        stages: list[Any] = [None] * self.plan.pp
        group = self.mesh.get_group("pp")
        dist.gather_object(weights, stages if self.rank == 0 else None, group=group, group_dst=0)
        return {name: w for stage in stages for name, w in stage.items()} if self.rank == 0 else {}

    def positions(self, seq_len: int) -> Tensor:
        """Where this rank's tokens of a sequence stand, [T]."""
        if seq_len not in self._positions:
            own = context.positions(seq_len, self.plan.cp, self.coordinates["cp"])
            self._positions[seq_len] = own.to(self.device)
        return self._positions[seq_len]

    def cut(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """This rank's tokens and labels, [B, T]."""
        tokens, labels = batch["tokens"].to(self.device), batch["labels"].to(self.device)
        if self.plan.cp == 1:
            return tokens, labels
        own = self.positions(tokens.shape[1])
        return tokens.index_select(1, own), labels.index_select(1, own)

    def over_dp_rank(self, loss_sum: Tensor) -> Tensor:
        """Sum what the cp and pp ranks of one dp rank have of its samples' loss, in place."""
        for axis in ("cp", "pp"):
            if getattr(self.plan, axis) > 1:
                dist.all_reduce(loss_sum, group=self.mesh.get_group(axis))
        return loss_sum

    def reduce_sums(self, values: Tensor) -> Tensor:
        if self.plan.dp > 1:
            dist.all_reduce(values, group=self.mesh.get_group("dp"))
        return values

    def held_part(self, grad: Tensor) -> tuple[Tensor, int]:
        if not isinstance(grad, DTensor):
            return grad, 1
        copies = 1
        for dim, placement in enumerate(grad.placements):
            copies *= grad.device_mesh.size(dim) if isinstance(placement, Replicate) else 1
        return grad.to_local(), copies

    def norm_over_ranks(self, norm: Tensor) -> Tensor:
        squares = norm.square()
        dist.all_reduce(squares)  # each element of the gradient lies once in the world, or counts in shares
        return squares.sqrt()

    def _finish_gradients(self) -> None:
        if self.plan.tp > 1:
            tensor.finish_gradients([p for _, p in self.parameters_named()])


def gathered(x: DTensor) -> Tensor:
    """All of `x`. Collective; data-parallel shards first, for they are cut from tensor-parallel parts."""
    if x.device_mesh.ndim > 1:
        x = x.redistribute(placements=[*(Replicate() for _ in x.placements[:-1]), x.placements[-1]])
    return x.full_tensor()


class Sharded(_Distributed):
    """Data, tensor and context parallelism: every rank has every layer."""

    def train_step(self, micro_batches: list[Batch], total_tokens: int | Tensor, timer: Timer | None = None) -> Tensor:
        timer = timer or NoTimer()
        self.model.train()
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(micro_batches):
            fsdp.last_micro_batch(self.model, self.plan.zero_stage, i + 1 == len(micro_batches))
            with timer.phase("forward"):
                loss_sum = self._loss_sum(batch)
            with timer.phase("backward"):
                torch.autograd.backward(loss_sum / total_tokens)
            total += loss_sum.detach()
        with timer.phase("backward"):
            self._finish_gradients()
        return self.over_dp_rank(total)

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.model.eval()
        loss_sum = self.over_dp_rank(self._loss_sum(batch))
        fsdp.reshard(self.model)
        return loss_sum, counted_tokens(batch)

    def _loss_sum(self, batch: Batch) -> Tensor:
        tokens, labels = self.cut(batch)
        positions_T = self.positions(batch["tokens"].shape[1])
        return model_loss_sum(self.model, tokens, labels, positions_T, self.vocab_group)


class Pipelined(_Distributed):
    """Pipeline parallelism over any of the others."""

    def __init__(
        self,
        model: nn.Module,
        stages: dict[int, nn.Module],
        plan: Plan,
        mesh: DeviceMesh,
        device: torch.device,
        shape_BTD: tuple[int, int, int],
        dtype: torch.dtype,
        vocab_part: int,
        seq_len: int,
    ) -> None:
        """`stages` are the parts of `model`; the shapes are those of `Pipeline`."""
        super().__init__(model, plan, mesh, device)
        self._stages = list(stages.values())
        self._total_tokens: int | Tensor = 1
        self._timer: Timer = NoTimer()
        self.pipeline = Pipeline(
            stages, plan, mesh.get_group("pp"), shape_BTD, dtype, vocab_part, seq_len, self._scaled_loss, device
        )

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        with self._timer.phase("forward"):
            return token_loss_sum(logits, labels, self.vocab_group) / self._total_tokens

    def train_step(self, micro_batches: list[Batch], total_tokens: int | Tensor, timer: Timer | None = None) -> Tensor:
        self._timer = timer = timer or NoTimer()
        self._total_tokens = total_tokens
        self._mode(train=True)
        tokens, labels = zip(*(self.cut(batch) for batch in micro_batches), strict=True)
        positions_T = self.positions(micro_batches[0]["tokens"].shape[1])
        losses = self.pipeline.step(list(tokens), list(labels), positions_T, timer)
        with timer.phase("backward"):
            self._finish_gradients()
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)
        return self.over_dp_rank(total * total_tokens)

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self._mode(train=False)
        tokens, labels = self.cut(batch)
        logits = self.pipeline.forward(tokens, self.positions(batch["tokens"].shape[1]))
        loss_sum = torch.zeros((), device=self.device)
        if logits is not None:
            loss_sum = token_loss_sum(logits, labels, self.vocab_group)
        for stage in self._stages:
            fsdp.reshard(stage)
        return self.over_dp_rank(loss_sum), counted_tokens(batch)

    def _mode(self, train: bool) -> None:
        for stage in self._stages:
            stage.train(train)
