"""The `:::MLLOG` result log, written by the official mlperf-logging and off the hot path.

mlperf-logging takes 0.3 ms an event, most of it to read the caller's source file, always prints to
standard output and knows no ranks. So each event is stamped where it happens (time of the call, file
and line of the caller) and queued; a thread gives it to the official `MLLogger`, takes the line that
it makes and appends it to the file. No logger of the `logging` registry is touched, standard output
is the display's.

Order of the calls, one log a run, rank 0 alone:

    init_start, hyperparameters, init_stop, run_start,
    (block_start, block_stop, eval_start, eval_accuracy, eval_stop)*, run_stop

A resumed log is cut back to the offset its checkpoint recorded; the four calls of the start write
nothing then, since their events stand in the file already.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlperf_logging.mllog import constants as keys
from mlperf_logging.mllog.mllog import MLLogger

from timetrial.config import RunConfig
from timetrial.errors import RunFailed, UserError
from timetrial.results import official_data
from timetrial.results.compliance import deviations
from timetrial.results.hyperparameters import hyperparameters

MINI_NOTICE = "mini preset: not an MLPerf result"
MINI_SUFFIX = "_mini"
"""Makes the benchmark's name unknown to every checker."""


@dataclass(frozen=True)
class Event:
    """One event as it happened."""

    kind: str
    """point, start or end."""
    key: str
    value: Any
    metadata: dict[str, Any]
    time_ms: int


class ResultLog:
    """The result log of one run; does nothing at all where `enabled` is False.

    Raises UserError when the file cannot be opened or is shorter than `offset`. A write that fails
    later raises RunFailed in the next call, at the latest in `offset()` or `close()`; the file then
    ends at its last whole line.
    """

    def __init__(self, path: Path, enabled: bool = True, offset: int = 0) -> None:
        self.path = path
        self.enabled = enabled
        self.resumed = offset > 0
        """Whether the events of the start stand in the file already."""
        self._error: str | None = None
        self._closed = not enabled
        if not enabled:
            return
        self._file = _open(path, offset)
        self._length = offset
        self._lines = _Lines()
        logger = logging.Logger("timetrial.result_log", logging.INFO)  # not of the registry: no parent, no root
        logger.addHandler(self._lines)
        self._official = MLLogger(logger)
        self._queue: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="result log", daemon=True)
        self._thread.start()

    # ---- events ----------------------------------------------------------------------------------

    def init_start(self, config: RunConfig, cache_cleared: bool = False) -> None:
        """The run's identity, and the start of the initialisation clock (30 minutes in the closed division).

        `cache_cleared` says whether the file system's caches were dropped before this process started,
        which a submission needs and only the launching script can do.
        """
        if self.resumed:
            return
        mini = config.preset == "mini"
        self._point(keys.SUBMISSION_BENCHMARK, config.workload + (MINI_SUFFIX if mini else ""))
        self._point(keys.SUBMISSION_ORG, config.submission.org)
        self._point(keys.SUBMISSION_DIVISION, config.submission.division)
        self._point(keys.SUBMISSION_STATUS, keys.ONPREM)
        self._point(keys.SUBMISSION_PLATFORM, config.submission.platform)
        text = notice(config)
        if text:
            self._point("notice", text)
        self._point(keys.CACHE_CLEAR, cache_cleared)
        self._put("start", keys.INIT_START)

    def hyperparameters(self, config: RunConfig, train_samples: int, world_size: int = 1) -> None:
        """Every value that a ruleset asks for. `train_samples` is the size of the training set."""
        if self.resumed:
            return
        for key, value in hyperparameters(config, train_samples, world_size).items():
            self._point(key, value)

    def init_stop(self) -> None:
        if not self.resumed:
            self._put("end", keys.INIT_STOP)

    def run_start(self) -> None:
        """Starts the clock of the run; before any sample is read."""
        if not self.resumed:
            self._put("start", keys.RUN_START)

    def block_start(self, samples: int) -> None:
        """Training begins or goes on after `samples` training samples."""
        self._put("start", keys.BLOCK_START, metadata={keys.SAMPLES_COUNT: samples})

    def block_stop(self, samples: int) -> None:
        """Training pauses for an evaluation, or ends, after `samples` training samples."""
        self._put("end", keys.BLOCK_STOP, metadata={keys.SAMPLES_COUNT: samples})

    def eval_start(self, samples: int) -> None:
        self._put("start", keys.EVAL_START, metadata={keys.SAMPLES_COUNT: samples})

    def eval_stop(self, samples: int) -> None:
        self._put("end", keys.EVAL_STOP, metadata={keys.SAMPLES_COUNT: samples})

    def eval_accuracy(self, value: float, samples: int) -> None:
        """The quality after `samples` training samples; reference convergence is read off this."""
        self._point(keys.EVAL_ACCURACY, value, {keys.SAMPLES_COUNT: samples})

    def tracked_stats(self, samples: int, **values: float) -> None:
        """Figures for readers (loss, tokens per second ...); no rule reads them. Once a block, not a step."""
        self._point("tracked_stats", values, {keys.SAMPLES_COUNT: samples})

    def run_stop(self, samples: int, status: str) -> None:
        """Stops the clock. `status` is success, aborted or stopped; a log knows only the first two."""
        known = keys.SUCCESS if status == "success" else keys.ABORTED
        self._put("end", keys.RUN_STOP, metadata={keys.SAMPLES_COUNT: samples, keys.STATUS: known})

    # ---- the file --------------------------------------------------------------------------------

    def offset(self) -> int:
        """Length of the file with all events so far in it, safely on disk; 0 where not enabled."""
        if not self.enabled:
            return 0
        if not self._closed:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait()
        self._check()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunFailed(f"cannot write the result log {self.path}: {error.strerror}") from None
        return self._length

    def close(self) -> None:
        """Write what is queued and end the thread. May be called twice; raises RunFailed if a write failed."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._file.close()
        self._check()

    def __enter__(self) -> ResultLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _point(self, key: str, value: Any, metadata: dict[str, Any] | None = None) -> None:
        self._put("point", key, value, metadata, depth=2)

    def _put(
        self, kind: str, key: str, value: Any = None, metadata: dict[str, Any] | None = None, depth: int = 1
    ) -> None:
        """Stamp and queue one event; `depth` is how many frames up the public method stands."""
        if not self.enabled:
            return
        self._check()
        if self._closed:
            raise RuntimeError(f"{key} after the result log was closed")
        caller = sys._getframe(depth + 1)  # of the public method
        place = {"file": _short(caller.f_code.co_filename), "lineno": caller.f_lineno}
        self._queue.put(Event(kind, key, value, {**place, **(metadata or {})}, int(time.time() * 1e3)))

    def _check(self) -> None:
        if self._error:
            raise RunFailed(self._error)

    def _work(self) -> None:
        """The thread: queue to file, in order. After a failed write it only answers barriers."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                if self._error is None:
                    self._write(item)
            else:
                item()

    def _write(self, event: Event) -> None:
        write = {"point": self._official.event, "start": self._official.start, "end": self._official.end}[event.kind]
        write(key=event.key, value=event.value, metadata=event.metadata, time_ms=event.time_ms)
        line, complaint = self._lines.take()
        if line is None:
            self._error = f"result log {self.path}: {complaint or 'no line for ' + event.key}"
            return
        data = line.encode() + b"\n"
        try:
            done = 0
            while done < len(data):  # a nearly full disk takes a part, then refuses
                done += self._file.write(data[done:]) or 0
            self._length += len(data)
        except OSError as error:
            self._error = f"cannot write the result log {self.path}: {error.strerror}; free space and --resume"
            with contextlib.suppress(OSError):  # the first error is told
                self._file.truncate(self._length)  # no half line


