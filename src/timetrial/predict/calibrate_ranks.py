"""What a calibration measures on several ranks: collectives, kernels while others compute, tiny steps over each axis.

    python -m timetrial.predict.calibrate_ranks JOB.json RANK | memory PATTERN

Rank 0 writes what it found beside the job. All ranks do the same at the same time, as those of a run do.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from timetrial.config import Plan, RunConfig, replace
from timetrial.optim import adamw
from timetrial.parallel import parallelize
from timetrial.parallel.engine import Batch
from timetrial.predict.calibrate_layers import CACHE_BYTES, MOST_SETS, Clock, Samples, Size, Traces, time_layers
from timetrial.predict.trace import trace_layers
from timetrial.train.build import InitialValues, empty_model
from timetrial.train.clock import StepClock
from timetrial.train.process import keep_freed_memory
from timetrial.train.step import Step

TIMEOUT_S = 120.0
SERIES = 3
"""Loops with and without calls of one size."""
LEAST_US = 1.0
"""Of a call, where loops differ by less than they scatter."""
WARM = 3
"""Steps before the first that is timed."""
TINY = Size(dim=64, ffn_dim=128, heads=4, seq_len=64, mbs=2)
"""Where kernels take little and the host much."""
MIDDLE = Size(dim=256, ffn_dim=896, heads=4, seq_len=256, mbs=4)
"""Where activations are most of the memory."""
SMALL_RUN = Size(dim=128, ffn_dim=448, heads=4, seq_len=64, mbs=2)
"""Of a run whose memory is mostly not its model's, but more than its first products leave (`local.MEASURED`)."""
SMALL_LAYERS = 2
RUN_STEPS = 4
LAYERS = (2, 6)
"""Two depths: their difference is the blocks', the rest the step's."""
PLANS = {
    "zero1": Plan(dp=2, mbs=2, gbs=4, zero=1, precision="fp32"),
    "zero3": Plan(dp=2, mbs=2, gbs=4, zero=3, precision="fp32"),
    "tp": Plan(tp=2, mbs=2, gbs=2, precision="fp32"),
    "cp": Plan(cp=2, mbs=2, gbs=2, precision="fp32"),
    "pp": Plan(pp=2, mbs=2, gbs=8, precision="fp32"),
}
"""Layout (of `systems/eager.py`) -> plan over two ranks."""


@dataclass(frozen=True)
class Job:
    """What the ranks are to do."""

    ranks: int
    sizes: tuple[Size, ...]
    """Whose layers are timed alone and together."""
    repeats: int
    steps: int
    """Timed tiny steps."""
    bytes: tuple[int, ...]
    """Sizes of whole tensors of collectives."""
    layouts: bool = True
    """Whether tiny steps are made."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self) | {"sizes": [vars(size) for size in self.sizes]}), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        values = json.loads(path.read_text(encoding="utf-8"))
        sizes = tuple(Size(**size) for size in values["sizes"])
        return cls(**(values | {"sizes": sizes, "bytes": tuple(values["bytes"])}))


ALONE = ("one", "selective", "full", "lanes")
"""Layouts of one rank; the last one takes two cores."""


def tiny(layout: str, layers: int) -> RunConfig:
    """The configuration of a tiny step: of PLANS or ALONE."""
    samples = 4 if layout == "lanes" else 2
    recompute = layout if layout in ("selective", "full") else "none"
    alone = Plan(mbs=samples, gbs=samples, precision="fp32", recompute=recompute)
    config = TINY.config(layers, PLANS.get(layout, alone))
    return replace(config, lanes=2, threads=2) if layout == "lanes" else config


def step_s(config: RunConfig, steps: int, clock: Clock = time.thread_time) -> float:
    """Seconds of one optimizer step of `config` on random tokens, of the rank that needs most. Collective.

    By `time.thread_time` they are those of computing, without waiting for messages.
    """
    engine = parallelize.build(config, empty_model(config), InitialValues(config, None))
    step = Step(engine, adamw.build(engine.parameters_named(), config.optim, fused=True), config.optim.clip_norm)
    batches, timer, times = batches_of(config), StepClock(), []
    for i in range(WARM + steps):
        wait_for_all()
        begin = clock()
        step(batches, 1e-3, timer)
        if i >= WARM:
            times.append(clock() - begin)
    seconds = statistics.median(times) if clock is time.thread_time else undisturbed(times)
    most = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def undisturbed(times: list[float]) -> float:
    """The fastest tenth of times by the wall: on a busy machine what waits for another thread or rank is slowed down in
    more than half of all cases. On a quiet machine it lies a few percent below the median."""
    return sorted(times)[len(times) // 10]


def batches_of(config: RunConfig) -> list[Batch]:
    """The micro batches of one data-parallel rank: random tokens, all of which count."""
    plan, generator = config.plan, torch.Generator().manual_seed(0)
    shape = (plan.mbs, config.data.seq_len + 1)
    drawn = [
        torch.randint(0, config.model.vocab_size, shape, generator=generator)
        for _ in range(plan.grad_accumulation_steps)
    ]
    return [{"tokens": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous()} for x in drawn]


def wait_for_all() -> None:
    """Return when all ranks have come here."""
    if dist.is_initialized():
        dist.barrier()


def measure(job: Job, rank: int, traces: list[Traces]) -> dict[str, Any]:
    """Everything; the same work on every rank. `traces` are those of the job's sizes."""
    found: dict[str, Any] = {"memory_marks": memory_marks("several") if job.layouts else []}
    found["beside"] = _beside(job, rank, traces)
    found["collectives"] = _collectives(job, rank)
    if job.layouts and job.ranks == 2:
        found["steps"] = {layout: [step_s(tiny(layout, n), job.steps) for n in LAYERS] for layout in PLANS}
    return found


