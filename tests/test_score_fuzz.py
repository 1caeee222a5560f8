"""Damaged logs: never a traceback; the official time, or a finding. Longer runs: benchmarks/score_fuzz.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from score_mutations import OPERATIONS, Operation, Place, apply, oddity, official_minutes, seeds, some
from timetrial.results.many import score_all
from timetrial.results.scoring import olympic_mean

CASES = 2000
operation = st.tuples(
    st.sampled_from(sorted(OPERATIONS)), st.integers(0, 1 << 16), st.integers(0, 255), st.integers(0, 255)
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("seed", range(len(seeds())))
def test_the_seeds_are_whole(place: Place, seed: int) -> None:
    wrong, run = oddity(place.write(seeds()[seed]))
    assert wrong is None
    assert run.time_min == official_minutes(place.path)


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, len(seeds()) - 1), st.lists(operation, min_size=1, max_size=6))
def test_damage_by_hypothesis(place: Place, seed: int, operations: list[Operation]) -> None:
    wrong, _ = oddity(place.write(apply(seeds()[seed], operations)))
    assert wrong is None


def test_damage_by_dice(place: Place) -> None:
    dice = random.Random(5)
    starts = seeds()
    outcomes = {"counts": 0, "does not": 0}
    for case in range(CASES):
        operations = some(dice)
        wrong, run = oddity(place.write(apply(dice.choice(starts), operations)))
        assert wrong is None, (case, operations)
        outcomes["counts" if run.converged else "does not"] += 1
    assert min(outcomes.values()) > CASES / 10  # neither all refused nor all let through


def test_damaged_directories(tmp_path: Path) -> None:
    """The score of five runs, one of them damaged, through everything: checks, times, convergence."""
    dice = random.Random(6)
    whole = seeds()[0]
    directory = tmp_path / "v5.1" / "llama31_8b"
    directory.mkdir(parents=True)
    for i in range(5):
        moved = whole.replace(b"17600", b"1760%d" % i)  # each its own time
        (directory / f"result_{i}.txt").write_bytes(moved.replace(b'"seed", "value": 1', b'"seed", "value": %d' % i))
    (before,) = score_all([directory])
    assert before.unscaled_min == 60.0
    for _ in range(150):
        (directory / "result_2.txt").write_bytes(apply(whole, some(dice)))
        (result,) = score_all([directory])
        assert not [found for found in result.findings if found.rule.startswith("internal.")]
        times = [official_minutes(log) for log in sorted(directory.iterdir())]
        known = [time for time in times if time is not None]
        expected = olympic_mean(known, len(times) - len(known), 1)
        told = [f for run in result.runs for f in run.findings if f.level != "note"]
        told += [f for f in result.findings if f.level != "note"]
        assert result.unscaled_min == expected or told
