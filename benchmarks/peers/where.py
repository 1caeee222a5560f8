"""Where Timetrial's step goes: its operations by kind, and the step that matrix products alone would make.

Two measurements. Each product of the step, forward and backward, is timed by itself through `torch.mm` at the
step's shapes and threads; a large square product is taken as what the machine can do. Then the trainer runs,
first undisturbed, then under torch.profiler, and the profiler's own times are added up by kind of operation.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from peers import timetrial_run
from peers.shape import Shape
from timetrial.config import replace

WARM_UP, UNDISTURBED, PROFILED = 2, 3, 2
"""Steps."""
REPEATS = 5
TRIAL_S = 0.5
SQUARE = 2048
KINDS = ("matrix products", "attention", "cross entropy", "norms, rope, elementwise", "optimizer", "clipping", "other")
MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
ENTROPY = ("softmax", "nll_loss", "cross_entropy", "logsumexp")


def seconds(work: Callable[[], Any]) -> float:
    """The best time of a few calls: what the machine can do. The first call is not counted."""
    work()
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < TRIAL_S:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def products(shape: Shape) -> list[dict[str, Any]]:
    """Every linear layer's three products, as autograd makes them: the best time of each and how many a step has."""
    found = []
    for name, (out, into, count) in shape.linears.items():
        x, grad, weight = torch.randn(shape.tokens, into), torch.randn(shape.tokens, out), torch.randn(out, into)
        found.append(
            {
                "layers": name,
                "out": out,
                "in": into,
                "count": count,
                "forward_s": seconds(lambda x=x, weight=weight: torch.mm(x, weight.t())),
                "input_gradient_s": seconds(lambda grad=grad, weight=weight: torch.mm(grad, weight)),
                "weight_gradient_s": seconds(lambda grad=grad, x=x: torch.mm(grad.t(), x)),
            }
        )
    return found


def kind(event: FunctionEvent) -> str:
    """The kind of work of an operation, by its name and those it is part of."""
    name, above = event.name, []
    while event.cpu_parent is not None:
        event = event.cpu_parent
        above.append(event.name)
    if any(part.startswith("Optimizer.") for part in (name, *above)):
        return "optimizer"
    if any("_foreach_" in part or "vector_norm" in part for part in (name, *above)):
        return "clipping"
    if any("scaled_dot_product" in part for part in (name, *above)):
        return "attention"
    if name in MATRIX:
        return "matrix products"
    if any(sign in part for part in (name, *above) for sign in ENTROPY):
        return "cross entropy"
    return "norms, rope, elementwise" if name.startswith("aten::") else "other"


def over_vocabulary(event: FunctionEvent, vocab: int) -> bool:
    """Whether an operation works on logits."""
    return any(shape and shape[-1] == vocab for shape in event.input_shapes or ())


def by_kind(events: list[FunctionEvent], vocab: int) -> dict[str, float]:
    """Seconds by kind, over all `events`."""
    total = dict.fromkeys(KINDS, 0.0)
    for event in events:
        found = kind(event)
        if found == "norms, rope, elementwise" and over_vocabulary(event, vocab):
            found = "cross entropy"
        total[found] += event.self_cpu_time_total / 1e6
    return total


def steps(shape: Shape, threads: int) -> tuple[float, dict[str, float]]:
    """(seconds of an undisturbed step, seconds of a profiled step by kind; those add up to the profiled step)."""
    timetrial_run.offer_random_tokens(shape)
    config = timetrial_run.configuration(shape, 1, threads, False, WARM_UP + UNDISTURBED + PROFILED)
    config = replace(config, lanes=1)  # the profiler sees one thread's operations
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)

    def between(trainer: Any) -> None:
        if trainer.progress.step == WARM_UP + UNDISTURBED:
            profiler.start()
        elif trainer.progress.step == WARM_UP + UNDISTURBED + PROFILED:
            profiler.stop()

    with tempfile.TemporaryDirectory() as directory:
        timetrial_run.run(config, Path(directory) / "run", between)
        times = [row["step_time_s"] for row in timetrial_run.rows(Path(directory) / "run")]
    spent = {name: total / PROFILED for name, total in by_kind(list(profiler.events() or []), shape.vocab).items()}
    spent["other"] = max(0.0, statistics.mean(times[-PROFILED:]) - sum(spent.values()) + spent["other"])
    return statistics.median(times[WARM_UP : WARM_UP + UNDISTURBED]), spent


def measure(shape: Shape, threads: int) -> dict[str, Any]:
    """All of it, on one rank."""
    torch.set_num_threads(threads)
    a, b = torch.randn(SQUARE, SQUARE), torch.randn(SQUARE, SQUARE)
    square_s = seconds(lambda: torch.mm(a, b))
    step_s, spent = steps(shape, threads)
    torch.set_num_threads(threads)
    return {
        "threads": threads,
        "square_flops_per_s": 2.0 * SQUARE**3 / square_s,
        "products": products(shape),
        "step_s": step_s,
        "profiled_step_s": sum(spent.values()),
        "kinds": spent,
    }


def table(found: dict[str, Any], shape: Shape) -> str:
    """For reading."""
    peak = found["square_flops_per_s"]
    lines = [
        f"where the time goes, one rank of {found['threads']} thread(s)",
        f"  {'product, GFLOP/s':24s} {'forward':>8s} {'d input':>8s} {'d weight':>8s} {'s a step':>9s}",
    ]
    alone = flop = 0.0
    for p in found["products"]:
        one = 2.0 * shape.tokens * p["out"] * p["in"]
        times = [p["forward_s"], p["input_gradient_s"], p["weight_gradient_s"]]
        alone += sum(times) * p["count"]
        flop += 3 * one * p["count"]
        size = f"{p['layers']} {p['out']}x{p['in']} ({p['count']})"
        lines.append(f"  {size:24s} {' '.join(f'{one / t / 1e9:8.1f}' for t in times)} {sum(times) * p['count']:9.3f}")
    rate = flop / alone
    lines += [
        f"  all products alone: {alone:.3f} s a step, {rate / 1e9:.1f} GFLOP/s, {rate / peak:.0%} of a square "
        f"product of {SQUARE} ({peak / 1e9:.1f})",
        f"  the step: {found['step_s']:.3f} s, {shape.tokens / found['step_s']:,.0f} tokens/s; products alone would "
        f"give {shape.tokens / alone:,.0f}",
        f"  {shape.flops / found['step_s'] / 1e9:.1f} GFLOP/s of model arithmetic, "
        f"{shape.flops / found['step_s'] / peak:.0%} of the square product's rate",
        f"  {'of the profiled step':24s} {'s':>8s} {'share':>7s}",
    ]
    for name, spent in found["kinds"].items():
        lines.append(f"  {name:24s} {spent:8.3f} {spent / found['profiled_step_s']:7.1%}")
    return "\n".join(lines)