def memory_marks(pattern: str) -> list[int]:
    """The most bytes that this process had after tiny steps and after those of MIDDLE by `pattern`. Collective.

    With what a run has beside its model: its modules, its tokens, what its first products load.
    """
    from timetrial.data.source import open_source
    from timetrial.train.peak import matmul_flops_per_s
    from timetrial.workloads.workload import resolve

    source = open_source(resolve("llama31_8b", "mini").data)
    importlib.import_module("timetrial.train.run")
    matmul_flops_per_s("cpu", torch.float32, 1)
    give_back_freed_memory()  # where tiny steps would lie unseen
    marks = []
    for config in memory_configs(pattern):
        step_s(config, 3)
        most = torch.tensor(resident_bytes())
        if dist.is_initialized():
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        marks.append(int(most))
    del source
    return marks


def memory_configs(pattern: str) -> tuple[RunConfig, RunConfig]:
    """What `memory_marks` runs: a way of `systems/eager.py` PATTERNS, "several" with parameters sharded over two."""
    ranks = 2 if pattern == "several" else 1
    often = 3 if pattern == "accumulating" else 1
    plan = Plan(
        dp=ranks,
        mbs=MIDDLE.mbs,
        gbs=MIDDLE.mbs * ranks * often,
        precision="fp32",
        recompute=pattern if pattern in ("selective", "full") else "none",
    )
    tiny_plan = Plan(dp=ranks, mbs=TINY.mbs, gbs=TINY.mbs * ranks, precision="fp32")
    return TINY.config(2, tiny_plan), MIDDLE.config(4, plan)


