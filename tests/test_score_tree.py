"""What is found under a path: each shape that people have, and trees that are broken."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from score_runs import benchmark_directory, run_lines, write
from timetrial.errors import UserError
from timetrial.results import rounds
from timetrial.results.many import score_all
from timetrial.results.tree import Entry, find


def repository(root: Path) -> Path:
    """Two organizations with a system each."""
    for organization, system in (("Beta", "b_1.0"), ("Alpha", "a")):
        described = {"submitter": organization, "division": "closed", "number_of_nodes": "2"}
        described |= {"accelerators_per_node": "4", "accelerator_model_name": "X", "system_name": f"The {system}"}
        write(root / organization / "systems" / f"{system}.json", [json.dumps(described)])
        results = root / organization / "results" / system
        benchmark_directory(results / "llama31_8b", [60.0 + i for i in range(10)], [200_000] * 10)
        write(root / organization / "benchmarks" / "llama31_8b" / "result_0.txt", ["a file of the code"])
    return root


def shapes(entries: list[Entry]) -> list[tuple[str, str, str, str, int]]:
    return [(e.kind, e.organization, e.system, e.benchmark, len(e.logs)) for e in entries]


def test_a_repository_and_its_parts(tmp_path: Path) -> None:
    root = repository(tmp_path / "training_results_v5.1")
    alpha, beta = ("benchmark", "Alpha", "a", "llama31_8b", 10), ("benchmark", "Beta", "b_1.0", "llama31_8b", 10)
    entries = find([root])
    assert shapes(entries) == [alpha, beta]
    assert {(e.round, e.round_source) for e in entries} == {("v5.1", "path")}
    assert [log.name for log in entries[0].logs] == [f"result_{i}.txt" for i in range(10)]
    assert entries[0].description == json.loads((root / "Alpha/systems/a.json").read_text())
    for part in ("Beta", "Beta/results", "Beta/results/b_1.0", "Beta/results/b_1.0/llama31_8b"):
        assert shapes(find([root / part])) == [beta]
    assert shapes(find([root / "Beta", root / "Alpha", root])) == [beta, alpha]  # each once
    (result, _) = score_all([root])
    assert result.score_min == pytest.approx(64.5)
    assert (result.accelerators, result.nodes, result.system_name) == (8, 2, "The a")


def test_single_logs(tmp_path: Path) -> None:
    directory = benchmark_directory(tmp_path / "v5.1" / "llama31_8b", [60.0] * 12, [200_000] * 12)
    (one,) = find([directory / "result_0.txt"])
    assert (one.kind, one.benchmark, one.round) == ("log", "llama31_8b", "v5.1")
    (result,) = score_all([directory / "result_0.txt"])
    assert result.score_min is None
    assert result.runs[0].time_min == 60.0
    (all_of_them,) = find(sorted(directory.iterdir()))  # as a shell's * gives them
    assert all_of_them.kind == "benchmark"
    assert [log.name for log in all_of_them.logs] == [f"result_{i}.txt" for i in range(12)]


def test_a_run_of_timetrial_train(tmp_path: Path) -> None:
    for preset, benchmark in (("mini", "llama31_8b_mini"), ("official", "llama31_8b")):
        run = tmp_path / preset
        write(run / "config.json", [json.dumps({"preset": preset, "round": "v6.0"})])
        write(run / "result_0.txt", run_lines(5.0, benchmark=benchmark))
    mini, official = find([tmp_path])
    assert (mini.kind, mini.preset, mini.round, mini.round_source) == ("run", "mini", "v6.0", "config.json")
    assert (official.kind, official.preset) == ("run", "official")
    results = list(score_all([tmp_path]))
    assert results[0].verdict == "mini"
    assert results[0].score_min == 5.0
    assert results[1].score_min is None


def test_round_by_path_by_hand_and_by_guess(tmp_path: Path) -> None:
    for name, round_ in {
        "v5.0": "v5.0",
        "5.1": "v5.1",
        "training_results_v4.1": "v4.1",
        "training_6.0.0": "v6.0",
        "training_results_v3.1": "",
        "rocm-6.0": "",
        "v7.7": "",
        "7.7": "",
    }.items():
        directory = benchmark_directory(tmp_path / name / "Alpha" / "results" / "sys_v4.0" / "llama31_8b", [60.0] * 3)
        (entry,) = find([directory])
        assert entry.round == round_, name
        assert find([directory], "6.1")[0].round == "v6.1"
    with pytest.raises(UserError, match=r"unknown round 'v9'; there are v4\.0"):
        find([tmp_path], "v9")
    (result,) = score_all([tmp_path / "7.7"])  # any version
    assert result.round == "v5.1"  # logs of October 2025
    assert "taken for v5.1" in next(found.found for found in result.findings if found.rule == "score.round")
    assert rounds.guess("llama31_405b", 1_744_812_623_000) == "v5.0"
    assert rounds.guess("deepseekv3_671b", None) == "v6.1"
    assert rounds.guess("gnn", 1_760_000_000_000) == "v4.1"
    assert rounds.guess("nothing", 0) == ""


def test_loops_unreadable_and_empty_places(tmp_path: Path) -> None:
    root = repository(tmp_path / "v5.1")
    (root / "Alpha" / "results" / "loop").symlink_to(root / "Alpha")
    (root / "Alpha" / "results" / "itself").symlink_to("itself")
    (root / "Alpha" / "results" / "twice").symlink_to(root / "Beta" / "results" / "b_1.0")
    (root / "Beta" / "results" / "b_1.0" / "flux1").mkdir()
    entries = find([root])
    assert {e.organization for e in entries if e.kind == "benchmark"} == {"Alpha", "Beta"}
    said = {(e.kind, e.path.name): [found.rule for found in e.findings] for e in entries}
    assert said["problem", "loop"] == ["tree.loop"]
    assert said["problem", "flux1"] == ["tree.no_logs"]
    assert sum(e.kind == "benchmark" for e in entries) == 2
    results = list(score_all([root]))
    assert sorted(result.verdict for result in results if result.score_min is None) == ["unread", "unread"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read(tmp_path: Path) -> None:
    root = repository(tmp_path / "v5.1")
    (root / "Beta").chmod(0)
    entries = find([root])
    (root / "Beta").chmod(0o755)
    assert [(e.kind, [f.rule for f in e.findings]) for e in entries][-1] == ("problem", ["tree.unreadable"])


def test_unreadable_directory_of_any_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = repository(tmp_path / "v5.1")
    scan = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "Beta":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    entries = find([root])
    assert [e.kind for e in entries] == ["benchmark", "problem"]
    assert entries[1].findings[0].found == "Permission denied"


def test_places_without_logs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file or directory; give a log or a directory"):
        find([tmp_path / "nowhere"])
    (entry,) = find([tmp_path])
    assert entry.findings[0].found == "no result logs"
    (result,) = score_all([tmp_path])
    assert result.verdict == "unread"
    write(tmp_path / "run-3.log", run_lines())
    write(tmp_path / "notes.txt", ["hello"])
    (entry,) = find([tmp_path])
    assert [log.name for log in entry.logs] == ["run-3.log"]
    assert entry.findings[0].rule == "tree.names"


def test_compressed_logs(tmp_path: Path) -> None:
    write(tmp_path / "llama31_8b" / "result_0.txt.gz", ["not looked into"])
    (entry,) = find([tmp_path])
    assert [(found.level, found.rule) for found in entry.findings] == [("fail", "tree.compressed")]
    assert entry.findings[0].found == "result_0.txt.gz is compressed, and was not read"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "{}", '{"scaling_factor": "1.1"}', '{"scaling_factor": 0.9}', '{"scaling_factor": NaN}',
     '{"scaling_factor": true}', "[" * 100_000, '{"scaling_factor": 1e999}'],
    ids=range(10),
)  # fmt: skip
def test_a_bad_scaling_file_gives_no_score(tmp_path: Path, content: str) -> None:
    root = repository(tmp_path / "v5.1")
    directory = root / "Alpha" / "results" / "a" / "llama31_8b"
    (directory / "scaling.json").write_text(content)
    (result,) = score_all([directory])
    assert result.score_min is None
    assert result.unscaled_min == pytest.approx(64.5)
    assert result.verdict == "fails"
    assert any(found.rule in ("tree.json", "tree.scaling") for found in result.findings)


def test_bad_descriptions(tmp_path: Path) -> None:
    root = repository(tmp_path / "v5.1")
    path = root / "Alpha" / "systems" / "a.json"
    directory = root / "Alpha" / "results" / "a" / "llama31_8b"
    for content in ("", "[]", '{"number_of_nodes": {}}', '{"number_of_nodes": "two"}', "\xff"):
        path.write_bytes(content.encode("latin-1"))
        (result,) = score_all([directory])
        assert result.score_min == pytest.approx(64.5)
        assert result.accelerators is None
    path.unlink()
    (result,) = score_all([directory])
    assert result.score_min == pytest.approx(64.5)
    assert any(found.rule == "tree.description" for found in result.findings)


def test_logs_that_are_none(tmp_path: Path) -> None:
    directory = benchmark_directory(tmp_path / "v5.1" / "llama31_8b", [60.0 + i for i in range(10)], [200_000] * 10)
    (directory / "result_3.txt").unlink()
    (directory / "result_3.txt").mkdir()
    (result,) = score_all([directory])
    assert result.score_min == pytest.approx(sum(60.0 + i for i in range(10) if i not in (0, 3)) / 8)
    assert result.runs[3].dropped == "slowest"
    (directory / "result_4.txt").write_bytes(b"")
    (result,) = score_all([directory])
    assert result.score_min is None
    assert result.verdict == "fails"
