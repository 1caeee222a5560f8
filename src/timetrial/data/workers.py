"""Runs the jobs of a data build, here or in worker processes that end with the build.

Plain processes and not a pool: workers of `concurrent.futures` wait for ever when their parent is
killed, and the next build would find them still at work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

from timetrial.data.job import Job, origin, size_of
from timetrial.data.tokenfile import PartWriter, write_json
from timetrial.data.tokenizer import Tokenizer
from timetrial.errors import UserError

Tell = Callable[[int, int, int], None]
"""Called with what is done so far: input bytes, documents, tokens."""


@dataclass(frozen=True)
class Task:
    """What every process of one build needs."""

    directory: Path
    tokenizer: Tokenizer
    jobs: list[Job]
    counts: Any
    """Shared int64 [4]: input bytes, documents and tokens done, and the next job to take."""
    lock: Any
    """Guards `counts`."""
    stop: Any
    """Shared event: finish no further part."""

    def take(self) -> Job | None:
        """The next job that nobody has taken, None when there is none or the build stops."""
        with self.lock:
            number = self.counts[3]
            self.counts[3] += 1
        return self.jobs[number] if number < len(self.jobs) and not self.stop.is_set() else None

    def make(self, job: Job, tell: Callable[[], None]) -> None:
        """Make one part, then its NAME.json."""
        folder = self.directory / job.split
        unreported = [sum(size_of(path) for path in job.inputs)]
        writer = PartWriter(folder, job.name, self.tokenizer.vocab_size, job.masked)

        def report(read: int, documents: int, tokens: int) -> None:
            if self.stop.is_set():
                raise _Stopped
            unreported[0] -= read
            self._add(read, documents, tokens)
            tell()

        try:
            job.write(writer, self.tokenizer, report)
            part = writer.finish(origin(job))
        except BaseException:
            writer.discard()
            raise
        write_json(folder / f"{job.name}.json", asdict(part))
        self._add(unreported[0], 0, 0)  # what the job did not need to read

    def _add(self, *done: int) -> None:
        with self.lock:
            for i, amount in enumerate(done):
                self.counts[i] += amount


class _Stopped(Exception):
    """Another process failed; its message is the one to show."""


def run_all(directory: Path, tokenizer: Tokenizer, jobs: list[Job], workers: int, tell: Tell) -> None:
    """Run every job, calling `tell` about once a second. Raises what the first failing job raised."""
    context = multiprocessing.get_context("spawn")  # fork and the tokenizer's threads do not mix
    counts = context.RawArray("q", 4)
    if workers == 1:
        task = Task(directory, tokenizer, jobs, counts, threading.Lock(), threading.Event())
        _run_here(task, tell)
    else:
        task = Task(directory, tokenizer, jobs, counts, context.Lock(), context.Event())
        _run_in_processes(task, workers, context, tell)
    tell(*task.counts[:3])


def _run_here(task: Task, tell: Tell) -> None:
    told = time.monotonic()

    def now_and_then() -> None:
        nonlocal told
        if time.monotonic() - told > 1:
            told = time.monotonic()
            tell(*task.counts[:3])

    while job := task.take():
        task.make(job, now_and_then)


def _run_in_processes(task: Task, workers: int, context: SpawnContext, tell: Tell) -> None:
    errors, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=_worker, args=(task, sender), daemon=True) for _ in range(workers)]
    try:
        for process in processes:
            process.start()
        running = processes
        while running:
            ready = wait([errors, *(p.sentinel for p in running)], timeout=1.0)
            if errors.poll():
                raise errors.recv()
            for process in (p for p in running if p.sentinel in ready):
                process.join()  # its pipe closes a little before it is gone
                if process.exitcode:
                    advice = "give fewer --workers and run the same command again; finished parts are kept"
                    raise UserError(f"a build process was killed, perhaps for want of memory; {advice}")
            running = [p for p in running if p.exitcode is None]
            tell(*task.counts[:3])
        if errors.poll():  # sent by the last one just before it ended
            raise errors.recv()
    finally:
        task.stop.set()
        for process in processes:
            if process.pid:
                process.join()
        errors.close()
        sender.close()


def _worker(task: Task, errors: Connection) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us by the event
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's only way: one thread in each process
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        while job := task.take():
            task.make(job, lambda: None)
    except _Stopped:
        pass
    except UserError as error:
        errors.send(error)
    except Exception:
        errors.send(RuntimeError(f"in a build process:\n{traceback.format_exc()}"))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
