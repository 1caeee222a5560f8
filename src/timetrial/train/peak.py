"""The machine's own matrix-multiply rate: what MFU is measured against where no data sheet applies.

    rate = max over n of  2 n^3 / median time of one n x n by n x n product

Squares of growing size are multiplied in the run's compute format, with the run's threads, warm,
until about half a second is spent; the median of each size guards against interruptions, the best
size against products too small to fill the machine or too large for its cache. Sizes up to ENOUGH are
measured even when they take longer: on a busy machine a small product costs little but the waiting of
its threads for one another, which says nothing about the rate of larger ones.

Why not the data sheet's peak: processors lower their clock under wide vectors, containers hand out
part of a machine, and a machine without bf16 units has no bf16 peak at all. A run's MFU then says
which share of the products that *this* machine can do reached the model. The price: two machines'
MFU do not share a denominator, so the rate is stored and printed beside it.
"""

from __future__ import annotations

import statistics
import time

import torch

BUDGET_S = 0.5
LIMIT_S = 3.0
"""Seconds that the sizes up to ENOUGH may take together, on a slow or busy machine."""
ENOUGH = 1024
SIZES = (256, 512, 1024, 2048, 4096, 8192)
FEWEST = 3
"""Timed products of a size; with fewer a median says nothing."""


def matmul_flops_per_s(device: torch.device | str, dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of one process multiplying matrices of `dtype` on `device` with `threads` CPU threads.

    Takes about half a second, up to LIMIT_S on a slow or busy machine. The thread count is put back
    afterwards, and the default random generator is not touched. With several ranks on one machine,
    let all of them measure at the same time and add the rates up: alone, each would see the clock and
    memory that the others will use.
    """
    device = torch.device(device)
    before = torch.get_num_threads()
    if threads != before:
        torch.set_num_threads(threads)
    try:
        _time_products(SIZES[0], device, dtype, 0.0)  # loads the library and, on a GPU, makes the context
        return _best_rate(device, dtype)
    finally:
        if threads != before:
            torch.set_num_threads(before)


def _best_rate(device: torch.device, dtype: torch.dtype) -> float:
    best = 0.0
    start = time.perf_counter()
    for n, following in zip(SIZES, (*SIZES[1:], 0), strict=True):
        times = _time_products(n, device, dtype, BUDGET_S / len(SIZES))
        best = max(best, 2.0 * n**3 / statistics.median(times))
        next_s = (FEWEST + 1) * (following / n) ** 3 * min(times)
        budget = LIMIT_S if following <= ENOUGH else BUDGET_S
        if next_s > budget - (time.perf_counter() - start):
            break
    return best


def _time_products(n: int, device: torch.device, dtype: torch.dtype, budget_s: float) -> list[float]:
    """Seconds of single n x n products, at least FEWEST of them, until `budget_s` is spent."""
    # random values, not zeros: operands without bits to flip draw less power and clock higher
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    torch.mm(a, b, out=out)  # warm: threads started, kernels chosen, pages touched
    _wait(device)
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < FEWEST or time.perf_counter() - start < budget_s:
        t0 = time.perf_counter()
        torch.mm(a, b, out=out)
        _wait(device)
        times.append(time.perf_counter() - t0)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
