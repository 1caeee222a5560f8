"""How a contestant's training loop waits for its turn and says how long its steps took.

Every rank of a contestant connects to the benchmark's port, says what it has built, and then trains only
while it is asked to: `{"steps": N}` lets N steps through, the answer holds their times. Between turns it
sits in a read from the socket, so it takes no processor time; that it took none is part of the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peers.shape import Shape, parse


@dataclass(frozen=True)
class Task:
    """What the benchmark told this process to be."""

    shape: Shape
    rank: int
    ranks: int
    threads: int
    compile: bool
    port: int


def task() -> Task:
    """From the command line, and from the launcher's RANK and WORLD_SIZE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", type=parse, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Task(options.shape, rank, ranks, options.threads, options.compile, options.port)


class Gate:
    """Call `ready` once before the first step and `step` after each; both return when training may go on.

    When the benchmark has had enough they raise SystemExit instead.
    """

    def __init__(self, task: Task, details: Callable[[int], dict[str, Any]] | None = None) -> None:
        """`details(n)`: more to say about the last n steps."""
        self._details = details
        self._rank = task.rank
        connection = socket.create_connection(("127.0.0.1", task.port))
        connection.settimeout(None)
        self._file = connection.makefile("rw")

    def ready(self, **about: Any) -> None:
        """The model is built: `about` says what it is."""
        self._say({"rank": self._rank, "pid": os.getpid(), **about})
        self._wait()

    def step(self, loss: float | None) -> None:
        """A step has ended; `loss`: of the global batch or this rank's samples, or None to leave it to rank 0."""
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._losses.append(loss)
        self._last = now
        if len(self._seconds) == self._asked:
            answer = {
                "seconds": self._seconds,
                "losses": self._losses,
                "cpu_s": time.process_time() - self._cpu_from,
                "idle_cpu_s": self._idle_cpu_s,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
            if self._details is not None:
                answer |= self._details(self._asked)
            self._say(answer)
            self._wait()

    def _wait(self) -> None:
        before = time.process_time()
        line = self._file.readline()
        if not line:
            raise SystemExit(0)
        self._asked = int(json.loads(line)["steps"])
        self._idle_cpu_s = time.process_time() - before
        self._seconds: list[float] = []
        self._losses: list[float | None] = []
        self._cpu_from = time.process_time()
        self._last = time.perf_counter()

    def _say(self, what: dict[str, Any]) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()
