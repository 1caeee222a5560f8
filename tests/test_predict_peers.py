"""The arithmetic of `benchmarks/predict_peers.py`: errors, and the efficiency that favours a peer best."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PEERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


verdict, turn = load("verdict"), load("predict_turn")


def test_errors() -> None:
    assert verdict.errors([11.0, 4.5], [10.0, 5.0]) == pytest.approx([0.1, -0.1])
    assert verdict.typical([0.1, -0.3, 0.2]) == 0.2


def test_the_best_efficiency_is_the_one_that_runs_had() -> None:
    assert verdict.efficiency([(4.0, 10.0), (2.0, 5.0), (1.0, 2.5)]) == 0.4


def test_an_outlier_does_not_move_the_best_efficiency() -> None:
    assert verdict.efficiency([(4.0, 10.0), (2.0, 5.0), (1.0, 100.0)]) == 0.4


def test_favoured_has_an_efficiency_for_each_kind() -> None:
    predicted, best = verdict.favoured([4.0, 2.0, 5.0], [10.0, 5.0, 10.0], [8, 8, 16])
    assert best == {8: 0.4, 16: 0.5}
    assert predicted == pytest.approx([10.0, 5.0, 10.0])


def test_left_out_never_sees_its_own_group() -> None:
    ideal, published, kinds, groups = [4.0, 4.0, 3.0], [10.0, 8.0, 5.0], [8, 8, 16], ["a", "b", "a"]
    predicted = verdict.left_out(ideal, published, kinds, groups)
    assert predicted[:2] == pytest.approx([8.0, 10.0])
    assert predicted[2] is None


def test_ratio_is_taken_round_by_round() -> None:
    assert verdict.ratio([10.0, 40.0, 90.0], [10.0, 20.0, 30.0]) == (2.0, 1.0, 3.0)


def test_timed_counts_answers() -> None:
    answer = turn.timed(lambda: [1.0, None, 1.0, 2.0])
    assert (answer["plans"], answer["failed"], answer["distinct"]) == (3, 1, 2)


def test_tries_keeps_the_words_of_an_error() -> None:
    said = turn.tries({"a": lambda: 1 / 0, "b": lambda: 2})
    assert said == [["a", "ZeroDivisionError: division by zero"], ["b", "no error: 2"]]