def give_back_freed_memory() -> None:
    """Have glibc return what lies free. Without effect on other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes(pid: int | None = None) -> int:
    """Most memory that process `pid`, by default this one, has had, bytes."""
    for line in Path(f"/proc/{pid or 'self'}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _beside(job: Job, rank: int, traces: list[Traces]) -> dict[str, float]:
    """Kind of kernel -> its time with all ranks at work, as a multiple of that of one at work."""
    alone, together = Samples(), Samples()
    for size, known in zip(job.sizes, traces, strict=True):
        for samples, joins in ((alone, rank == 0), (together, True)):
            wait_for_all()
            if joins:
                time_layers(size, job.repeats, samples, traces=known)
            wait_for_all()
    if rank != 0:
        return {}
    one, all_ = alone.totals(), together.totals()
    return {kind: max(1.0, all_[kind] / one[kind]) for kind in one}


def _collectives(job: Job, rank: int) -> dict[str, list[list[float]]]:
    """Kind -> rows of bytes of the whole tensor and microseconds: what a call adds between products.

    As training issues them: ranks come from computing, each at its own time, with caches full of something else, and
    compute again at once. So a call is what a loop of product and call takes beyond a loop of products on all ranks.
    """
    n, rows, product = job.ranks, dict[str, list[list[float]]](), _products()
    for kind, call in CALLS.items():
        rows[kind] = []
        for size in job.bytes:
            elements = max(1, size // 4 // n) * n
            sets = max(1, min(MOST_SETS, CACHE_BYTES // (8 * elements)))
            turn = itertools.cycle([(torch.ones(elements), torch.ones(elements // n)) for _ in range(sets)])

            def both(turn: Iterator[tuple[Tensor, Tensor]] = turn, call: Callable[..., object] = call) -> None:
                product()
                whole, part = next(turn)
                call(whole, part, rank, n)

            repeats = job.repeats * (10 if size < 1 << 21 else 4 if size < 1 << 24 else 1)
            with_call, without = list[float](), list[float]()
            for _ in range(SERIES):  # in turns, so that what others do on the machine meets both alike
                with_call += _loop(both, repeats)
                without += _loop(product, repeats)
            added = undisturbed(with_call) - undisturbed(without)
            rows[kind].append([4.0 * elements, max(LEAST_US, added * 1e6)])
        rows[kind] = never_falling(rows[kind])
    return rows


def never_falling(rows: list[list[float]]) -> list[list[float]]:
    """Rows of (bytes, time), where none takes longer than a larger one: what others do on the machine only adds."""
    least = itertools.accumulate((us for _, us in reversed(rows)), min)
    return [[size, us] for (size, _), us in zip(rows, reversed(list(least)), strict=True)]


def _products() -> Callable[[], object]:
    """A product of about a millisecond, of operands that have left the nearest caches."""
    turn = itertools.cycle([(torch.randn(256, 256), torch.randn(256, 512), torch.empty(256, 512)) for _ in range(8)])

    def product() -> None:
        a, b, out = next(turn)
        torch.mm(a, b, out=out)

    return product


def _loop(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each round of a loop that all ranks begin together."""
    run()
    wait_for_all()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times


def _exchange(whole: Tensor, part: Tensor, rank: int, n: int) -> None:
    received = torch.empty_like(whole)
    send = dist.P2POp(dist.isend, whole, (rank + 1) % n)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _send(whole: Tensor, part: Tensor, rank: int, n: int) -> None:
    """Rank 0 to rank 1; timed on rank 0 until a word comes back."""
    if rank == 0:
        dist.send(whole, 1)
        dist.recv(part[:1], 1)
    elif rank == 1:
        dist.recv(whole, 0)
        dist.send(part[:1], 0)


CALLS: dict[str, Callable[[Tensor, Tensor, int, int], object]] = {
    "all_gather": lambda whole, part, rank, n: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda whole, part, rank, n: dist.reduce_scatter_tensor(part, whole),
    "all_reduce": lambda whole, part, rank, n: dist.all_reduce(whole),
    "all_to_all": lambda whole, part, rank, n: dist.all_to_all_single(torch.empty_like(whole), whole),
    "exchange": _exchange,
    "send": _send,
}
"""Kind -> what does one over all ranks: (whole tensor, one rank's part, rank, ranks)."""


def main() -> None:
    """One rank of a job; after the word "memory" the marks of a process on its own."""
    if sys.argv[1] == "memory":
        keep_freed_memory()
        torch.set_num_threads(1)
        print(json.dumps(memory_marks(sys.argv[2])))
        return
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = Job.read(path)
    keep_freed_memory()
    torch.set_num_threads(1)
    traces = [trace_layers(size.config(), "cpu") for size in job.sizes]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path.parent}/store",
        rank=rank,
        world_size=job.ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    found = measure(job, rank, traces)
    if rank == 0:
        path.with_name("found.json").write_text(json.dumps(found), encoding="utf-8")
    wait_for_all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
