"""Time the operators of real layers one by one: what eager code costs here, caches and strides as in training.

A small model runs forward and backward. A mode below autograd takes the time of each call; the traces of its layers
(`trace.py`) say which of the calls are kernels, of what shape and how many bytes.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from timetrial.config import Data, Evaluation, Lora, Optim, Plan, RunConfig
from timetrial.models.llama.config import LlamaConfig
from timetrial.parallel import parallelize
from timetrial.parallel.head import model_loss_sum
from timetrial.parallel.initial import fill
from timetrial.predict.events import LayerTrace, Op
from timetrial.predict.trace import trace_layers
from timetrial.predict.trace_record import ATTENTION, MATMUL
from timetrial.train.build import InitialValues, empty_model

Clock = Callable[[], float]
"""Seconds since some moment. `time.thread_time` counts those in which this thread computes: it does not see that
others take the core for a while, as they do on a busy machine, and all that is timed here runs on one thread."""
Traces = dict[str, LayerTrace]
VOCABULARY = 2048
DEPTH = 3
"""Blocks of a timed model: what a block has written has left the caches when its backward pass begins, as in runs."""
CACHE_BYTES = 64 << 20
"""More than the caches of a processor hold."""
MOST_SETS = 8


@dataclass(frozen=True)
class Size:
    """One model and micro batch to time the layers of."""

    dim: int
    ffn_dim: int
    heads: int
    seq_len: int
    mbs: int
    precision: str = "fp32"
    adapters: bool = False

    def config(self, layers: int = 1, plan: Plan | None = None) -> RunConfig:
        """A run of that model; half as many key/value heads as heads."""
        model = LlamaConfig(
            vocab_size=VOCABULARY, dim=self.dim, n_layers=layers, n_heads=self.heads,
            n_kv_heads=max(1, self.heads // 2), ffn_dim=self.ffn_dim,
        )  # fmt: skip
        return RunConfig(
            workload="llama31_8b",
            preset="mini",
            round="",
            model=model,
            data=Data("", seq_len=self.seq_len),
            optim=Optim(),
            evaluation=Evaluation("", 0.0, 1, 1),
            plan=plan or Plan(mbs=self.mbs, gbs=self.mbs, precision=self.precision),
            lora=Lora(targets=("wqkv", "wo")) if self.adapters else None,
        )


@dataclass
class Samples:
    """Seconds of single kernels."""

    matmul: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    """m, n, k -> seconds."""
    attention: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    """batch, heads, kv_heads, tokens, kv_tokens, head_dim, causal, backward -> seconds."""
    elementwise: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """operator -> bytes read and written -> seconds."""

    def add(self, op: Op, trace: LayerTrace, seconds: float) -> None:
        """Take in one kernel's (median) time."""
        if op.kind == "matmul":
            batch, m, n, k = op.shape
            self.matmul.setdefault((m, n, k), []).append(seconds / batch)
        elif op.kind == "attention":
            key = (*op.shape, int(op.role.endswith("causal")), int(op.role.startswith("backward")))
            self.attention.setdefault(key, []).append(seconds)
        elif op.kind == "elementwise":
            moved = sum(trace.tensor_bytes.get(i, 0) for i in (*op.reads, *op.writes))
            self.elementwise.setdefault(op.name, {}).setdefault(max(1, moved), []).append(seconds)

    def totals(self) -> dict[str, float]:
        """Seconds by kind."""
        return {
            "matmul": sum(map(sum, self.matmul.values())),
            "attention": sum(map(sum, self.attention.values())),
            "elementwise": sum(sum(map(sum, sizes.values())) for sizes in self.elementwise.values()),
        }


def time_layers(
    size: Size,
    repeats: int,
    into: Samples,
    clock: Clock = time.thread_time,
    traces: Traces | None = None,
    depth: int = DEPTH,
) -> None:
    """The median time of each kernel of a model of `depth` blocks, forward and backward, after one round to warm up.

    `traces` of the size are made where they are not given; that cannot be done within a process group.
    """
    config = size.config(depth)
    traces = traces or trace_layers(config, "cpu")
    order = list(_in_order(traces, depth))
    run = _model_run(config)
    rounds = []
    for _ in range(repeats + 1):
        with _Timed(clock) as timed:
            run()
        rounds.append(_matched([op for _, op in order], timed.calls))
    for at, (trace, op) in enumerate(order):
        into.add(op, trace, statistics.median(times[at] for times in rounds[1:]))


def _in_order(traces: Traces, depth: int) -> Iterator[tuple[LayerTrace, Op]]:
    """The operators of a whole model, as they are called."""
    layers = ["embed", *["block"] * depth, "head"]
    for kind in layers:
        yield from ((traces[kind], op) for op in traces[kind].only("forward"))
    for kind in reversed(layers):
        yield from ((traces[kind], op) for op in traces[kind].only("recompute", "backward"))


def _model_run(config: RunConfig) -> Callable[[], None]:
    """What runs the model of `config` forward and backward on one micro batch of random tokens."""
    model = empty_model(config)
    parallelize.choose(model, config.plan, "cpu")
    fill(model, InitialValues(config, None), "cpu")
    model.train()
    # a frozen embedding's output needs no gradient, but the input of a block in the middle does
    model.get_submodule("embed").register_forward_hook(lambda module, given, made: made.requires_grad_())
    generator = torch.Generator().manual_seed(0)
    shape = (config.plan.mbs, config.data.seq_len)
    tokens, labels = (torch.randint(0, config.model.vocab_size, shape, generator=generator) for _ in range(2))

    def run() -> None:
        torch.autograd.backward(model_loss_sum(model, tokens, labels))
        for parameter in model.parameters():
            parameter.grad = None

    return run


