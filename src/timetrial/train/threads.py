"""How many CPU threads a rank computes with.

The machine's cores shared out over its ranks, unless others are at work on them: OpenMP's threads wait
actively for one another, so one thread that gets no core stops all. Measured with one of two cores taken
by another process: 256 ms a step with two threads, 100 ms with one (docs/lab-log.md). So a run of one
process first tries all cores, half of them and one on a small feed-forward, and takes the fastest.
Whole rounds are counted, interruptions included: a median of single products would not see them.

The count is part of the run's configuration: sums are split by threads, so a resumed run that changed
it would round differently.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from timetrial.train.environment import cores_available
from timetrial.train.process import Process

WORTH = 1.1
"""How many times faster more threads must be, to be taken."""
TRIAL_S = 0.6
"""Seconds of each trial: several turns of the kernel's scheduler."""
ROWS, DIM, FFN = 1024, 128, 448


def choose(process: Process) -> int:
    """Threads for this rank; a second or two of measuring where there is a choice to make."""
    cores = max(1, cores_available() // process.local_world_size)
    if process.world_size > 1 or process.device.type != "cpu" or cores == 1:
        return cores
    best, best_rate = 1, rounds_per_s(1)
    for threads in sorted({max(2, cores // 2), cores}):
        rate = rounds_per_s(threads)
        if rate > WORTH * best_rate:
            best, best_rate = threads, rate
    return best


def rounds_per_s(threads: int, seconds: float = TRIAL_S) -> float:
    """Forward and backward passes of a small feed-forward per second with `threads` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.full((ROWS, DIM), 0.5)
        w1, w2 = (torch.full(size, 0.01, requires_grad=True) for size in ((FFN, DIM), (DIM, FFN)))
        _round(x, w1, w2)  # starts the threads
        began, rounds = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            _round(x, w1, w2)
            rounds += 1
        return rounds / passed
    finally:
        torch.set_num_threads(before)


def _round(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    torch.autograd.grad(F.linear(F.silu(F.linear(x, w1)), w2).square().sum(), (w1, w2))
