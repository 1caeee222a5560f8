"""Energy of runs by the power rules, from power logs beside the results.

Layout (mlperf-logging 4.1.68 package_checker/power_checker.py): `power/result_N/node_*.txt` and `sw_*.txt` beside
`result_N.txt`, nodes and switches numbered from 0. Keys (mllog/constants.py): power_measurement_start and _stop,
power_reading (W), interconnect_power_est (W), conversion_eff.

Arithmetic (result_summarizer.py, _compute_power_node and _compute_power_sw; rules: mlcommons/training_policies
power_measurement.adoc). A node: each reading holds since the one before, from the start of the measurement on; the sum
times conversion efficiency is scaled from the measurement's length to the time to train. A switch: its estimate times
conversion efficiency times the time to train. A result: the mean over the runs that its score is made of, times the
score's scaling factor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from timetrial.results.records import Energy, Finding, Run
from timetrial.results.steps import positive

TOKEN = b":::MLLOG "
MAX_LINE = 1 << 16
"""Bytes of a line that are looked at; events of power logs have some hundred."""
SOURCE = "mlperf-logging 4.1.68 result_summarizer.py:693-772"
LAYOUT = "mlperf-logging 4.1.68 package_checker/power_checker.py"
MIN_READINGS = 60
"""Samples that the rules ask of a node (power_measurement.adoc)."""
MAX_STEP_MS = 1000
"""Longest time between two samples by the rules, as a mean: one a second."""
KEYS = frozenset(
    {"power_measurement_start", "power_measurement_stop", "power_reading", "interconnect_power_est", "conversion_eff"}
)


@dataclass(frozen=True)
class RunEnergy:
    """Energy of one run."""

    joules: float
    nodes: int
    """Nodes with a power log."""
    switches: int
    """Switches with a power log."""


@dataclass(frozen=True)
class PowerEvent:
    """One event of a power log."""

    time_ms: int
    key: str
    value: float | None
    """W, or the efficiency; None where there is none."""


def power_folder(log: Path) -> Path:
    """Where the power logs of a result log lie: `power/result_N` beside it."""
    return log.parent / "power" / log.stem


def energy(runs: Sequence[Run], scaling_factor: float) -> tuple[Energy | None, tuple[Finding, ...]]:
    """Energy of a result, from the power logs beside `runs`, and what is wrong with them.

    `runs` say in `dropped` and `converged` which of them the score is made of. None without findings where no run has
    power logs; None with findings where those of the runs that count are not complete.
    """
    if not any(power_folder(run.path).is_dir() for run in runs):
        return None, ()
    findings: list[Finding] = []
    found: dict[Path, RunEnergy] = {}
    for run in runs:
        one, said = run_energy(run.path, run.time_min)
        findings += said
        if one is not None:
            found[run.path] = one
    if len({(one.nodes, one.switches) for one in found.values()}) > 1:
        sizes = sorted({f"{one.nodes} nodes and {one.switches} switches" for one in found.values()})
        findings.append(
            Finding(
                "fail", "power.count", "; ".join(sizes), "as many in each run", LAYOUT, "add the missing power logs"
            )
        )
    counted = [run for run in runs if run.converged and not run.dropped]
    minutes = [run.time_min for run in counted if run.path in found and run.time_min]
    if not counted or len(minutes) < len(counted):
        return None, tuple(findings)
    mean = sum(found[run.path].joules for run in counted) / len(counted)
    seconds = 60 * sum(minutes) / len(counted)
    source = f"power logs of {len(counted)} runs, scaled by {scaling_factor:g} as the time is ({SOURCE})"
    return Energy(mean * scaling_factor, mean / seconds, len(counted), source), tuple(findings)


def run_energy(log: Path, time_min: float | None) -> tuple[RunEnergy | None, tuple[Finding, ...]]:
    """Energy of one run of `time_min` minutes from the power logs beside its log, and findings."""
    folder = power_folder(log)
    if not folder.is_dir():
        return None, (_bad("missing", "no power logs of this run", f"power/{log.stem}/node_0.txt", log),)
    if not time_min:
        return None, ()  # no time to train: the score's findings say why
    findings = [*_numbers(folder, "node"), *_numbers(folder, "sw")]
    nodes, switches = _files(folder, "node"), _files(folder, "sw")
    if not nodes:
        return None, (*findings, _bad("missing", "no node_*.txt", "a log of each node", folder))
    joules, whole = 0.0, True
    for file in (*nodes, *switches):
        try:
            events = list(read_power(file))
        except OSError as error:
            findings.append(_bad("unreadable", error.strerror or type(error).__name__, "a readable file", file))
            whole = False
            continue
        measure = node_joules if file in nodes else switch_joules
        one, said = measure(events, time_min * 60, file)
        findings += said
        joules, whole = joules + (one or 0.0), whole and one is not None
    return (RunEnergy(joules, len(nodes), len(switches)) if whole else None), tuple(findings)


def node_joules(events: Sequence[PowerEvent], seconds: float, file: Path) -> tuple[float | None, list[Finding]]:
    """Energy of one node over `seconds` of training; None where the log does not tell."""
    findings: list[Finding] = []
    start: int | None = None
    stop: int | None = None
    before = last = readings = 0
    watt_ms, efficiency = 0.0, 1.0
    for event in sorted(events, key=lambda event: event.time_ms):
        if event.key == "power_measurement_start":
            start = before = event.time_ms
        elif event.key == "power_measurement_stop":
            stop = event.time_ms
        elif event.key == "conversion_eff" and event.value is not None:
            efficiency = event.value
        elif event.key == "power_reading" and stop is None and start is not None:
            if event.value is None:
                findings.append(_bad("reading", "a power_reading without a number", "watts", file))
                return None, findings
            watt_ms += event.value * (event.time_ms - before)
            before = last = event.time_ms
            readings += 1
    if start is None:
        return None, [_bad("start", "no power_measurement_start", "one", file)]
    if stop is None:
        findings.append(_bad("stop", "no power_measurement_stop; the last reading is taken", "one", file, "warn"))
        stop = last
    if stop <= start or not readings:
        return None, [*findings, _bad("reading", "no time measured", "readings between start and stop", file)]
    if readings < MIN_READINGS or (stop - start) / readings > MAX_STEP_MS:
        found = f"{readings} readings in {(stop - start) / 1e3:.6g} s"
        findings.append(_bad("rate", found, "one a second, at least 60", file, "warn", "power_measurement.adoc"))
    return efficiency * watt_ms * seconds / (stop - start), findings


def switch_joules(events: Sequence[PowerEvent], seconds: float, file: Path) -> tuple[float | None, list[Finding]]:
    """Energy of one switch over `seconds` of training; None where its log has no estimate.

    An efficiency counts where it stands before the estimate, as in the official code.
    """
    efficiency = 1.0
    for event in events:
        if event.key == "conversion_eff" and event.value is not None:
            efficiency = event.value
        elif event.key == "interconnect_power_est":
            if event.value is None:
                break
            return efficiency * event.value * seconds, []
    return None, [_bad("switch", "no interconnect_power_est", "watts", file)]


def read_power(file: Path) -> Iterator[PowerEvent]:
    """Events of a power log in file order; lines that are none are passed over. Raises OSError."""
    with file.open("rb") as stream:
        while line := stream.readline(MAX_LINE):
            at = line.find(TOKEN)
            if at < 0:
                continue
            try:
                fields = json.loads(line[at + len(TOKEN) :])
                time, key, value = fields["time_ms"], fields["key"], fields.get("value")
            except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
                continue
            if key in KEYS and isinstance(time, int | float) and abs(time) < 1 << 53:
                yield PowerEvent(int(time), key, 0.0 if value == 0 and value is not False else positive(value))


def _files(folder: Path, kind: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{kind}_*.txt") if path.is_file())


def _numbers(folder: Path, kind: str) -> list[Finding]:
    """Whether the files of a kind are numbered 0, 1, 2 ..."""
    found = sorted(path.stem.removeprefix(f"{kind}_") for path in _files(folder, kind))
    wanted = {str(number) for number in range(len(found))}
    if all(re.fullmatch(r"[0-9]+", name) for name in found) and {str(int(name)) for name in found} == wanted:
        return []
    return [_bad("number", f"{kind}: {', '.join(found[:8])}", f"{kind}_0 to {kind}_{len(found) - 1}", folder)]


def _bad(rule: str, found: str, asked: str, path: Path, level: str = "fail", source: str = LAYOUT) -> Finding:
    change = "give the power logs of each run that the score is made of"
    return Finding("warn" if level == "warn" else "fail", f"power.{rule}", found, asked, source, change, path)
