"""The convergence table: which rows are run, what becomes of runs that break, and what is printed."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from timetrial.config import RunConfig, override
from timetrial.errors import RunFailed, UserError
from timetrial.train import converge, run, threads
from timetrial.workloads.workload import Workload, find, names

NAME = "llama31_8b"
TINY = {
    "model.dim": "32", "model.n_layers": "1", "model.n_heads": "2", "model.n_kv_heads": "1", "model.ffn_dim": "32",
    "data.seq_len": "16", "evaluation.every_samples": "16", "evaluation.samples": "4", "evaluation.max_samples": "32",
}  # fmt: skip


def tiny(changes: dict[str, str]) -> Workload:
    """The workload with a mini that takes a second."""

    def mini() -> RunConfig:
        config = find(NAME).mini()
        for key, value in {**TINY, **changes}.items():
            config = override(config, key, value)
        return config

    return dataclasses.replace(find(NAME), mini=mini)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the table measure a tiny mini, with some changes."""

    def set_changes(**changes: str) -> None:
        dotted = {key.replace("__", "."): value for key, value in changes.items()}
        monkeypatch.setattr(converge, "find", lambda name: tiny(dotted))

    set_changes()
    return set_changes


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Runs are recorded instead of made; each reaches its target."""
    configs: list[RunConfig] = []

    def train_run(config: RunConfig, out: Path, **_: Any) -> dict[str, Any]:
        configs.append(config)
        return {
            "workload": NAME, "seed": config.seed, "status": "success", "samples": 100 * config.seed, "steps": 5,
            "value": 4.0, "target": 4.3, "time_to_train_s": 2.0, "tokens_per_s": 10.0, "mfu": 0.1,
        }  # fmt: skip

    monkeypatch.setattr(run, "train_run", train_run)
    return configs


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_that_are_there_are_not_run_again(use: Any, trained: list[RunConfig], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "table.csv"
    converge.measure(NAME, "4,8", 2, out, threads=1)
    assert [(config.plan.gbs, config.seed) for config in trained] == [(4, 1), (4, 2), (8, 1), (8, 2)]
    before = out.read_text()
    converge.measure(NAME, "4,8", 3, out, threads=1)
    assert [(config.plan.gbs, config.seed) for config in trained[4:]] == [(4, 3), (8, 3)]
    assert all(line in out.read_text() for line in before.splitlines())
    assert "3 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", [{"optim__base_lr": "1e-3"}, {"model__n_layers": "2"}, {"evaluation__target": "4.1"}]
)
def test_rows_of_another_configuration_stay_and_do_not_count(
    change: dict[str, str], use: Any, trained: list[RunConfig], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "table.csv"
    converge.measure(NAME, "4", 2, out, threads=1)
    use(**change)
    converge.measure(NAME, "4", 1, out, threads=1)
    assert len(trained) == 3
    assert len(rows(out)) == 3
    assert len({row["config"] for row in rows(out)}) == 2
    said = capsys.readouterr().out
    assert "2 rows of llama31_8b are of another configuration" in said
    assert "1 of 1" in said.splitlines()[-1]


def test_the_hash_is_of_the_recipe_and_of_its_base() -> None:
    changes = [{}, {"seed": "7"}, {"plan.gbs": "16"}, {"threads": "2", "checkpoint_every": "3"}, {"lanes": "1"}]
    same = [tiny(change) for change in changes]
    assert len({converge.recipe_hash(workload) for workload in same}) == 1
    assert converge.recipe_hash(tiny({"optim.beta2": "0.9"})) != converge.recipe_hash(tiny({}))
    lora = find("llama2_70b_lora")
    assert lora.mini_base is not None
    other = dataclasses.replace(lora, mini_base=lambda: override(lora.mini_base(), "optim.base_lr", "1e-3"))
    assert converge.recipe_hash(other) != converge.recipe_hash(lora)


def test_the_documented_table_is_of_the_recipes_as_they_are() -> None:
    table = Path(__file__).parent.parent / "docs" / "convergence.csv"
    measured = {(row["workload"], row["config"]) for row in rows(table)}
    assert measured == {(name, converge.recipe_hash(find(name))) for name in names()}


def test_a_run_that_breaks_is_a_row_and_the_others_go_on(use: Any, tmp_path: Path, capsys: Any) -> None:
    """Real runs: a learning rate that makes the loss no number at all."""
    use(optim__base_lr="1e30", optim__warmup_steps="0")
    out = tmp_path / "table.csv"
    converge.measure(NAME, "4", 2, out, threads=1)
    found = rows(out)
    assert [(row["seed"], row["status"]) for row in found] == [("1", "failed"), ("2", "failed")]
    assert all(int(row["steps"]) < 8 and row["time_to_train_s"] == "" for row in found)
    captured = capsys.readouterr()
    assert captured.err.count("failed: step") == 2
    assert "0 of 2" in captured.out


def test_a_run_that_misses_its_target_is_a_row(use: Any, tmp_path: Path) -> None:
    use(evaluation__target="0.1")
    out = tmp_path / "table.csv"
    converge.measure(NAME, "4", 1, out, threads=1)
    assert [(row["status"], row["samples"], row["steps"]) for row in rows(out)] == [("aborted", "32", "8")]


def test_a_place_that_cannot_be_written_is_told_before_the_first_run(
    use: Any, trained: list[RunConfig], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="missing"):
        converge.measure(NAME, "4", 1, tmp_path / "missing" / "table.csv", threads=1)
    with pytest.raises(UserError, match="cannot be read"):
        converge.measure(NAME, "4", 1, tmp_path, threads=1)
    assert not trained


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "is not a convergence table"),
        (",".join(c for c in converge.COLUMNS if c != "config") + "\n", "older version"),
        ("", "is not a convergence table"),
        (",".join(converge.COLUMNS) + "\nllama31_8b,four,1,abc,,,,,,,\n", "line 2: gbs or seed"),
    ],
)
def test_other_files_are_left_alone(text: str, says: str, use: Any, trained: list[RunConfig], tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    out.write_text(text)
    with pytest.raises(UserError, match=says):
        converge.measure(NAME, "4", 1, out, threads=1)
    assert out.read_text() == text
    assert not trained


def test_threads_are_settled_once(
    use: Any, trained: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = iter([(4, 2), (2, 1), (1, 1)])
    monkeypatch.setattr(threads, "choose", lambda config, process: next(choices))
    converge.measure(NAME, "4,8", 2, tmp_path / "table.csv")
    assert [(config.threads, config.lanes) for config in trained] == [(4, 2)] * 4


def test_an_interrupted_run_is_no_row(use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "train_run", lambda *_, **__: {"status": "stopped"})
    with pytest.raises(UserError, match="run the same command again"):
        converge.measure(NAME, "4", 1, tmp_path / "table.csv", threads=1)
    assert rows(tmp_path / "table.csv") == []


def test_a_base_that_cannot_be_made_ends_the_table(
    use: Any, trained: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail every row."""

    def missed(config: RunConfig) -> None:
        raise RunFailed("the base missed its target")

    monkeypatch.setattr("timetrial.train.base.initial_weights", missed)
    with pytest.raises(RunFailed, match="the base missed"):
        converge.measure(NAME, "4", 1, tmp_path / "table.csv", threads=1)
    assert not trained


@pytest.mark.parametrize("sizes", ["0", "-4", "4,none", "3000000000"])
def test_impossible_batch_sizes_are_refused(sizes: str, use: Any, trained: list[RunConfig], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch-sizes|plan\.gbs"):
        converge.measure(NAME, sizes, 1, tmp_path / "table.csv", threads=1)
    assert not trained
