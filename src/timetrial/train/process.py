"""What one process is within the run: its rank, its device, its threads, its process group.

`torchrun` tells each process its place through RANK, WORLD_SIZE and LOCAL_RANK, and how often it has
started the job again through TORCHELASTIC_RESTART_COUNT; Slurm says the latter with SLURM_RESTART_COUNT.
These contracts of launchers are the only environment this package reads.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist

from timetrial.errors import RunFailed
from timetrial.parallel.cuda import group_arguments
from timetrial.train import pulse
from timetrial.train.launch import TIMEOUT_S
from timetrial.train.meeting import Meeting
from timetrial.train.watchdog import RESUME, Watchdog

MARGIN_S = 60.0
"""How much longer than our watchdog the backends wait, whose errors name nobody."""


@dataclass(frozen=True)
class Process:
    """One rank of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    watchdog: Watchdog | None = None
    """Ends the job when a rank hangs; None for a single process."""

    @property
    def main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEEP_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next step, up to a gigabyte a block.

    By default blocks above 32 MB go back to the kernel at each free, and the next step pays for them
    with tens of thousands of page faults. Without effect on other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)


def start(timeout_s: float = TIMEOUT_S) -> Process:
    """Join the process group (none for a single process) and choose the device.

    Ranks that do not come, or stop to answer later, end the job after `timeout_s` (`watchdog.py`).
    """
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    keep_freed_memory()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    watchdog = None
    if world > 1 and not dist.is_initialized():
        pulse.enable()
        watchdog = _join(rank, world, timeout_s, device)
    return Process(rank, world, local, local_world, device, watchdog)


def _join(rank: int, world: int, timeout_s: float, device: torch.device) -> Watchdog:
    """Make the process group."""
    arguments = group_arguments(device, datetime.timedelta(seconds=timeout_s + MARGIN_S))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # rank 0 hosts the store, anew at each start
        watchdog = Watchdog(rank, world, timeout_s, name="alone")
        dist.init_process_group(**arguments)
        return watchdog
    with Meeting(rank, world, timeout_s) as meeting:
        watchdog = Watchdog(rank, world, timeout_s, meeting.name)
        try:
            dist.init_process_group(**arguments, store=meeting.store, rank=rank, world_size=world)
        except RuntimeError as error:
            watchdog.stop("lost")
            reason = str(error).splitlines()[0]
            raise RunFailed(f"rank {rank}: could not meet the other ranks ({reason}); {RESUME}") from error
    return watchdog


def started_again(process: Process) -> bool:
    """Whether torchrun or Slurm has started this job before: after a failure, or on other nodes. Collective.

    Each of torchrun's agents counts the failures on its own node only.
    """
    again = any(int(os.environ.get(f"{name}_RESTART_COUNT") or 0) > 0 for name in ("TORCHELASTIC", "SLURM"))
    return on_any(process, again)


def on_any(process: Process, flag: bool) -> bool:
    """Whether `flag` is set on any rank; all wait for all. Collective."""
    if process.world_size == 1:
        return flag
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags)


def lost_peer(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is how gloo or NCCL says that another rank is gone."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")
    text = str(error)
    if isinstance(error, dist.DistError) or any(sign in text for sign in signs):
        return True
    if isinstance(error, RuntimeError) and any(sign in text for sign in ("Socket", "NCCL", "gloo")):
        return True
    return error.__cause__ is not None and lost_peer(error.__cause__)


def last_words(watchdog: Watchdog) -> BaseException:
    """How a rank ends that lost another: with what became of that one, or silently where others say it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which ends the survivors of a rank at once
    text = watchdog.lost()
    return SystemExit(1) if text is None else RunFailed(text)


def stop(process: Process, state: str = "ended") -> None:
    """Leave the process group; `state` is what others are told (`pulse.Beat`)."""
    if process.watchdog is not None:
        process.watchdog.stop(state)
    if dist.is_initialized():
        dist.destroy_process_group()
