"""Energy to train against the runs whose power was measured."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from timetrial.errors import UserError
from timetrial.predict.converge import TimeToTrain
from timetrial.predict.energy import energy
from timetrial.systems import system

FACTS = Path(__file__).parents[2] / "shared" / "facts"


def minutes(value: float) -> TimeToTrain:
    return TimeToTrain(value, value, value, 1.0, 1.0, 1.0, 1, 1, 0.0, False, "given")


def measured() -> list[dict[str, str]]:
    path = FACTS / "published_results.csv"
    if not path.exists():
        pytest.skip("published tables are not here")
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["energy_j"]]


@pytest.mark.parametrize("known", [True, False])
def test_measured_runs_lie_in_the_range(known: bool) -> None:
    """All 14 runs, of language models and others; with the system's measured power, and from design power alone."""
    rows = measured()
    assert len(rows) >= 14
    for row in rows:
        of = system.find(row["accelerator"])
        if not known:
            of = dataclasses.replace(of, power=None)
        found = energy(of, int(row["accelerators"]), minutes(float(row["ttt_min"])))
        assert found.low <= float(row["energy_j"]) <= found.high, row["system_id"]
        assert found.measured == known


def test_the_run_that_the_file_has() -> None:
    """v4.0 gpt3 on 512 H100: 1.699 GJ."""
    found = energy(system.find("NVIDIA H100-SXM5-80GB"), 512, minutes(56.8694))
    assert found.joules == pytest.approx(1.6993e9, rel=1e-3)
    assert found.kwh == pytest.approx(472, rel=1e-2)
    assert found.basis.startswith("measured: ")


def test_assumed_power_says_so() -> None:
    found = energy(dataclasses.replace(system.find("NVIDIA H100-SXM5-80GB"), power=None), 8, minutes(1.0))
    assert not found.measured
    assert found.average_w == 1.25 * 700
    assert found.basis == "assumed: 1.25 of the design power of 700 W"


def test_the_range_holds_that_of_the_time() -> None:
    time = dataclasses.replace(minutes(10.0), low=8.0, high=15.0)
    found = energy(system.find("NVIDIA H100-SXM5-80GB"), 8, time)
    assert found.low == pytest.approx(found.joules * 0.8 * 0.76)
    assert found.high == pytest.approx(found.joules * 1.5 * 1.06)


def test_no_accelerators() -> None:
    with pytest.raises(UserError, match="at least 1"):
        energy(system.find("NVIDIA H100-SXM5-80GB"), 0, minutes(1.0))
