"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint", "other")


class StepClock:
    """Seconds of one step by phase. What no phase claims is `other`.

    These are times of the host: on a GPU, kernels run on after the call that started them has returned.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside to phase `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began

    def add(self, name: str, seconds: float) -> None:
        """Count seconds measured elsewhere."""
        self._seconds[name] += seconds

    def stop(self) -> tuple[float, dict[str, float]]:
        """End the step: (its length, the phases), seconds."""
        total = time.perf_counter() - self._began
        self._seconds["other"] = max(0.0, total - sum(self._seconds.values()))
        return total, dict(self._seconds)