class _Lines(logging.Handler):
    """Holds what the official logger says about one event.

    Its WARNING that our `file` and `lineno` replace its own is expected; its ERROR is a value that JSON
    cannot hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self._line: str | None = None
        self._complaint: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._line = record.getMessage()
        elif record.levelno >= logging.ERROR:
            self._complaint = record.getMessage().strip()

    def take(self) -> tuple[str | None, str | None]:
        taken = self._line, self._complaint
        self._line = self._complaint = None
        return taken


def notice(config: RunConfig) -> str | None:
    """Why this run is no MLPerf result, or None where definition and data are the official ones as far as is known.

    A checker cannot see that a run with official hyperparameters trained a smaller model or on less data; this
    tells. Of pretrained weights nothing is known but that their names and shapes fit.
    """
    if config.preset == "mini":
        return MINI_NOTICE
    reasons = []
    if changed := deviations(config):
        more = f" and {len(changed) - 6} more" if len(changed) > 6 else ""
        reasons.append(f"changed {', '.join(changed[:6])}{more}")
    reasons += official_data.gaps(config)
    return f"{config.preset} preset with {', '.join(reasons)}: not an MLPerf result" if reasons else None


def _open(path: Path, offset: int) -> BinaryIO:
    """The file, unbuffered, cut to `offset` bytes and positioned there."""
    try:
        length = path.stat().st_size if path.exists() else 0
        if offset > length:
            raise UserError(
                f"the result log {path} has {length} bytes, its checkpoint recorded {offset}; "
                "put the file back or start a new run with another --out"
            )
        file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115 (ResultLog closes it)
        file.truncate(offset)
        file.seek(offset)
        return file
    except OSError as error:
        raise UserError(f"cannot write the result log {path}: {error.strerror}; choose another --out") from None


def _short(filename: str) -> str:
    """A source file from the package's name on, so that no log tells a machine's directories."""
    parts = Path(filename).parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index("timetrial") :]) if "timetrial" in parts else parts[-1]
