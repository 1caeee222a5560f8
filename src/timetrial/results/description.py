"""A system's description (systems/SYSTEM.json) against what the official checker and the tools behind it need.

Which fields and statuses: data of the round (`rules/ROUND/common.toml`), from system_desc_checker.py of
mlperf-logging. Its own verdict: `official.description`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timetrial.results.records import Finding
from timetrial.results.ruleset import DIVISIONS, Ruleset

JOINED = (
    *("submitter", "system_name", "host_processor_model_name", "host_processor_core_count"),
    *("accelerator_model_name", "accelerators_per_node", "framework"),
)
"""Fields that the official checker joins as text: it crashes where one is a number (system_desc_checker.py:87)."""
COUNTED = ("number_of_nodes", "accelerators_per_node")


def check_description(description: Mapping[str, Any], path: Path | None, rules: Ruleset) -> tuple[Finding, ...]:
    """What is amiss in a description, by the rules of a round. `path` is where it stands."""
    source = rules.description_source
    found = []
    for name in rules.fields:
        if name not in description:
            found.append(_finding("fail", name, f"no {name}", f"{name}", source, f"add {name}; it may be empty", path))
    for name in JOINED:
        value = description.get(name)
        if name in description and not isinstance(value, str):
            asked = "a text: the official checkers crash on anything else, so that it cannot be submitted"
            change = f'write "{value}"' if isinstance(value, int | float) else "write a text"
            place = "mlperf-logging 4.1.68 system_desc_checker.py:87"
            found.append(_finding("fail", name, f"{name} = {value!r}", asked, place, change, path))
    for name in COUNTED:
        value = description.get(name)
        if value is not None and _whole(value) is None:
            change = "write how many there are"
            found.append(_finding("warn", name, f"{name} = {value!r}", "a whole number", source, change, path))
    status = description.get("status")
    if rules.statuses and "status" in description and status not in rules.statuses:
        asked = "one of " + ", ".join(rules.statuses)
        found.append(
            _finding(rules.status_level, "status", f"status = {status!r}", asked, source, "set one of them", path)
        )
    division = description.get("division")
    if "division" in description and division not in DIVISIONS:
        asked = " or ".join(DIVISIONS)
        place = "mlperf-logging 4.1.68 package_checker.py:89"
        found.append(_finding("warn", "division", f"division = {division!r}", asked, place, "set one of them", path))
    return tuple(found)


def _whole(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if number >= 0 else None


def _finding(level: Any, name: str, found: str, asked: str, source: str, change: str, path: Path | None) -> Finding:
    return Finding(level, f"description.{name}", found, asked, source, change, path)
