"""What a rank can say of itself without being asked: its step, its last collective, what it waits for.

Read by a thread while the training runs or hangs, so nothing here takes a lock that the training holds.
Three sources:

- PyTorch's Flight Recorder, a ring buffer of the process's newest collectives. gloo's never leave the
  state "scheduled" there, but are marked retired when done. It does not see gloo's sends and receives.
- The main thread's Python stack: the innermost line of this package says where a rank hangs, and a line
  of torch.distributed or a `.wait(` that it is a message, or another rank's arrival, that it waits for.
- The main thread's CPU time: one that computes is not blocked, however long it takes.

Costs about a millisecond a reading; the recorder itself nothing that can be measured (docs/lab-log.md).
"""

from __future__ import annotations

import dataclasses
import json
import linecache
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

import timetrial

PACKAGE = str(Path(timetrial.__file__).parent) + os.sep
TORCH_DISTRIBUTED = str(Path(dist.__file__).parent) + os.sep
BACKGROUND = "checkpoint-"
"""Threads of this name talk to other ranks beside the training; their collectives hold nothing up by themselves."""
RECORDED = 64
"""Collectives that the recorder keeps."""
IDLE = 0.02
"""Share of the time that a thread which is blocked may compute: to look at its watch."""


def enable() -> None:
    """Have torch keep its newest collectives; before the first process group, and only where nobody chose a size."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))  # torch's own knob, read when a group is made


@dataclass(frozen=True)
class Collective:
    """One collective, as every rank of its group names it."""

    kind: str
    group: str
    """Name of the process group."""
    ranks: tuple[int, ...]
    """Global ranks of the group; empty when it is no more."""
    number: int
    """Counted in the group, from 1."""
    at: float = dataclasses.field(default=0.0, compare=False)
    """When this rank called it, seconds since 1970."""

    def __str__(self) -> str:
        return f"{self.kind} #{self.number} of {ranks_text(self.ranks) if self.ranks else self.group}"


@dataclass(frozen=True)
class Beat:
    """A sign of life."""

    count: int
    """Of beats; a rank whose count stands still is stopped or gone."""
    step: int | None = None
    """Optimizer step in work, from 1; None before the training."""
    last: Collective | None = None
    """The training's newest collective."""
    done: Collective | None = None
    """The newest one that is over: all ranks of its group have been in it."""
    waiting: Collective | None = None
    """The oldest one that others have not come to, or not yet answered."""
    blocked: bool = False
    """Whether the main thread stands still for a message or for other ranks, without a collective."""
    place: str = ""
    """The main thread's innermost line in this package."""
    state: str = "running"
    """running; lost: it lost the connection to another rank; failed: it says itself why it ends; ended."""

    @property
    def waits(self) -> bool:
        return self.waiting is not None or self.blocked

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Beat:
        values = json.loads(text)
        for name in ("last", "done", "waiting"):
            if values[name] is not None:
                values[name] = Collective(**{**values[name], "ranks": tuple(values[name]["ranks"])})
        return cls(**values)


def ranks_text(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> ranks 0-2, 5; [1] -> rank 1."""
    ranks = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


class Pulse:
    """Reads this process; `read` is for one thread that is not the main one."""

    def __init__(self) -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        self._main = ident
        clock_of = getattr(time, "pthread_getcpuclockid", None)  # macOS has none: there only collectives count
        self._clock: int | None = clock_of(ident) if clock_of is not None else None
        self._background: set[int] = set()
        self._groups: dict[str, tuple[int, ...]] = {}
        self._read_at, self._cpu_s = time.monotonic(), 0.0
        self._count = 0
        self.key: tuple[Any, ...] | None = None
        """Names what the main thread stands still at, the same while it does; None while it goes on."""

    def read(self, step: int | None, state: str = "running") -> Beat:
        """This rank now."""
        idle = self._idle()
        self._background |= {t.ident for t in threading.enumerate() if t.ident and t.name.startswith(BACKGROUND)}
        entries = pickle.loads(_dump_fr_trace(True, False, False)).get("entries", [])
        mine = [e for e in entries if int(e["thread_id"]) not in self._background]
        open_ = [e for e in mine if not e["retired"]]
        innermost = sys._current_frames().get(self._main)
        place = _place(innermost)
        if not open_ and idle and place.startswith("train/checkpoint.py"):  # waits for its own background thread
            open_ = [e for e in entries if not e["retired"]]
        waiting = self._collective(open_[0]) if open_ else None
        last = self._collective(mine[-1]) if mine else None
        over = next((e for e in reversed(mine) if e["retired"]), None)
        done = self._collective(over) if over else None
        if waiting is not None:
            self.key = (waiting.group, waiting.number)
        else:
            self.key = (place, mine[-1]["record_id"] if mine else None) if idle else None
        blocked = waiting is None and idle and _in_a_wait(innermost)
        self._count += 1
        return Beat(self._count, step, last, done, waiting, blocked, place, state)

    def _idle(self) -> bool:
        """Whether the main thread has hardly computed since the last reading."""
        if self._clock is None:
            return False
        now, cpu_s = time.monotonic(), time.clock_gettime(self._clock)
        passed, used = now - self._read_at, cpu_s - self._cpu_s
        self._read_at, self._cpu_s = now, cpu_s
        return used < IDLE * passed

    def _collective(self, entry: dict[str, Any]) -> Collective:
        name, description = entry["process_group"]
        number, at = entry["collective_seq_id"], entry["time_created_ns"] / 1e9
        if name not in self._groups:
            try:
                group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore
                self._groups[name] = tuple(dist.get_process_group_ranks(group))
            except (RuntimeError, ValueError, KeyError):  # the group is no more
                return Collective(_kind(entry), description or name, (), number, at)
        return Collective(_kind(entry), name, self._groups[name], number, at)


def _kind(entry: dict[str, Any]) -> str:
    """'gloo:all_reduce' -> all_reduce, 'nccl:_all_gather_base' -> all_gather."""
    name: str = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    return name.strip("_").removesuffix("_base")


def _place(frame: FrameType | None) -> str:
    """data/loader.py:88 (next): the innermost line of this package; empty when there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{Path(file[len(PACKAGE) :]).as_posix()}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def _in_a_wait(frame: FrameType | None) -> bool:
    """Whether the innermost line is one of torch.distributed or waits for a message."""
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return file.startswith(TORCH_DISTRIBUTED) or ".wait(" in linecache.getline(file, frame.f_lineno)
