"""Decisions that all ranks must share: rank 0 takes them, the others are told, errors included.

A group of its own, over gloo: its messages are Python objects in host memory, and a thread may use it
while the training uses others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from timetrial.errors import RunFailed, UserError
from timetrial.train.manifest import Damaged

T = TypeVar("T")


class Ranks:
    """All ranks of the run, or this process alone when torch.distributed is not in use."""

    def __init__(self) -> None:
        alone = not dist.is_available() or not dist.is_initialized()
        self.group = None if alone else dist.new_group(backend="gloo")
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()

    def gather(self, mine: T) -> list[T]:
        """What every rank gave, in rank order, on rank 0; nothing on the others."""
        if self.group is None:
            return [mine]
        out: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, out, dst=0, group=self.group)
        return out or []

    def first(self, work: Callable[[], T]) -> T:
        """Result of `work()` on rank 0, on every rank; what it raises is raised on every rank."""
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = work()
            except (UserError, RunFailed, Damaged) as error:
                box[1] = error
            except Exception as error:
                box[1] = RunFailed(one_line(error)).with_traceback(error.__traceback__)  # one that can be sent
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1] is not None:
            raise box[1]
        return cast(T, box[0])

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None


def one_line(error: BaseException) -> str:
    """What went wrong, without a traceback."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, UserError | RunFailed):
        return str(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
