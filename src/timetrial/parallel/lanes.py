"""Lanes: one rank's micro batch in parts that run side by side, each on CPU threads of its own.

Two threads inside one matrix product wait for each other at its end, and at the end of every norm, and
share one kernel's cache blocking; two products on a thread each do not. So a rank with t threads cuts its
micro batch into l parts of whole samples and gives each t / l threads. It is data parallelism without
ranks: lanes share the parameters' memory, and their gradients are added once a step, in lane order, so
that a run repeats bit for bit.

A lane keeps gradients of its own: 4 bytes a trainable parameter for each lane but the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

from timetrial.parallel.engine import Batch, NoTimer, OneRank, Timer, counted_tokens

T = TypeVar("T")


class Lanes(OneRank):
    """The whole model on one CPU rank, `lanes` parts of each micro batch at a time."""

    def __init__(self, model: nn.Module, lanes: int, threads: int) -> None:
        """`threads` are those of the rank; lanes share them out evenly.

        A forward pass must not draw random numbers: lanes would draw from one generator in any order.
        """
        super().__init__(model, torch.device("cpu"))
        self.replicas = [model, *(sharing(model) for _ in range(lanes - 1))]
        each = max(1, threads // lanes)
        self._pool = ThreadPoolExecutor(lanes, "lane", initializer=lambda: torch.set_num_threads(each))

    def train_step(self, micro_batches: list[Batch], total_tokens: int | Tensor, timer: Timer | None = None) -> Tensor:
        timer = timer or NoTimer()
        for replica in self.replicas:
            replica.train()

        def run(lane: int) -> Tensor:
            own = timer if lane == 0 else NoTimer()  # one lane's time is the wall's
            parts = [self._part(batch, lane) for batch in micro_batches]
            filled = [part for part in parts if len(part["tokens"])]
            return self._forward_backward(self.replicas[lane], filled, total_tokens, own)

        losses = self._side_by_side(run)
        with timer.phase("backward"):
            self._add_gradients()
        return torch.stack(losses).sum()

    def eval_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        for replica in self.replicas:
            replica.eval()

        @torch.no_grad()  # in the thread: gradient mode is each thread's own
        def run(lane: int) -> Tensor:
            part = self._part(batch, lane)
            return self._loss_sum(self.replicas[lane], part) if len(part["tokens"]) else torch.zeros(())

        return torch.stack(self._side_by_side(run)).sum(), counted_tokens(batch)

    def _part(self, batch: Batch, lane: int) -> Batch:
        return {key: value.tensor_split(len(self.replicas))[lane] for key, value in batch.items()}

    def _side_by_side(self, run: Callable[[int], T]) -> list[T]:
        return list(self._pool.map(run, range(len(self.replicas))))

    @torch.no_grad()
    def _add_gradients(self) -> None:
        """Add the other lanes' gradients to the model's, and drop them."""
        held = list(self.model.parameters())
        for replica in self.replicas[1:]:
            ours, theirs = [], []
            for mine, its in zip(held, replica.parameters(), strict=True):
                if its.grad is None:
                    continue
                if mine.grad is None:
                    mine.grad = its.grad
                else:
                    ours.append(mine.grad)
                    theirs.append(its.grad)
                its.grad = None
            if ours:
                torch._foreach_add_(ours, theirs)


def sharing(model: nn.Module) -> nn.Module:
    """A copy of `model` with parameters that share their memory with the model's but have gradients of their own."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)
