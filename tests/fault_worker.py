"""One rank of a job that goes wrong: `python fault_worker.py HOW [RANK]`; `tests/test_faults.py` starts it.

Writes `ready-RANK` into the working directory once it has been in three collectives.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from timetrial.train import process as processes
from timetrial.train.process import lost_peer
from timetrial.train.watchdog import Watchdog

TIMEOUT_S = 5.0


def train(how: str, culprit: int) -> None:
    """Steps of one all_reduce each until the fault."""
    process = processes.start()
    rank = process.rank
    assert process.watchdog is not None
    process.watchdog.stop()  # a busy machine may start one rank much later than another
    watchdog = Watchdog(rank, process.world_size, TIMEOUT_S, process.watchdog.name)
    pair = dist.new_group(list(range(process.world_size)))
    x = torch.ones(4)
    step, state = 0, "failed"
    watchdog.step = lambda: step
    try:
        if how == "background" and rank != culprit:  # as a checkpoint's thread, which waits for the others' ones
            threading.Thread(target=lambda: dist.barrier(pair), name="checkpoint-1", daemon=True).start()
        for step in range(1, 4 if how == "end" else 10_000):
            dist.all_reduce(x)
            if step == 3:
                Path(f"ready-{rank}").touch()
                fault(how, rank == culprit, culprit, pair, x)
            time.sleep(0.02)
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        state = "lost"
        raise processes.last_words(watchdog) from error
    finally:
        watchdog.stop(state)


def fault(how: str, here: bool, culprit: int, pair: dist.ProcessGroup, x: torch.Tensor) -> None:
    if how in ("sleep", "background") and here:
        time.sleep(3600)
    elif how == "message":  # gloo's messages are in no record
        if here:
            time.sleep(3600)
        dist.recv(x, src=culprit)
    elif how == "busy" and here:
        while True:
            x.mul_(1.0)
    elif how == "end" and here:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "order":
        dist.barrier(pair if here else None)
    elif how == "raise" and here:
        raise ValueError("a rank's own mistake")


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
