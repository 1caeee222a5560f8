"""What a workload is, and how one is found by name.

A module in this package that defines `WORKLOAD` is a workload; nothing else registers it.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from timetrial.config import RunConfig
from timetrial.errors import UserError

PRESETS = ("mini", "official")


@dataclass(frozen=True)
class Workload:
    """One benchmark of the suite."""

    name: str
    title: str
    """What is trained on what, in a few words."""
    rounds: tuple[str, ...]
    """Rounds whose closed division has this benchmark, oldest first."""
    official: Callable[[str, int | None], RunConfig]
    """(round, global batch size or None for the reference's) -> the closed-division definition."""
    mini: Callable[[], RunConfig]
    """The same code on a small model and small real data."""
    provenance: Mapping[str, str]
    """Dotted configuration key -> where its official value comes from."""
    mini_note: str = ""
    """What the mini preset trains on, and where its target comes from."""
    mini_base: Callable[[], RunConfig] | None = None
    """The pretraining that the mini starts from, where the official one starts from a checkpoint."""


def names() -> list[str]:
    """All workloads, sorted."""
    import timetrial.workloads as package

    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if name != "workload" and not name.startswith("_"))


def find(name: str) -> Workload:
    """The workload called `name`. Raises UserError with the nearest names otherwise."""
    known = names()
    if name not in known:
        raise UserError(f"unknown workload {name!r}{suggest(name, known)}; `timetrial list` shows all")
    workload: Workload = importlib.import_module(f"timetrial.workloads.{name}").WORKLOAD
    return workload


def suggest(name: str, known: list[str]) -> str:
    """`, did you mean ...?` where something known is near, else an empty string."""
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    return f", did you mean {' or '.join(near)}?" if near else ""


def resolve(name: str, preset: str, round_: str | None = None, gbs: int | None = None) -> RunConfig:
    """The configuration of one preset, before plan and overrides are applied."""
    workload = find(name)
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}{suggest(preset, list(PRESETS))}; use mini or official")
    if round_ is not None and round_ not in workload.rounds:
        raise UserError(f"{name} is not in round {round_}; it is in {', '.join(workload.rounds)}")
    if preset == "mini":
        if round_ is not None:
            raise UserError(f"--round {round_}: the mini preset follows no round's values; leave it out")
        return workload.mini()
    return workload.official(round_ or workload.rounds[-1], gbs)
