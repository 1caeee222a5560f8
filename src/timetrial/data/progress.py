"""How far a data build is, with rate and time left."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """A moment of a build."""

    bytes_done: int
    """Input bytes, compressed as they are."""
    bytes_total: int
    documents: int
    tokens: int
    elapsed_s: float
    bytes_before: int = 0
    """Of `bytes_done`: what an earlier, interrupted build had done."""

    @property
    def bytes_per_s(self) -> float:
        return (self.bytes_done - self.bytes_before) / max(self.elapsed_s, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Seconds left at the rate so far; None before there is one."""
        rate = self.bytes_per_s
        return (self.bytes_total - self.bytes_done) / rate if rate > 0 else None

    @property
    def finished(self) -> bool:
        return self.bytes_done >= self.bytes_total

    def __str__(self) -> str:
        share = self.bytes_done / max(1, self.bytes_total)
        left = "" if self.left_s is None or self.finished else f", {_duration(self.left_s)} left"
        return (
            f"{share:4.0%}  {self.tokens:,} tokens of {self.documents:,} documents, "
            f"{self.bytes_per_s / 1e6:.2f} MB/s{left}"
        )


class Console:
    """Prints progress to standard error: in place on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._printed = -math.inf
        self._finished = False
        self._terminal = sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        if self._finished:
            return
        self._finished = progress.finished
        if self._terminal:
            print(f"\r\x1b[2K{progress}", end="\n" if progress.finished else "", file=sys.stderr, flush=True)
        elif progress.finished or time.monotonic() - self._printed >= 10:
            self._printed = time.monotonic()
            print(progress, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
