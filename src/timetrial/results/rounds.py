"""Which rounds there are, and which one a directory or a log belongs to.

A round is known, from v4.0 on, where the installed mlperf-logging has reference points for it
(rcp_checker/training_X.Y.0), or where it has rules here (rules/ROUND): a new round is a new release of that package or
a new directory of data. Benchmarks of a round: mlperf-logging 4.1.68 benchmark_meta.py.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import time
from pathlib import Path

from timetrial.errors import UserError
from timetrial.results import ruleset as rules

FIRST = (4, 0)
NAME = re.compile(r"(?:v?|.*(?:training|results|round)[_-]v?)(\d)\.(\d)(?:\.0)?", re.ASCII)
"""v5.0, 5.0, 5.0.0, training_results_v5.0, training_5.0.0 ..."""
ANY = re.compile(r"(?:v|.*(?:training|results|round)[_-]v?)(\d+)\.(\d+)(?:\.0)?", re.ASCII)
"""The same of any round, those that are not known here among them."""
ENDS = ((5, "v4.0", 2024), (11, "v4.1", 2024), (5, "v5.0", 2025), (11, "v5.1", 2025), (6, "v6.0", 2026))
"""(last month of logs, round, year): results came out in June 2024, November 2024, June 2025, November 2025 and June
2026 (mlcommons.org announcements); later logs are taken for the newest round."""


def ruleset(round_: str) -> str:
    """v5.0 -> 5.0.0."""
    return round_.removeprefix("v") + ".0"


@functools.cache
def package() -> Path:
    """Directory of the installed mlperf_logging. Raises UserError when there is none."""
    spec = importlib.util.find_spec("mlperf_logging")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("mlperf-logging is not installed; pip install mlperf-logging")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def rounds() -> tuple[str, ...]:
    """Every round that can be scored, oldest first."""
    found = {(int(name[1]), int(name[3:])) for name in rules.rounds() if re.fullmatch(r"v\d\.\d+", name)}
    for directory in (package() / "rcp_checker").glob("training_*"):
        match = re.fullmatch(r"training_(\d+)\.(\d+)\.0", directory.name)
        if match and (int(match[1]), int(match[2])) >= FIRST:
            found.add((int(match[1]), int(match[2])))
    return tuple(f"v{major}.{minor}" for major, minor in sorted(found))


@functools.cache
def benchmarks(round_: str) -> frozenset[str]:
    """Benchmarks that have rules in this round."""
    directory = package() / "compliance_checker" / f"training_{ruleset(round_)}"
    names = {path.stem.removeprefix("closed_") for path in directory.glob("closed_*.yaml")} - {"common"}
    return frozenset(names.union(rules.benchmarks(round_) if round_ in rules.rounds() else ()))


@functools.cache
def known_benchmarks() -> frozenset[str]:
    """Benchmarks of any round."""
    return frozenset().union(*(benchmarks(round_) for round_ in rounds()))


def named(text: str) -> str:
    """The round that a user names, `5.0`, `v5.0` or `5.0.0`. Raises UserError for an unknown one."""
    match = re.fullmatch(r"v?(\d+\.\d+)(?:\.0)?", text.strip())
    round_ = f"v{match[1]}" if match else ""
    if round_ not in rounds():
        raise UserError(f"unknown round {text!r}; there are {', '.join(rounds())}")
    return round_


def in_path(path: Path) -> str:
    """The round that a directory above (or the path itself) is named after; empty where none is."""
    for part in reversed(path.parts):
        match = NAME.fullmatch(part)
        if match and f"v{match[1]}.{match[2]}" in rounds():
            return f"v{match[1]}.{match[2]}"
    return ""


def unknown_in_path(path: Path) -> str:
    """The directory above (or the path itself) that is named after a round for which there are no rules: v7.0, v3.1.

    The nearest that has a round's name decides. A bare `1.2` is any version, and none.
    """
    for part in reversed(path.parts):
        match = ANY.fullmatch(part)
        if match:
            return "" if f"v{match[1]}.{match[2]}" in rounds() else part
    return ""


def guess(benchmark: str, time_ms: int | None) -> str:
    """The round that a log without one most likely belongs to; empty where the benchmark is of no round.

    By the date of the log among the rounds that have the benchmark.
    """
    having = [round_ for round_ in rounds() if benchmark in benchmarks(round_)]
    if not having:
        return ""
    if time_ms is not None:
        moment = time.gmtime(min(max(time_ms, 0), 4_102_444_800_000) / 1000)
        for month, round_, year in ENDS:
            if (moment.tm_year, moment.tm_mon) <= (year, month):
                later = [name for name in having if name >= round_]
                return later[0] if later else having[-1]
    return having[-1]
