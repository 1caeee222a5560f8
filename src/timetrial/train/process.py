"""What one process is within the run: its rank, its device, its threads, its process group.

`torchrun` tells each process its place through RANK, WORLD_SIZE and LOCAL_RANK; that contract of
PyTorch's launcher is the only environment this package reads.
"""

from __future__ import annotations

import ctypes
import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT_S = 600
"""How long a collective may wait for a missing rank before the job ends."""


@dataclass(frozen=True)
class Process:
    """One rank of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

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


def start() -> Process:
    """Join the process group (none for a single process) and choose the device."""
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    keep_freed_memory()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    return Process(rank, world, local, local_world, device)


def lost_peer(error: RuntimeError) -> bool:
    """Whether `error` is how gloo or NCCL says that another rank is gone."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in (*signs, "NCCL", "gloo"))


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
