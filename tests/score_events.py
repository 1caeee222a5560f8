"""Small logs for tests of what is read out of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timetrial.results.records import LogEvent, RunLog


def event(second: float, key: str, value: Any = None, **metadata: Any) -> LogEvent:
    kind = "start" if key.endswith("_start") else "end" if key.endswith("_stop") else "point"
    return LogEvent(round(second * 1000), kind, key, value, metadata, 1)  # type: ignore[arg-type]


def log(*events: LogEvent) -> RunLog:
    return RunLog(Path("result_0.txt"), tuple(events))
