"""One optimizer step: forward, backward, clip, update. The same work eager and as a CUDA graph.

Nothing inside waits for the device: loss and norm are read once, when all is under way. So a loss that is
not finite shows after the update; the run ends there, and nothing of its state is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from timetrial.config import RunConfig
from timetrial.optim.adamw import set_learning_rate
from timetrial.parallel import cuda
from timetrial.parallel.engine import Batch, Engine, NoTimer, Timer
from timetrial.parallel.graph import CudaGraph, Graphed, Recorder


@dataclass(frozen=True)
class Outcome:
    """What a step tells, the same on every rank."""

    loss: float
    """Mean over the counted tokens of the global batch."""
    grad_norm: float
    """Before clipping."""


class Step:
    """Makes steps as they come. `clip_norm` is the global gradient norm above which gradients are scaled."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
        self.engine, self.optimizer, self.clip_norm = engine, optimizer, clip_norm

    def __call__(self, micro_batches: list[Batch], lr: float, timer: Timer) -> Outcome:
        """A step at the rate `lr`. Dropout draws from torch's generator, which the caller seeds. Collective."""
        set_learning_rate(self.optimizer, lr)
        counted = torch.tensor(count(micro_batches), dtype=torch.float64, device=self.engine.device)
        return _outcome(self.work(micro_batches, counted, timer))

    def work(self, micro_batches: list[Batch], counted: Tensor, timer: Timer) -> Tensor:
        """[sum of token losses, counted tokens, gradient norm] over all ranks, float64, on the device.

        `counted` are this dp rank's counted tokens, float64 scalar, overwritten by the sum.
        """
        engine = self.engine
        with cuda.attention(engine.device):
            total = engine.reduce_sums(counted)
            loss_sum = engine.reduce_sums(engine.train_step(micro_batches, total, timer).double())
            with timer.phase("optimizer"):
                norm = engine.clip_grad_norm(self.clip_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()  # to None: a graph's gradients live in its own memory
        return torch.stack((loss_sum, total, norm.double()))

    def close(self) -> None:
        """Free what the steps hold; before the process group goes."""


class GraphedStep(Step):
    """Makes the first steps as they come, then records one and replays it.

    All steps must have micro batches of the same number and shape. The optimizer must be fused and
    capturable and have been filled from its checkpoint; it keeps the tensor that holds the learning rate.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, clip_norm: float, recorder: Recorder) -> None:
        super().__init__(engine, optimizer, clip_norm)
        device = engine.device
        # CUDA's kernel reads the rate as float32, the CPU's as float64, which is what a Python float is
        self.lr = torch.zeros((), dtype=torch.float32 if device.type == "cuda" else torch.float64, device=device)
        set_learning_rate(optimizer, self.lr)
        self._counted = torch.zeros((), dtype=torch.float64, device=device)
        self._told = torch.zeros(3, dtype=torch.float64, device=device)
        self._inputs: list[Batch] = []
        self._graphed = Graphed(self._work_on_buffers, recorder)

    def __call__(self, micro_batches: list[Batch], lr: float, timer: Timer) -> Outcome:
        self._fill(micro_batches)
        self._counted.fill_(count(micro_batches))
        self.lr.fill_(lr)
        self._graphed()
        return _outcome(self._told)

    def _work_on_buffers(self) -> None:
        self._told.copy_(self.work(self._inputs, self._counted, NoTimer()))

    def _fill(self, micro_batches: list[Batch]) -> None:
        """Copy the samples to where the graph reads them."""
        if not self._inputs:
            device = self.engine.device
            self._inputs = [{k: torch.empty_like(v, device=device) for k, v in b.items()} for b in micro_batches]
        for own, given in zip(self._inputs, micro_batches, strict=True):
            for key, buffer in own.items():
                if buffer.shape != given[key].shape:  # copy_ would broadcast
                    raise ValueError(f"a graph of {key} {list(buffer.shape)} was given {list(given[key].shape)}")
                buffer.copy_(given[key], non_blocking=True)

    def close(self) -> None:
        self._graphed.close()


def make_step(config: RunConfig, engine: Engine, optimizer: torch.optim.Optimizer) -> Step:
    """The step that `config.plan` asks for, once `optimizer` has its state."""
    clip_norm = config.optim.clip_norm
    if config.plan.graph:
        return GraphedStep(engine, optimizer, clip_norm, CudaGraph(engine.device))
    return Step(engine, optimizer, clip_norm)


def count(micro_batches: list[Batch]) -> float:
    """Tokens with a label."""
    return float(sum(int((batch["labels"] >= 0).sum()) for batch in micro_batches))


def _outcome(told: Tensor) -> Outcome:
    loss_sum, tokens, norm = told.tolist()
    return Outcome(loss_sum / tokens, norm)
