"""Energy from power logs, against the functions of mlperf-logging on the same files."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.compliance_checker.mlp_parser import parse_file
from mlperf_logging.package_checker.power_checker import PowerChecker
from mlperf_logging.result_summarizer import result_summarizer

from timetrial.results.energy import energy, node_joules, power_folder, read_power, run_energy, switch_joules
from timetrial.results.records import Run

TABLE = Path(__file__).resolve().parents[2] / "shared/facts/published_results.csv"
START = 1_750_000_000_000
Events = list[tuple[int, str, Any]]


def write(path: Path, events: Events) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for time, key, value in events:
        kind = (
            "INTERVAL_START" if key.endswith("start") else "INTERVAL_END" if key.endswith("stop") else "POINT_IN_TIME"
        )
        fields = {"namespace": "", "time_ms": time, "event_type": kind, "key": key, "value": value}
        lines.append(":::MLLOG " + json.dumps({**fields, "metadata": {"file": "power.py", "lineno": 1}}))
    path.write_text("\n".join(lines) + "\n")
    return path


def node(seed: int, seconds: int = 90, efficiency: float = 0.94, stop: bool = True, behind: bool = False) -> Events:
    rng = random.Random(seed)
    events: Events = [(START, "power_measurement_start", None), (START, "conversion_eff", efficiency)]
    time = START
    for _ in range(seconds):
        time += rng.randint(600, 1300)
        events.append((time, "power_reading", rng.uniform(5000, 9000)))
    if stop:
        events.append((time + 400, "power_measurement_stop", None))
    if behind:
        events.append((time + 5000, "power_reading", 1e6))
    return events


def switch(watts: float, efficiency: float = 0.9) -> Events:
    return [
        (START, "power_measurement_start", None),
        (START, "conversion_eff", efficiency),
        (START, "interconnect_power_est", watts),
        (START + 9, "power_measurement_stop", None),
    ]


@pytest.mark.parametrize(
    "events",
    [node(1), node(2, efficiency=1.0), node(3, stop=False), node(4, behind=True), node(5)[::-1]],
    ids=["plain", "dc", "no stop", "reading behind the stop", "out of order"],
)
def test_node_is_the_official_arithmetic(tmp_path: Path, events: Events) -> None:
    file = write(tmp_path / "node_0.txt", events)
    lines, _ = parse_file(str(file), "5.1.0")
    wanted = result_summarizer._compute_power_node(lines, 200_000.0)
    found, _ = node_joules(list(read_power(file)), 200.0, file)
    assert found == pytest.approx(wanted, rel=1e-12)


def test_switch_is_the_official_arithmetic(tmp_path: Path) -> None:
    file = write(tmp_path / "sw_0.txt", switch(2800.0))
    lines, _ = parse_file(str(file), "5.1.0")
    found, _ = switch_joules(list(read_power(file)), 200.0, file)
    assert found == pytest.approx(result_summarizer._compute_power_sw(lines, 200_000.0), rel=1e-12)
    assert found == pytest.approx(0.9 * 2800 * 200)


def constant(watts: float, seconds: int) -> Events:
    readings: Events = [(START + 1000 * i, "power_reading", watts) for i in range(1, seconds + 1)]
    return [
        (START, "power_measurement_start", None),
        *readings,
        (START + 1000 * seconds, "power_measurement_stop", None),
    ]


def result(folder: Path, minutes: list[float | None]) -> list[Run]:
    """Runs with power logs, and which of them the score drops; None did not converge."""
    known = sorted((one, i) for i, one in enumerate(minutes) if one is not None)
    fastest, slowest = known[0][1], known[-1][1]
    runs = []
    for i, one in enumerate(minutes):
        log = folder / f"result_{i}.txt"
        time = 1_000_000 if one is None else round(one * 60_000)
        status = "aborted" if one is None else "success"
        write(log, [(START, "run_start", None), (START + time, "run_stop", None)])
        for n in range(2):
            write(power_folder(log) / f"node_{n}.txt", node(10 * i + n))
        write(power_folder(log) / "sw_0.txt", switch(1500.0))
        dropped = "fastest" if i == fastest else ""
        if one is None or (i == slowest and None not in minutes):
            dropped = "slowest"
        runs.append(Run(log, one is not None, status, time / 60_000, None, None, None, None, dropped))  # type: ignore[arg-type]
    return runs


@pytest.mark.parametrize("minutes", [[3.0, 2.5, 4.0, 3.5, 2.0], [3.0, None, 4.0, 3.5, 2.0]])
def test_result_is_the_official_olympic_mean(tmp_path: Path, minutes: list[float | None]) -> None:
    runs = result(tmp_path / "bench", minutes)
    found, findings = energy(runs, 1.25)
    assert not findings
    assert found is not None
    totals, index = [], []
    for run in runs:
        if run.converged and run.time_min is not None:
            args = (str(tmp_path / "bench"), str(run.path), run.time_min * 60_000, "5.1.0")
            totals.append(result_summarizer._compute_total_power(*args))
            index.append(run.time_min)
    order = [i for i, _ in sorted(enumerate(index), key=lambda pair: pair[1])]
    wanted = result_summarizer._index_olympic_average(totals, order, minutes.count(None), 1)
    assert found.joules == pytest.approx(1.25 * wanted, rel=1e-12)
    assert found.runs == 3
    counted = [run.time_min * 60 for run in runs if run.converged and not run.dropped and run.time_min]
    assert found.average_w == pytest.approx(wanted / (sum(counted) / 3), rel=1e-12)
    checker = PowerChecker("5.1.0")
    assert checker.check_power(str(tmp_path / "bench" / "power"), [str(run.path) for run in runs])[0]


def test_constant_power(tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    write(power_folder(log) / "node_0.txt", constant(7000.0, 120))
    found, findings = run_energy(log, 2.0)
    assert found is not None
    assert found.joules == pytest.approx(7000 * 120)
    assert (found.nodes, found.switches, findings) == (1, 0, ())


def test_no_power_logs_is_no_energy(tmp_path: Path) -> None:
    run = Run(tmp_path / "result_0.txt", True, "success", 1.0, None, None, None, None)
    assert energy([run], 1.0) == (None, ())


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    runs = result(tmp_path, [3.0, 2.5, 4.0, 3.5, 2.0])
    (power_folder(runs[0].path) / "node_1.txt").unlink()
    rules = {finding.rule for finding in energy(runs, 1.0)[1]}
    assert "power.count" in rules
    (power_folder(runs[0].path) / "node_0.txt").rename(power_folder(runs[0].path) / "node_7.txt")
    assert "power.number" in {finding.rule for finding in energy(runs, 1.0)[1]}
    (power_folder(runs[0].path) / "node_7.txt").unlink()
    found, findings = energy(runs, 1.0)
    assert found is None
    assert any("no node_*.txt" in finding.found for finding in findings)


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        ([], "power.start"),
        ([(START, "power_measurement_start", None)], "power.reading"),
        ([(START, "power_measurement_start", None), (START + 9, "power_reading", "many")], "power.reading"),
        (constant(100.0, 5), "power.rate"),
    ],
)
def test_bad_power_log(tmp_path: Path, events: Events, rule: str) -> None:
    log = tmp_path / "result_0.txt"
    file = write(power_folder(log) / "node_0.txt", events)
    file.write_bytes(b"\xff\xfe foreign\n:::MLLOG {]\n:::MLLOG 7\n" + file.read_bytes())
    found, findings = run_energy(log, 1.0)
    assert rule in {finding.rule for finding in findings}
    assert (found is not None) == (rule == "power.rate")


@pytest.mark.skipif(not TABLE.is_file(), reason="no table")
def test_published_energy_is_power_times_score() -> None:
    """The official energy is scaled as the time is: joules / average watts is the scaled score within 1.5 %."""
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["energy_j"]]
    assert len(rows) == 14
    for row in rows:
        seconds = float(row["energy_j"]) / float(row["avg_power_w"])
        assert seconds / 60 == pytest.approx(float(row["ttt_min"]), rel=0.015), row["system_id"]
