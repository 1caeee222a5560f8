"""The benchmark's end of a contestant: its processes, its turns and what it answered."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.shape import Shape, text

KEEP = 1 << 30
START_S = 600.0
"""How long building a model may take."""


@dataclass(frozen=True)
class Entry:
    """One line of the comparison."""

    name: str
    module: str
    compile: bool = False
    peer: bool = True
    """Whether it runs in the peers' environment and counts as one."""
    reference: bool = False
    """Shown to explain the others, never the fastest peer."""
    environment: dict[str, str] = field(default_factory=dict)


ENTRIES = (
    Entry("timetrial", "peers.timetrial_run", peer=False),
    Entry("timetrial+compile", "peers.timetrial_run", compile=True, peer=False),
    Entry("plain", "peers.plain"),
    Entry("plain+compile", "peers.plain", compile=True),
    Entry("hf", "peers.hf_trainer"),
    Entry("hf+compile", "peers.hf_trainer", compile=True),
    Entry("titan", "peers.titan"),
    Entry("titan+compile", "peers.titan", compile=True),
    Entry(
        "plain+malloc",
        "peers.plain",
        reference=True,
        environment={"MALLOC_MMAP_THRESHOLD_": str(KEEP), "MALLOC_TRIM_THRESHOLD_": str(KEEP)},
    ),
)


@dataclass
class Turn:
    """What one contestant did in one turn."""

    seconds: list[float]
    losses: list[float]
    cpu_s: float
    """Processor seconds of all its ranks."""
    idle_cpu_s: float
    """Processor seconds that it took while it waited for this turn."""
    peak_bytes: int
    """Largest resident memory so far, all ranks."""
    work_s: list[float] | None = None
    """Of each step, seconds in forward, backward and optimizer, where the contestant says."""


class Contestant:
    """The processes of an entry, one a rank. Raises RuntimeError, with the end of their output, when one ends."""

    def __init__(self, entry: Entry, shape: Shape, python: Path, ranks: int, threads: int, logs: Path) -> None:
        self.entry = entry
        self.about: dict[str, Any] = {}
        self.turns: list[Turn] = []
        self._logs = [logs / f"{entry.name}-{rank}.log" for rank in range(ranks)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files: list[Any] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            words = [str(python), "-m", entry.module, "--shape", text(shape), "--threads", str(threads)]
            words += ["--port", str(port), *(["--compile"] if entry.compile else [])]
            base = {**os.environ, **entry.environment, "PYTHONPATH": str(Path(__file__).parents[1])}
            base |= {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
            base |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            for rank, log in enumerate(self._logs):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as output:
                    self._processes.append(
                        subprocess.Popen(words, env={**base, **place}, cwd=logs, stdout=output, stderr=output)
                    )
            try:
                self._meet(server, ranks)
            except BaseException:
                self.close()
                raise

    def _meet(self, server: socket.socket, ranks: int) -> None:
        began = time.monotonic()
        while len(self._files) < ranks:
            self._check(began)
            if select.select([server], [], [], 0.2)[0]:
                self._files.append(server.accept()[0].makefile("rw"))
        heard = sorted(((self._heard(file), file) for file in self._files), key=lambda pair: pair[0]["rank"])
        self._files = [file for _, file in heard]
        self.about = heard[0][0]

    def _check(self, began: float) -> None:
        for process, log in zip(self._processes, self._logs, strict=True):
            if process.poll() is not None:
                raise RuntimeError(f"{self.entry.name} ended:\n{_tail(log)}")
        if time.monotonic() - began > START_S:
            raise RuntimeError(f"{self.entry.name} did not start within {START_S:.0f} s")

    def _heard(self, file: Any) -> dict[str, Any]:
        line = file.readline()
        if not line:
            time.sleep(1.0)  # the process may still be writing why
            raise RuntimeError(f"{self.entry.name} ended:\n" + "\n".join(_tail(log) for log in self._logs))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def go(self, steps: int) -> Turn:
        """Let it make `steps` steps; what it says of them. Rank 0 speaks for the times, all for the loss."""
        for file in self._files:
            file.write(json.dumps({"steps": steps}) + "\n")
            file.flush()
        answers = [self._heard(file) for file in self._files]
        losses = zip(*(answer["losses"] for answer in answers if answer["losses"][0] is not None), strict=True)
        return Turn(
            answers[0]["seconds"],
            [sum(step) / len(step) for step in losses],
            sum(answer["cpu_s"] for answer in answers),
            sum(answer["idle_cpu_s"] for answer in answers),
            sum(answer["peak_bytes"] for answer in answers),
            answers[0].get("work_s"),
        )

    def close(self) -> None:
        """End its processes."""
        for file in self._files:
            file.close()
        for process in self._processes:
            try:
                process.wait(10 if self._files else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def interpreter(entry: Entry, peers: Path) -> Path:
    """Timetrial runs under the interpreter of this process, a peer under its own."""
    return peers if entry.peer else Path(sys.executable)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])
