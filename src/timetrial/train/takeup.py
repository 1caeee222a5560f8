"""Going on without being asked: a job that torchrun or Slurm starts again takes up the run in --out.

The command line is that of the first start, so it says the whole configuration again. What it says must
be what the run has, but for what a resumed run may change: the layout over the ranks, which may be fewer
now, and when to stop.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timetrial.config import RunConfig, dump, replace
from timetrial.errors import UserError
from timetrial.report.text import flatten
from timetrial.train.ranks import Ranks
from timetrial.train.rundir import RunDir, reopen

FREE = ("threads", "lanes", "max_steps")
"""What the new start may say otherwise."""
KEPT_PLAN = ("gbs", "precision")
"""What it may not change of the plan."""


@dataclass(frozen=True)
class Start:
    """How this start of the job begins."""

    config: RunConfig
    resume: bool
    result: dict[str, Any] | None = None
    """result.json of a run that is over: nothing is left to do."""


def look(config: RunConfig, out: Path) -> Start:
    """What to do about `out`, the same on every rank. Raises UserError when another run is there. Collective."""
    ranks = Ranks()
    try:
        return ranks.first(lambda: find(config, out))
    finally:
        ranks.close()


def find(config: RunConfig, out: Path) -> Start:
    """`look`, for one process."""
    run = RunDir(out)
    if not run.config.exists():
        return Start(config, resume=False)
    stored = reopen(out)[1]
    if difference := first_difference(config, stored):
        raise UserError(f"--out {out}: holds a run with {difference}; give another --out")
    if stored.plan.world_size == config.plan.world_size:
        config = replace(config, threads=stored.threads, lanes=stored.lanes)  # sums are split by them
    return Start(config, resume=True, result=finished(run, config))


def first_difference(config: RunConfig, stored: RunConfig) -> str | None:
    """'optim.base_lr=0.002, this command has 0.001', or None where the new start goes on with the same run."""
    ours, theirs = dict(flatten(dump(config))), dict(flatten(dump(stored)))
    for key in sorted(ours.keys() | theirs.keys()):
        group, _, name = key.partition(".")
        free = group in FREE or (group == "plan" and name not in KEPT_PLAN)
        if not free and ours.get(key) != theirs.get(key):
            return f"{key}={theirs.get(key)}, this command has {ours.get(key)}"
    return None


def finished(run: RunDir, config: RunConfig) -> dict[str, Any] | None:
    """The result of a run that has nothing left to do, else None."""
    if not run.result.exists():
        return None
    try:
        result: dict[str, Any] = json.loads(run.result.read_text())
        asked_to_stop = result["status"] == "stopped" and (
            config.max_steps is None or int(result["steps"]) < config.max_steps
        )
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        return None  # damaged; it is written anew at the end
    return None if asked_to_stop else result
