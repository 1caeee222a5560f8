"""What a run of ours is worth as a submission: the official verdict, and where it leaves the official definition.

The official checker itself and what is wrong with it: `official.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from timetrial.config import RunConfig
from timetrial.errors import UserError
from timetrial.results import official
from timetrial.results.official import Verdict
from timetrial.workloads import workload as workloads

RULESETS = {"v5.0": "5.0.0", "v5.1": "5.1.0", "v6.0": "6.0.0", "v6.1": "6.1.0"}
"""Round -> ruleset, of the rounds that we have presets of."""
PLACES = ("data.path", "init.path", "init.base")
"""Keys that say where something lies on this machine, not what it is."""


def ruleset_of(round_: str) -> str:
    """The ruleset of a round. Raises UserError for a round without one."""
    if round_ not in RULESETS:
        raise UserError(f"round {round_} has no ruleset here; there are {', '.join(RULESETS)}")
    return RULESETS[round_]


def check(log: Path, ruleset: str) -> Verdict:
    """The official checker's verdict on the log of one run. Takes about a second.

    Raises UserError when the log cannot be read or the ruleset does not exist.
    """
    if ruleset not in RULESETS.values():
        raise UserError(f"unknown ruleset {ruleset!r}; there are {', '.join(RULESETS.values())}")
    return official.check(log, ruleset)


def deviations(config: RunConfig) -> list[str]:
    """Dotted keys in which `config` is not the closed-division definition of its round and batch size.

    Left out: what the rules leave free, which the workload's provenance says, and how the run is laid
    out. A log of a run with deviations may well pass `check`: no log tells the model's shape.
    """
    workload = workloads.find(config.workload)
    if config.preset != "official":
        return ["preset"]
    rules = workload.official(config.round, config.plan.gbs)
    found = []
    for group in ("model", "data", "optim", "evaluation", "init", "lora"):
        ours, theirs = (_flat(getattr(c, group), group) for c in (config, rules))
        for key in sorted(ours.keys() | theirs.keys()):
            free = "free in the rules" in workload.provenance.get(key, "")
            if not free and key not in PLACES and ours.get(key) != theirs.get(key):
                found.append(key)
    return found


def _flat(value: Any, name: str) -> dict[str, Any]:
    """Dotted key -> plain value of a dataclass, nested ones as a whole."""
    return {f"{name}.{key}": inner for key, inner in dataclasses.asdict(value).items()} if value else {name: None}
