"""Score everything under some paths, with as many processes as asked, one result in memory at a time.

Workers are processes of their own that are fed over pipes (`worker.py`), not `multiprocessing`: that asks callers for
a guarded main module, and forks threads' locks. One that dies, for want of memory say, costs its entry and is
replaced.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from timetrial.errors import UserError
from timetrial.results.official import Official
from timetrial.results.records import Result
from timetrial.results.scored import failed, score_entry
from timetrial.results.tree import Entry, find

SMALL = 8 << 20
"""Bytes of logs that are read faster here than a process starts."""
AHEAD = 4
"""Entries given out ahead, for each worker."""

Progress = Callable[[int, int, Path], None]
"""Called with (logs read, logs in all, the entry just done)."""


def score_all(
    paths: Iterable[Path],
    workers: int = 2,
    progress: Progress | None = None,
    round_: str = "",
    official: bool = False,
) -> Iterator[Result]:
    """The results under `paths` in the order of `tree.find`, each as soon as it and those before it are done.

    `round_` (`v5.0`) overrides what the tree says; `official` asks the official checker about each log too, which
    takes several times as long. Raises UserError for a path that does not exist, an unknown round
    or no worker.
    """
    if workers < 1:
        raise UserError(f"{workers} workers: at least one is needed")
    return score_entries(find(paths, round_), workers, progress, official)


def score_entries(
    entries: Sequence[Entry], workers: int = 2, progress: Progress | None = None, official: bool = False
) -> Iterator[Result]:
    """The same for entries that were found already."""
    total = sum(len(entry.logs) for entry in entries)
    done = 0
    alone = workers == 1 or len(entries) == 1 or _bytes(entries, SMALL) < SMALL
    results = _alone(entries, official) if alone else _parallel(entries, min(workers, len(entries)), official)
    for entry, result in zip(entries, results, strict=True):
        done += len(entry.logs)
        if progress:
            progress(done, total, entry.path)
        yield result


def _alone(entries: Sequence[Entry], official: bool) -> Iterator[Result]:
    with Official() as checker:
        for entry in entries:
            yield score_entry(entry, official=checker if official else None)


def _bytes(entries: Sequence[Entry], enough: int) -> int:
    """Size of the logs, counted until it is `enough`."""
    size = 0
    for entry in entries:
        for log in entry.logs:
            with contextlib.suppress(OSError):
                size += log.stat().st_size
            if size >= enough:
                return size
    return size


def _parallel(entries: Sequence[Entry], workers: int, official: bool = False) -> Iterator[Result]:
    """Each entry by the next free worker; no more than a few ahead of the caller."""
    free: SimpleQueue[_Worker] = SimpleQueue()
    started = [_Worker() for _ in range(workers)]
    for worker in started:
        free.put(worker)

    def work(entry: Entry) -> Result:
        worker = free.get()
        try:
            return worker.score(entry, official)
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(workers)
    waiting: deque[Future[Result]] = deque()
    try:
        for entry in entries:
            waiting.append(pool.submit(work, entry))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # also where the caller stops listening
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.stop()
        pool.shutdown(wait=True)


class _Worker:
    """One process; started when first needed, and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def score(self, entry: Entry, official: bool = False) -> Result:
        """The entry's result; one that says so where the process died over it."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "timetrial.results.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((entry, official), process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            result = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._end(process)
            code = process.returncode
            found = f"the process that read it ended with {code}" + (" (killed: out of memory?)" if code == -9 else "")
            return failed(entry, "internal.died", found, "try it with one worker, or with more memory")
        assert isinstance(result, Result)
        return result

    def stop(self) -> None:
        if self._process is not None:
            self._end(self._process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
