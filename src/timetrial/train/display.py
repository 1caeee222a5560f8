"""The live view of a run: a bar on a terminal, one line every few seconds elsewhere.

    llama31_8b mini · 41 % ━━━━━━╸━━━━━━━━ step 120/480 · loss 4.91 · 5,120 tok/s · MFU 31 % · 1:12 left
    evaluation at 2,048 samples: log perplexity 4.71 (target 4.20)

Time left is to the end of the schedule; a run that reaches its target ends before.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from timetrial.config import RunConfig

PLAIN_INTERVAL_S = 10.0
"""Seconds between two lines where there is no terminal."""
SMOOTHING = 0.1
"""Weight of the newest step in the shown rates."""


def clock(seconds: float) -> str:
    """75.2 -> 1:15, 4000 -> 1:06:40."""
    if not math.isfinite(seconds):
        return "-"
    whole = int(seconds + 0.5)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Display:
    """What one run shows while it trains. Rank 0 has one; other ranks have a silent one."""

    def __init__(self, config: RunConfig, total_steps: int, start_step: int = 0, silent: bool = False) -> None:
        self._config = config
        self._total = total_steps
        self._silent = silent
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._step_s: float | None = None
        self._mfu: float | None = None
        self._last_plain = 0.0
        self._progress: Progress | None = None
        if not silent and self._console.is_terminal:
            name = f"{config.workload} {config.preset}"
            self._progress = Progress(
                TextColumn("[bold]{task.fields[name]}"), BarColumn(bar_width=24), _Details(), console=self._console
            )
            self._bar = self._progress.add_task(name, total=total_steps, completed=start_step, name=name, details="")
            self._progress.start()

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._silent:
            (self._progress.console if self._progress else self._console).print(text, markup=False)

    def warn(self, text: str) -> None:
        """A line that stays and stands out."""
        if not self._silent:
            console = self._progress.console if self._progress else self._console
            console.print(f"warning: {text}", style="yellow", markup=False)

    def step(self, step: int, loss: float, step_s: float, tokens: int, mfu: float | None) -> None:
        """One optimizer step is done."""
        if self._silent:
            return
        keep = 1.0 - SMOOTHING
        self._step_s = step_s if self._step_s is None else keep * self._step_s + SMOOTHING * step_s
        self._mfu = mfu if self._mfu is None or mfu is None else keep * self._mfu + SMOOTHING * mfu
        left = (self._total - step) * self._step_s
        parts = [f"step {step:,}/{self._total:,}", f"loss {loss:.3f}", f"{tokens / self._step_s:,.0f} tok/s"]
        if self._mfu is not None:
            parts.append(f"MFU {self._mfu:.0%}")
        parts.append(f"{clock(left)} left")
        details = " · ".join(parts)
        if self._progress:
            self._progress.update(self._bar, completed=step, details=details)
        elif time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._last_plain = time.monotonic()
            self._console.print(details, markup=False)

    def evaluation(self, samples: int, value: float, reached: bool, seconds: float) -> None:
        """One evaluation is done."""
        evaluation = self._config.evaluation
        verdict = "target reached" if reached else f"target {evaluation.target:g}"
        self.say(f"evaluation at {samples:,} samples: {evaluation.metric} {value:.4f} ({verdict}), {seconds:.1f} s")

    def close(self) -> None:
        """Take the bar away."""
        if self._progress:
            self._progress.stop()
            self._progress = None


class _Details(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["details"]))


Say = Callable[[str], None]
