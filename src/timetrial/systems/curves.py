"""What a kernel takes as a function of its shape: a few parameters a format, fitted to measured times.

The parameters lie in data files (`kernels.json`, made by `make_rates.py`); only the shape of the curves is here.
Times are seconds, sizes bytes. Evaluation is plain Python and takes a few microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Matmul(Protocol):
    """One format's matrix products."""

    def seconds(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """(m, k) times (k, n), `batch` times in one kernel."""
        ...


class Attention(Protocol):
    """One format's attention kernels."""

    def seconds(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        tokens: int,
        kv_tokens: int,
        head_dim: int,
        causal: bool,
        backward: bool,
    ) -> float:
        """One kernel, forward or backward. Causal: half of the square."""
        ...


@dataclass(frozen=True)
class MatmulCurve:
    """launch + (math^4 + memory^4)^(1/4): tiles spread over the multiprocessors in waves, or the operands' bytes.

    math = waves x tile area x 2 (k + k_extra) / rate of one multiprocessor, for the best of a few tiles; waves lie
    between the exact and the rounded-up number, as kernels split the last wave more or less well.
    """

    flops: float
    """Peak of the format, FLOP/s."""
    bytes_per_s: float
    """Peak of the memory, bytes/s."""
    sms: int
    launch_s: float
    """Of the shortest product."""
    efficiency: float
    """Share of the peak within the main loop."""
    k_extra: float
    """What filling and draining a tile costs, in elements of k."""
    rounding: float
    """0: waves count as fractions; 1: the last wave counts in full."""
    small_tile: float
    """Rate of the smallest tile, as a share of the large ones' rate."""
    settling: float
    """How far clocks fall in long kernels: time x (1 + time / settle_s)^settling."""
    settle_s: float
    memory_share: float
    """Share of the memory's peak that reading and writing the matrices reaches."""
    element_bytes: float
    """Of the operands, with scales; the result has `result_bytes`."""
    result_bytes: float
    tiles: tuple[tuple[int, int], ...]
    """Rows and columns, the smallest last."""

    def seconds(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """See Matmul."""
        rounding, last = self.rounding, self.tiles[-1]
        best = math.inf
        for tile in self.tiles:
            rows, columns = tile
            waves = batch * -(-m // rows) * -(-n // columns) / self.sms
            work = (rounding * math.ceil(waves) + (1 - rounding) * waves) * rows * columns
            if tile is last:
                work /= self.small_tile
            best = min(best, work)
        busy = best * 2 * (k + self.k_extra) * self.sms / (self.flops * self.efficiency)
        busy *= (1 + busy / self.settle_s) ** self.settling
        moved = batch * ((m + n) * k * self.element_bytes + m * n * self.result_bytes)
        memory = moved / (self.bytes_per_s * self.memory_share)
        return self.launch_s + float((busy**4 + memory**4) ** 0.25)


@dataclass(frozen=True)
class AttentionCurve:
    """launch + math + memory; the backward pass is 2.5 times the forward FLOP at a share of its rate.

    math = 4 batch heads tokens (keys seen + tokens_extra) head_dim / rate, in waves of 128 rows of one head.
    """

    flops: float
    """Peak of the format, FLOP/s."""
    bytes_per_s: float
    sms: int
    launch_s: float
    efficiency: tuple[tuple[int, float], ...]
    """(head_dim, share of the peak), ascending; between them by the logarithm, beyond them constant."""
    tokens_extra: float
    """Softmax and start of a row of blocks, in keys."""
    rounding: float
    """As in MatmulCurve."""
    settling: float
    settle_s: float
    full: tuple[tuple[int, float], ...]
    """(head_dim, time of unmasked attention per key seen, relative to causal)."""
    traffic: float
    """Multiple of the bytes of q, k, v and the result that is moved at the memory's peak."""
    element_bytes: float
    backward: tuple[tuple[int, float], ...]
    """(head_dim, rate of the backward pass as a share of the forward pass's at long sequences)."""
    backward_tokens: float
    """Keys at which that share has halved."""

    def seconds(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        tokens: int,
        kv_tokens: int,
        head_dim: int,
        causal: bool,
        backward: bool,
    ) -> float:
        """See Attention."""
        keys = kv_tokens / 2 + 64 if causal else kv_tokens
        rate = self.flops * _between(self.efficiency, head_dim)
        busy = 4 * batch * heads * tokens * (keys + self.tokens_extra) * head_dim / rate
        if not causal:
            busy *= _between(self.full, head_dim)
        waves = batch * heads * -(-tokens // 128) / self.sms
        busy *= 1 + self.rounding * (math.ceil(waves) / waves - 1)
        busy *= (1 + busy / self.settle_s) ** self.settling
        queries, keys_values = batch * heads * tokens, batch * kv_heads * kv_tokens
        moved = head_dim * (queries * (self.element_bytes + 2) + 2 * keys_values * self.element_bytes)
        memory = self.traffic * moved / self.bytes_per_s
        work = busy + memory
        if backward:
            work *= 2.5 / _between(self.backward, head_dim) * (1 + self.backward_tokens / kv_tokens)
        return float(self.launch_s + work)


def _between(points: Sequence[tuple[int, float]], x: int) -> float:
    """Linear in log x between points that ascend, constant beyond."""
    below = points[0]
    for point in points:
        if x <= point[0]:
            if x <= below[0]:
                return below[1] if x < point[0] else point[1]
            share = math.log(x / below[0]) / math.log(point[0] / below[0])
            return below[1] + share * (point[1] - below[1])
        below = point
    return below[1]


@dataclass(frozen=True)
class Line:
    """Measured (size, seconds), sizes ascending: straight in logarithms between, constant below, proportional above."""

    sizes: tuple[float, ...]
    times: tuple[float, ...]

    def seconds(self, size: float) -> float:
        """Time at a size."""
        sizes, times = self.sizes, self.times
        if size <= sizes[0]:
            return times[0]
        if size >= sizes[-1]:
            return times[-1] * size / sizes[-1]
        i = 1
        while sizes[i] < size:
            i += 1
        share = math.log(size / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
        return float(times[i - 1] * (times[i] / times[i - 1]) ** share)


@dataclass(frozen=True)
class Roof:
    """floor + bytes / (share of peak): kernels bound by memory."""

    floor_s: float
    bytes_per_s: float

    def seconds(self, size: float) -> float:
        """Time to move so many bytes in all."""
        return self.floor_s + size / self.bytes_per_s