class _Timed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seconds of each call below autograd, in order."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self.calls: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = self.clock()
        out = func(*args, **(kwargs or {}))
        self.calls.append((func._opname, self.clock() - begin))
        return out


def _matched(ops: list[Op], calls: list[tuple[str, float]]) -> list[float]:
    """The time of each operator; calls between them are views and allocations, which traces leave out."""
    rest, found = iter(calls), []
    for op in ops:
        for name, seconds in rest:
            if _title(name) == op.name:
                found.append(seconds)
                break
        else:
            raise RuntimeError(f"the run has no {op.name} in {op.module or 'the layer'} where its trace has one")
    return found


def _title(name: str) -> str:
    """An operator's name as traces have it."""
    if name in ATTENTION:
        return ATTENTION[name][0]
    return name.rstrip("_") if name in MATMUL else name.lstrip("_")


# ---- single kernels ------------------------------------------------------------------------------


def time_products(shapes: list[tuple[int, int, int]], repeats: int, into: Samples, clock: Clock) -> None:
    """Products (m, k) x (k, n) of float32 on their own, of operands that have left the caches since they were used."""
    for m, n, k in shapes:
        sets = max(1, min(MOST_SETS, CACHE_BYTES // (4 * (m * k + k * n + m * n))))
        operands = [(torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)) for _ in range(sets)]
        turn = itertools.cycle(operands)

        def product(turn: Iterator[tuple[Tensor, Tensor, Tensor]] = turn) -> None:
            a, b, out = next(turn)
            torch.mm(a, b, out=out)

        into.matmul.setdefault((m, n, k), []).append(_median(product, repeats, clock))


def time_attention(
    sizes: list[tuple[int, int, int, int]], repeats: int, block: Samples, ring: Samples, clock: Clock
) -> None:
    """(batch, heads, tokens, head_dim): block attention into `block`, the flash operator that rings use into `ring`."""
    from timetrial.parallel.attention import causal_attention, causal_attention_backward
    from timetrial.parallel.context import KERNELS

    kernel = KERNELS["cpu"]
    for batch, heads, tokens, head_dim in sizes:
        kv = max(1, heads // 2)
        q, grad = (torch.randn(batch, tokens, heads, head_dim) for _ in range(2))
        k, v = (torch.randn(batch, tokens, kv, head_dim) for _ in range(2))
        shape = (batch, heads, kv, tokens, tokens, head_dim)
        out, kept = causal_attention(q, k, v)
        forward = _median(partial(causal_attention, q, k, v), repeats, clock)
        both = (grad, q, k, v, out, kept)
        backward = _median(partial(causal_attention_backward, *both), repeats, clock)
        block.attention.setdefault((*shape, 1, 0), []).append(forward)
        block.attention.setdefault((*shape, 1, 1), []).append(backward)
        q, k, v, grad = (torch.randn(batch, heads, tokens, head_dim) for _ in range(4))
        for causal in (True, False):
            out, lse = kernel.forward(q, k, v, causal)
            forward = _median(partial(kernel.forward, q, k, v, causal), repeats, clock)
            every = (grad, q, k, v, out, lse, causal)
            backward = _median(partial(kernel.backward, *every), repeats, clock)
            key = (batch, heads, heads, tokens, tokens, head_dim, int(causal))
            ring.attention.setdefault((*key, 0), []).append(forward)
            ring.attention.setdefault((*key, 1), []).append(backward)


def time_memory(sizes: list[int], repeats: int, clock: Clock) -> list[tuple[int, float]]:
    """(bytes read and written, seconds) of additions of float32 tensors of `sizes` bytes."""
    found = []
    for size in sizes:
        a, b, out = (torch.ones(max(1, size // 4)) for _ in range(3))
        found.append((3 * a.nbytes, _median(partial(torch.add, a, b, out=out), repeats, clock)))
    return found


def time_optimizer(counts: list[int], repeats: int, clock: Clock) -> list[tuple[int, float]]:
    """(elements, seconds) of clipping gradients and one step of AdamW, as a run does them."""
    from timetrial.optim import adamw
    from timetrial.parallel.engine import OneRank

    found = []
    for count in counts:
        rows = max(1, math.isqrt(count // 32))
        model = nn.ParameterList(torch.randn(rows, rows) for _ in range(32))
        engine = OneRank(model, torch.device("cpu"))
        optimizer = adamw.build(engine.parameters_named(), Optim(), fused=True)
        for parameter in model:
            parameter.grad = torch.randn_like(parameter)

        def step(engine: OneRank = engine, optimizer: torch.optim.Optimizer = optimizer) -> None:
            engine.clip_grad_norm(1.0)
            optimizer.step()

        found.append((32 * rows * rows, _median(step, repeats, clock)))
    return found


def _median(run: Callable[[], object], repeats: int, clock: Clock) -> float:
    run()
    times = []
    for _ in range(max(1, repeats)):
        begin = clock()
        run()
        times.append(clock() - begin)
    return statistics.median(times)
