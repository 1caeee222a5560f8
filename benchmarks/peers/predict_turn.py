"""One turn of a predictor, in a process of its own: a question comes on standard input, its answer goes out.

Standard library alone: peers run this in their own environments. Imports, and reading the question, are not timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Answer = dict[str, Any]


def timed(price: Callable[[], Iterable[float | None]]) -> Answer:
    """Seconds that `price` takes; its answers are step times, None for a plan that it could not price."""
    wall, cpu = time.perf_counter(), time.process_time()
    steps = list(price())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    known = [step for step in steps if step is not None]
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "plans": len(known),
        "failed": len(steps) - len(known),
        "distinct": len({f"{step:.9g}" for step in known}),
    }


def tries(attempts: Mapping[str, Callable[[], Any]]) -> list[list[str]]:
    """What is asked -> what the predictor said: its error, or the value that it gave without one."""
    said = []
    for name, attempt in attempts.items():
        try:
            value = attempt()
            said.append([name, f"no error: {value}"])
        except (Exception, SystemExit) as error:
            words = " ".join(str(error).split())
            said.append([name, f"{type(error).__name__}: {words}"])
    return said


def run(tasks: Mapping[str, Callable[[Answer], Answer]]) -> None:
    """Answer the one question of standard input, its `task` one of `tasks`."""
    question = json.load(sys.stdin)
    print("\n" + json.dumps(tasks[question["task"]](question)))
