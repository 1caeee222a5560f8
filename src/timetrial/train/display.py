"""The live view of a run: one line at the foot of a terminal, a line every few seconds elsewhere.

    evaluation at 2,048 samples: log perplexity 4.7100 (target 4.2), 0.6 s
    llama31_8b mini ━━━━━━━━━──────────── step 120/480 · loss 4.910 · 5,120 tok/s · MFU 31% · evaluation in 0:12 · ≤ 1:12 left

The bar and the time left are to the end of the schedule, where that is less than a day off; a run that
reaches its target ends before. On a narrow terminal what matters less is left out: the line never wraps.
`close` takes the line away, what was said above it stays.

Why not rich's Progress: its columns have fixed widths, and it wraps or cuts off at the right what does not fit.
"""  # noqa: E501

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from timetrial.config import RunConfig

PLAIN_INTERVAL_S = 10.0
"""Seconds between two lines where there is no terminal."""
SMOOTHING = 0.1
"""Weight of the newest step in the shown rates."""
FAR_S = 86_400.0
"""An end of the schedule that is further off is not shown: nobody waits for it."""
ROOMY = 100
"""Columns from which words are not shortened."""
BAR = (8, 40)
"""Fewest and most columns of the bar."""
IMPORTANCE = ("step", "loss", "evaluation", "rate", "mfu", "left")
"""Parts of the line; the last ones go first where there is no room."""


def clock(seconds: float) -> str:
    """75.2 -> 1:15, 4000 -> 1:06:40."""
    if not math.isfinite(seconds):
        return "-"
    whole = int(seconds + 0.5)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def steps_to_evaluation(config: RunConfig, step: int) -> int:
    """Steps from `step` until one is followed by an evaluation; 0 when `step` itself is."""
    evaluation, gbs = config.evaluation, config.plan.gbs
    if step and evaluation.due((step - 1) * gbs, step * gbs):
        return 0
    point = max(step * gbs // evaluation.every_samples, evaluation.skip_first) + 1
    return -(-point * evaluation.every_samples // gbs) - step


class Display:
    """What one run shows while it trains. Rank 0 has one; other ranks have a silent one."""

    def __init__(self, config: RunConfig, total_steps: int, silent: bool = False) -> None:
        self._config = config
        self._total = total_steps
        self._silent = silent
        self._console = Console(file=sys.stderr, highlight=False)
        self._step_s: float | None = None
        self._mfu: float | None = None
        self._last_plain = 0.0
        self._line = Line(f"{config.workload} {config.preset}")
        self._live: Live | None = None
        if not silent and sys.stderr.isatty() and self._console.is_interactive:
            self._live = Live(self._line, console=self._console, transient=True, refresh_per_second=4)
            self._live.start()

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._silent:
            self._console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that stays and stands out."""
        if not self._silent:
            self._console.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    def step(self, step: int, loss: float, step_s: float, tokens: int, mfu: float | None) -> None:
        """One optimizer step is done: number `step` (1-based), of `tokens` tokens, in `step_s` seconds."""
        if self._silent:
            return
        keep = 1.0 - SMOOTHING
        self._step_s = step_s if self._step_s is None else keep * self._step_s + SMOOTHING * step_s
        self._mfu = mfu if self._mfu is None or mfu is None else keep * self._mfu + SMOOTHING * mfu
        parts = {
            "step": f"step {step:,}/{self._total:,}",
            "loss": f"loss {loss:.3f}",
            "rate": f"{tokens / self._step_s:,.0f} tok/s",
        }
        if self._mfu is not None:
            parts["mfu"] = f"MFU {self._mfu:.0%}"
        to_evaluation = steps_to_evaluation(self._config, step)
        if to_evaluation == 0:
            parts["evaluation"] = "evaluating"
        elif step + to_evaluation <= self._total:
            parts["evaluation"] = f"evaluation in {clock(to_evaluation * self._step_s)}"
        left_s = (self._total - step) * self._step_s
        near = left_s < FAR_S
        if near:
            parts["left"] = f"≤ {clock(left_s)} left"
        self._line.show(parts, step / self._total if near else None)
        if self._live is None and time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._last_plain = time.monotonic()
            self.say(self._line.plain())

    def evaluation(self, samples: int, value: float, reached: bool, seconds: float) -> None:
        """One evaluation is done."""
        evaluation = self._config.evaluation
        verdict = "target reached" if reached else f"target {evaluation.target:g}"
        self.say(f"evaluation at {samples:,} samples: {evaluation.metric} {value:.4f} ({verdict}), {seconds:.1f} s")

    def close(self) -> None:
        """Take the live line away; what was said stays."""
        if self._live:
            self._live.stop()
            self._live = None


@dataclass
class Line:
    """Name, bar and parts in one line that fits the console, whatever its width."""

    name: str
    parts: dict[str, str] | None = None
    done: float | None = None
    """Share of the schedule, 0 to 1; None for no bar."""
    _dropped: frozenset[str] = frozenset()
    _bar: int = BAR[1]
    _width: int = 0

    def show(self, parts: dict[str, str], done: float | None) -> None:
        """What to show from now on."""
        self.parts, self.done = parts, done

    def plain(self) -> str:
        """All parts, however long."""
        parts = self.parts or {}
        order = ("step", "loss", "rate", "mfu", "evaluation", "left")
        return " · ".join(parts[key] for key in order if key in parts)

    def fitted(self, width: int, ascii_only: bool = False) -> Text:
        """The line in at most `width` columns."""
        parts, done = self.parts or {"step": "starting"}, self.done
        if width < ROOMY and "evaluation" in parts:
            parts = {**parts, "evaluation": parts["evaluation"].replace("evaluation in", "eval in")}
        if width != self._width:
            self._width, self._dropped, self._bar = width, frozenset(), BAR[1]
        kept = [key for key in IMPORTANCE if key in parts and key not in self._dropped]
        while kept and self._length(parts, kept) > width:
            self._dropped |= {kept.pop()}  # until the width changes: what comes and goes would flicker
        order = [key for key in ("step", "loss", "rate", "mfu", "evaluation", "left") if key in kept]
        if done is not None:  # the bar stands in the place of the first separator's dot
            self._bar = min(self._bar, width - self._length(parts, kept) + 1)
        text = Text(self.name, style="bold", no_wrap=True, overflow="ellipsis", end="")
        if done is not None and self._bar >= BAR[0]:
            full = round(done * self._bar)
            text.append(" ").append("━" * full, "not bold green").append("─" * (self._bar - full), "not bold dim")
            text.append(" ")
        else:
            text.append(" · ", "not bold dim")
        for i, key in enumerate(order):
            text.append(" · " if i else "", "not bold dim").append(parts[key], "not bold")
        if ascii_only:
            text.plain = text.plain.translate({ord("·"): "|", ord("≤"): "<", ord("━"): "=", ord("─"): "-"})
        text.truncate(width, overflow="crop" if ascii_only else "ellipsis")
        return text

    def _length(self, parts: dict[str, str], kept: list[str]) -> int:
        return len(self.name) + sum(len(parts[key]) + 3 for key in kept)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        # one column stays free: some terminals wrap as soon as the last one is filled
        yield self.fitted(options.max_width - 1, options.ascii_only)
