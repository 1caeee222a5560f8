"""How far a long command is: one line on standard error, with rate and time left, where that is a terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from timetrial.report.text import NBSP, duration, significant

QUIET_S = 1.5
"""Commands that take less show nothing."""
EVERY_S = 0.1
"""Between two updates."""


class Progress:
    """Called with (done, of how many, what was just done); wipes its line at the end."""

    def __init__(self, unit: str = "logs", to: TextIO | None = None) -> None:
        self.unit = unit
        self.to = to or sys.stderr
        self.start = time.monotonic()
        self.last = 0.0
        """When it was last written; 0 where the line is empty."""

    def __call__(self, done: int, total: int, what: Path) -> None:
        now = time.monotonic()
        if not self.to.isatty() or now - self.start < QUIET_S or now - self.last < EVERY_S:
            return
        self.last = now
        rate = done / (now - self.start)
        left = f", {duration((total - done) / rate)} left" if rate and done < total else ""
        line = f"{done:,} of {total:,} {self.unit}, {significant(rate)} a second{left}".replace(NBSP, " ")
        self.to.write(f"\r{line}\x1b[K")
        self.to.flush()

    def close(self) -> None:
        if self.last:
            self.to.write("\r\x1b[K")
            self.to.flush()
            self.last = 0.0
