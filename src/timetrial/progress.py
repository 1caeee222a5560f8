"""One line on a terminal that tells how far a long piece of work is, how fast it goes and how long it will take."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

EVERY_S = 0.5
"""Between two paintings, s: also where nothing is reported, so that one sees that it lives."""


class Watch:
    """A context within which the line stands; called with (done, total, what) by who does the work.

    Nothing is written where `stream` is no terminal, nor after the end: the line is wiped. Thread-safe.
    """

    def __init__(self, stream: TextIO, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._painter: threading.Thread | None = None
        self._start = clock()
        self._phase = (self._start, 0, 0, what)
        """(when it began, done, total, what)."""

    def __call__(self, done: int, total: int, what: str) -> None:
        """`done` of `total` of `what` are done; another `what` is another phase, whose rate is its own."""
        with self._lock:
            began, _, _, before = self._phase
            self._phase = (began if what == before else self.clock(), done, total, what)

    def line(self) -> str:
        """What the line says now."""
        with self._lock:
            began, done, total, what = self._phase
        now = self.clock()
        if total == 0:
            return f"{what}: {now - began:.0f} s"
        took = now - began
        text = f"{what}: {done:,} of {total:,}, {took:.0f} s"
        if done and took > 0:
            text += f", {done / took:.3g}/s, about {took * (total - done) / done:.0f} s left"
        return text

    def __enter__(self) -> Watch:
        if self.stream.isatty():
            self._paint()
            self._painter = threading.Thread(target=self._repaint, daemon=True)
            self._painter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._painter is not None:
            self._over.set()
            self._painter.join()
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _repaint(self) -> None:
        while not self._over.wait(EVERY_S):
            self._paint()

    def _paint(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        self.stream.write(f"\r{self.line()[:width]}\x1b[K")
        self.stream.flush()
