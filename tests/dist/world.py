"""Run a function on several gloo ranks of this machine and get every rank's result.

Ranks are forked from a server process that has imported torch once, so a world costs a fraction of a
second instead of an import per rank.
"""

from __future__ import annotations

import datetime
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120
"""A rank that has not answered by then is ended, and the test fails."""

PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "timetrial.parallel.sharded", __name__]


def run_world(fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """`fn(*args)` on `nproc` ranks with a process group; the ranks' results in order.

    `fn` must be importable, its results picklable. Raises AssertionError with the first failed rank's
    traceback, or naming the ranks that hung.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        job = fn, args, timeout_s
        processes = [context.Process(target=_rank, args=(job, r, nproc, folder)) for r in range(nproc)]
        for process in processes:
            process.start()
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout_s)
        for process in processes:
            process.join(max(0.0, (deadline - datetime.datetime.now()).total_seconds()))
            if Path(folder, "failed").exists():
                break
        hung = [r for r, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        failed = Path(folder, "failed")
        assert not failed.exists(), failed.read_text()
        assert not hung, f"ranks {hung} of {nproc} gave no result within {timeout_s} s"
        return [torch.load(Path(folder, f"{r}.pt"), weights_only=False) for r in range(nproc)]


def _rank(job: tuple[Callable[..., Any], tuple[Any, ...], float], rank: int, nproc: int, folder: str) -> None:
    fn, args, timeout_s = job
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=nproc,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        torch.save(fn(*args), Path(folder, f"{rank}.pt"))
        dist.barrier()  # none leaves while another still talks to it
    except BaseException:
        # the first to fail tells; the others fail because it is gone
        try:
            with Path(folder, "failed").open("x") as file:
                file.write(f"rank {rank} of {nproc}:\n{traceback.format_exc()}")
        except FileExistsError:
            pass
        raise SystemExit(1) from None
