"""How many CPU threads a rank computes with, and in how many lanes.

The machine's cores shared out over its ranks, unless others are at work on them: OpenMP's threads wait
actively for one another, so one thread that gets no core stops all. Measured with one of two cores taken
by another process: 256 ms a step with two threads, 100 ms with one (docs/lab-log.md). Lanes
(`parallel/lanes.py`) wait for each other once a step only. So a run of one process first tries all cores,
half of them and one, and all of them in lanes, on a small feed-forward, and takes the fastest. Whole
rounds are counted, interruptions included: a median of single products would not see them.

Both counts are part of the run's configuration: sums are split by them, so a resumed run that changed
one would round differently.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

from timetrial.check import against_lanes
from timetrial.config import RunConfig, replace
from timetrial.train.environment import cores_available
from timetrial.train.process import Process

WORTH = 1.1
"""How many times faster more threads must be, to be taken."""
TRIAL_S = 0.6
"""Seconds of each trial: several turns of the kernel's scheduler."""
ROWS, DIM, FFN = 1024, 128, 448
MAX_LANES = 8
"""Each lane but the first holds one more copy of the gradients."""


def settle(config: RunConfig, process: Process) -> RunConfig:
    """`config` with its threads and lanes chosen, where they are not given; a few seconds where there is a choice."""
    if config.threads is not None and config.lanes is not None:
        return config
    if config.threads is not None:
        return replace(config, lanes=lanes_for(config, config.threads, process))
    threads, lanes = choose(config, process)
    return replace(config, threads=threads, lanes=config.lanes or lanes)


def choose(config: RunConfig, process: Process) -> tuple[int, int]:
    """(threads, lanes) for this rank."""
    cores = max(1, cores_available() // process.local_world_size)
    if process.world_size > 1 or process.device.type != "cpu" or cores == 1:
        return cores, 1
    best, best_rate = (1, 1), rounds_per_s(1)
    for threads in sorted({max(2, cores // 2), cores}):
        for lanes in sorted({1, lanes_for(config, threads, process)}):
            rate = rounds_per_s(threads, lanes)
            if rate > WORTH * best_rate:
                best, best_rate = (threads, lanes), rate
    return best


def lanes_for(config: RunConfig, threads: int, process: Process) -> int:
    """The most lanes into which `threads` and the micro batch both divide; 1 where lanes cannot be used."""
    if process.world_size > 1 or process.device.type != "cpu" or against_lanes(config):
        return 1
    both = math.gcd(threads, config.plan.mbs)
    return max(lanes for lanes in range(1, min(both, MAX_LANES) + 1) if both % lanes == 0)


def rounds_per_s(threads: int, lanes: int = 1, seconds: float = TRIAL_S) -> float:
    """Forward and backward passes of a small feed-forward per second with `threads` threads in `lanes` lanes."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(lanes, initializer=lambda: torch.set_num_threads(max(1, threads // lanes))) as pool:
            return sum(pool.map(lambda _: _lane_rounds_per_s(ROWS // lanes, seconds), range(lanes))) / lanes
    finally:
        torch.set_num_threads(before)


def _lane_rounds_per_s(rows: int, seconds: float) -> float:
    x = torch.full((rows, DIM), 0.5)
    w1, w2 = (torch.full(size, 0.01, requires_grad=True) for size in ((FFN, DIM), (DIM, FFN)))
    _round(x, w1, w2)  # starts the threads
    began, rounds = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        _round(x, w1, w2)
        rounds += 1
    return rounds / passed


def _round(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    torch.autograd.grad(F.linear(F.silu(F.linear(x, w1)), w2).square().sum(), (w1, w2))
