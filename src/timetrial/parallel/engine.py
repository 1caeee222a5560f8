"""What the trainer sees of a model under any plan: one step, one evaluation, one clipping.

The trainer's arithmetic is the same on every layout, because the engine keeps two promises:

- the gradient is that of `sum of token losses / tokens of the global batch`: each rank divides by the
  global count and gradients are summed over ranks, so that micro batches and ranks with different
  numbers of counted tokens weigh right (a mean of means would not);
- a `dp_rank` is a logical reader: all tensor, context and pipeline ranks of one data-parallel rank
  read the same whole samples and get the same numbers back.

`OneRank` is the straight path: the plain model, autograd, nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from timetrial.parallel.head import model_loss_sum

Batch = dict[str, Tensor]
"""`tokens` and `labels`, int64 [B, S]; labels are already shifted; -100 marks tokens without loss."""


class Timer(Protocol):
    """Something that adds up the time spent under a name."""

    def phase(self, name: str) -> AbstractContextManager[object]: ...


class NoTimer:
    """Times nothing."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()


class Engine(ABC):
    """A model laid out over ranks, ready to be stepped."""

    model: nn.Module
    """This rank's part of the model (its pipeline stages; sharded parameters are DTensors)."""
    device: torch.device
    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    """Which reader of the data this rank is; ranks that differ only in tp, cp or pp share it."""
    dp_size: int = 1
    stream_name: str = "0"
    """For seeding dropout: tensor-parallel ranks, which see the same activations, share a name; all others differ."""

    def parameters_named(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters, frozen ones included, under the single-device model's names."""
        return [(plain_name(name), p) for name, p in self.model.named_parameters()]

    def whole_weights(self) -> dict[str, Tensor]:
        """The whole model's parameters by name, on the CPU. Collective; empty on all ranks but 0.

        For exporting: it takes the memory of the whole model on one rank.
        """
        return {name: p.detach().cpu() for name, p in self.parameters_named()}

    @abstractmethod
    def train_step(self, micro_batches: list[Batch], total_tokens: int | Tensor, timer: Timer | None = None) -> Tensor:
        """Forward and backward over all micro batches of this dp rank; gradients add to `.grad`.

        `total_tokens` is the number of counted tokens of the step over *all* dp ranks. Returns the sum
        of token losses over this dp rank's samples, a float32 scalar; it stays on the device, so that
        nothing waits for it. Phases: "forward", "backward".
        """

    @abstractmethod
    def eval_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum of token losses, counted tokens) over this dp rank's `batch`, without gradients."""

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; the norm before that, float32.

        Nothing waits for the device: a norm that is not finite spoils the gradients and is the caller's to
        see. The norm is 0 where no rank has a gradient. Collective.
        """
        held = [self.held_part(p.grad) for p in self.model.parameters() if p.grad is not None]
        own = torch.zeros((), device=self.device)
        if held:
            norms = [norm.float() for norm in torch._foreach_norm([part for part, _ in held])]
            if any(copies > 1 for _, copies in held):  # scalars, since a CUDA graph copies nothing from the host
                norms = list(torch._foreach_mul(norms, [copies**-0.5 for _, copies in held]))
            own = torch.linalg.vector_norm(torch.stack(norms))
        norm = self.norm_over_ranks(own)
        if held:  # 1e-6 as in Megatron-Core and in torch
            torch._foreach_mul_([part for part, _ in held], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def held_part(self, grad: Tensor) -> tuple[Tensor, int]:
        """(what this rank holds of `grad`, on how many ranks each element of it lies)."""
        return grad, 1

    def norm_over_ranks(self, norm: Tensor) -> Tensor:
        """The norm of all ranks' parts together, from the norm of this rank's."""
        return norm

    @abstractmethod
    def reduce_sums(self, values: Tensor) -> Tensor:
        """`values` summed over the dp ranks, in place; the same on every rank afterwards."""


class OneRank(Engine):
    """The whole model on one device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model.to(device)
        self.replicas = [self.model]
        """Modules that share the parameters' memory and compute parts of a batch; see `lanes.py`."""
        self.device = device

    def train_step(self, micro_batches: list[Batch], total_tokens: int | Tensor, timer: Timer | None = None) -> Tensor:
        self.model.train()
        return self._forward_backward(self.model, micro_batches, total_tokens, timer or NoTimer())

    def _forward_backward(
        self, model: nn.Module, micro_batches: list[Batch], total_tokens: int | Tensor, timer: Timer
    ) -> Tensor:
        """`train_step` of one of `replicas`."""
        total = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with timer.phase("forward"):
                loss_sum = self._loss_sum(model, batch)
            with timer.phase("backward"):
                torch.autograd.backward(loss_sum / total_tokens)
            total += loss_sum.detach()
        return total

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.model.eval()
        return self._loss_sum(self.model, batch), counted_tokens(batch)

    def _loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, labels = batch["tokens"].to(self.device), batch["labels"].to(self.device)
        return model_loss_sum(model, tokens, labels)

    def reduce_sums(self, values: Tensor) -> Tensor:
        return values


def counted_tokens(batch: Batch) -> Tensor:
    """Tokens of `batch` that have a label, int64 scalar."""
    return (batch["labels"] >= 0).sum()


def plain_name(name: str) -> str:
    """The single-device model's name of a parameter: wrappers leave marks in it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
