"""The official compliance checker on one result log: a verdict and its reasons.

Runs `python -m mlperf_logging.compliance_checker` in a process of its own, since the checker executes
Python from its rule files, keeps its queue of rule files in a module global and configures root logging.

What 4.1.68 does that a caller must know, all of it met here and nowhere else:

- without --ruleset it checks by 6.1.0, whatever round the log is of: the ruleset is always given;
- it writes compliance_checker.log into the current directory: sent to a temporary file, and read;
- it ends with 1 both for a log that fails and for its own crash: only SUCCESS or FAILED in its log is
  believed, anything else is a failure that says "checker crashed";
- it crashes (FileNotFoundError) on a benchmark that the ruleset has no file for: asked first;
- it checks no value against the rules' text where they differ (docs/recipes.md).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timetrial.config import RunConfig
from timetrial.errors import UserError
from timetrial.workloads import workload as workloads

RULESETS = {"v5.0": "5.0.0", "v5.1": "5.1.0", "v6.0": "6.0.0", "v6.1": "6.1.0"}
"""Round -> ruleset."""
PLACES = ("data.path", "init.path", "init.base")
"""Keys that say where something lies on this machine, not what it is."""
SEPARATOR = "\n" + "-" * 30 + "\n"


@dataclass(frozen=True)
class Verdict:
    """What the checker says."""

    ruleset: str
    passed: bool
    messages: tuple[str, ...]
    """Reasons of a failure and warnings, each as the checker words it."""


def ruleset_of(round_: str) -> str:
    """The ruleset of a round. Raises UserError for a round without one."""
    if round_ not in RULESETS:
        raise UserError(f"round {round_} has no ruleset here; there are {', '.join(RULESETS)}")
    return RULESETS[round_]


def check(log: Path, ruleset: str) -> Verdict:
    """The verdict on the log of one run. Takes about a second.

    Raises UserError when the log cannot be read or the ruleset does not exist.
    """
    if ruleset not in RULESETS.values():
        raise UserError(f"unknown ruleset {ruleset!r}; there are {', '.join(RULESETS.values())}")
    try:
        text = log.read_text()
    except OSError as error:
        raise UserError(f"cannot read the result log {log}: {error.strerror}") from None
    unknown = _unknown_benchmark(text, ruleset)
    if unknown:
        return Verdict(ruleset, False, (unknown,))
    with tempfile.TemporaryDirectory() as directory:
        said = Path(directory) / "checker.log"
        command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training"]
        command += ["--ruleset", ruleset, "--log_output", str(said), str(log)]
        done = subprocess.run(command, capture_output=True, text=True)
        report = said.read_text() if said.exists() else ""
    records = _records(report)
    succeeded = done.returncode == 0 and ("INFO", "SUCCESS") in records
    if not succeeded and ("ERROR", "FAILED") not in records:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Verdict(ruleset, False, (*_messages(records), f"checker crashed: {last[0]}"))
    return Verdict(ruleset, succeeded, _messages(records))


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


def _unknown_benchmark(text: str, ruleset: str) -> str | None:
    """Why the ruleset has no rules for this log, or None."""
    named: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(":::MLLOG "):
            try:
                event = json.loads(line.removeprefix(":::MLLOG "))
                named.setdefault(event["key"], event["value"])
            except (ValueError, KeyError, TypeError):
                continue  # the checker will say so
    benchmark, division = named.get("submission_benchmark"), named.get("submission_division")
    if benchmark is None or division is None:
        return None
    rules = Path(_checker_directory()) / f"training_{ruleset}"
    if (rules / f"{division}_{benchmark}.yaml").exists():
        return None
    known = sorted(path.stem.split("_", 1)[1] for path in rules.glob(f"{division}_*.yaml"))
    return f"{benchmark} is no benchmark of ruleset {ruleset}; it has {', '.join(k for k in known if k != 'common')}"


def _checker_directory() -> str:
    spec = importlib.util.find_spec("mlperf_logging.compliance_checker")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("mlperf-logging is not installed; pip install mlperf-logging")
    return spec.submodule_search_locations[0]


def _records(report: str) -> list[tuple[str, str]]:
    """(level, text) of each record; a text may go over many lines."""
    records: list[tuple[str, str]] = []
    for line in report.splitlines():
        level, dash, text = line.partition(" - ")
        if dash and level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
            records.append((level, text))
        elif records:
            records[-1] = (records[-1][0], records[-1][1] + "\n" + line)
    return records


def _messages(records: list[tuple[str, str]]) -> tuple[str, ...]:
    texts = [text for level, text in records if level == "WARNING"]
    return tuple(part.strip() for text in texts for part in text.split(SEPARATOR) if part.strip())
