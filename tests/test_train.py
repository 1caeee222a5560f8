"""The training loop end to end on the command line: what it leaves, and what survives a kill."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import timetrial, tiny
from timetrial.config import load
from timetrial.results.summary import read_lines

STEADY = ("loss", "grad_norm", "lr", "samples", "step")


def curve(run: Path) -> list[tuple[float, ...]]:
    """What a run computed, without what it timed."""
    return [tuple(row[key] for key in STEADY) for row in read_lines(run / "metrics.jsonl")]


def evaluations(run: Path) -> list[tuple[int, float]]:
    return [(row["samples"], row["value"]) for row in read_lines(run / "evaluations.jsonl")]


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "timetrial", "train", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_bytes().splitlines()) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty steps without interruption."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = timetrial("train", "llama31_8b", "--out", run, "--max-steps", 40, *tiny())
    assert done.returncode == 0, done.stderr
    return run


def test_a_run_leaves_everything(undisturbed):
    names = {p.name for p in undisturbed.iterdir()}
    assert names >= {
        "config.json", "environment.json", "metrics.jsonl", "evaluations.jsonl", "result_0.txt", "result.json",
        "report.html", "checkpoints",
    }  # fmt: skip
    rows = read_lines(undisturbed / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["samples"] for row in rows] == list(range(4, 161, 4))
    for row in rows:
        assert row["loss"] > 0
        assert row["step_time_s"] > 0
        assert sum(row["phases"].values()) == pytest.approx(row["step_time_s"], rel=1e-3)
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["step_time_s"])
    assert [samples for samples, _ in evaluations(undisturbed)] == [40, 80, 120, 160]
    assert load(json.loads((undisturbed / "config.json").read_text())).max_steps == 40


def test_the_loss_starts_at_chance_and_falls(undisturbed):
    losses = [row[0] for row in curve(undisturbed)]
    assert losses[0] == pytest.approx(math.log(2048), abs=0.1)
    assert min(losses[-5:]) < losses[0] - 0.3


def test_a_mini_says_everywhere_that_it_is_no_mlperf_result(undisturbed):
    log = (undisturbed / "result_0.txt").read_text()
    page = (undisturbed / "report.html").read_text()
    result = json.loads((undisturbed / "result.json").read_text())
    assert "not an MLPerf result" in log
    assert "not an MLPerf result" in page
    assert result["mlperf_result"] is False
    assert "not an MLPerf result" in result["notice"]


def test_another_seed_is_another_run_and_the_same_seed_the_same(undisturbed, tmp_path):
    timetrial("train", "llama31_8b", "--out", tmp_path / "a", "--max-steps", 5, *tiny())
    timetrial("train", "llama31_8b", "--out", tmp_path / "b", "--max-steps", 5, "--seed", 2, *tiny())
    assert curve(tmp_path / "a") == curve(undisturbed)[:5]
    assert curve(tmp_path / "b")[0] != curve(undisturbed)[0]


@pytest.mark.parametrize("at", [3, 7, 22])
def test_kill_9_and_resume_is_bit_for_bit_the_undisturbed_run(undisturbed, tmp_path, at):
    run = tmp_path / "run"
    process = start("llama31_8b", "--out", run, "--max-steps", 40, *tiny())
    wait_for_step(run, at, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = timetrial("train", "llama31_8b", "--out", run, "--resume")
    assert done.returncode == 0, done.stderr
    assert curve(run) == curve(undisturbed)
    assert evaluations(run) == evaluations(undisturbed)
    assert_one_log(run)


def assert_one_log(run: Path) -> None:
    """A resumed run's log tells of one run, in order."""
    lines = (run / "result_0.txt").read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines if line.startswith(":::MLLOG ")]
    keys = [event["key"] for event in events]
    for once in ("init_start", "init_stop", "run_start", "run_stop", "seed"):
        assert keys.count(once) == 1, once
    points = [e["metadata"]["samples_count"] for e in events if e["key"] == "eval_accuracy"]
    assert points == sorted(set(points))


def test_an_altered_checkpoint_is_noticed_and_the_one_before_used(undisturbed, tmp_path):
    run = tmp_path / "run"
    process = start("llama31_8b", "--out", run, "--max-steps", 40, *tiny())
    wait_for_step(run, 18, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    newest = max(p for p in (run / "checkpoints").iterdir() if p.name.startswith("step-"))
    victim = max(newest.glob("*.distcp"), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    done = timetrial("train", "llama31_8b", "--out", run, "--resume")
    assert done.returncode == 0, done.stderr
    assert newest.name in done.stderr
    assert "damaged" in done.stderr
    assert curve(run) == curve(undisturbed)


def test_sigterm_saves_and_resume_goes_on(undisturbed, tmp_path):
    run = tmp_path / "run"
    process = start("llama31_8b", "--out", run, "--max-steps", 40, *tiny("checkpoint_every=0"))
    wait_for_step(run, 8, process)
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "stopped before the target" in stdout
    steps_done = len(curve(run))
    assert steps_done < 40
    done = timetrial("train", "llama31_8b", "--out", run, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"resuming at step {steps_done}" in done.stderr
    assert curve(run) == curve(undisturbed)


def test_a_broken_loss_stops_the_run_and_keeps_the_samples(tmp_path):
    run = tmp_path / "run"
    done = timetrial("train", "llama31_8b", "--out", run, "--max-steps", 40,
                     *tiny("optim.base_lr=1e30", "optim.end_lr=1e30"))  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    [failure] = run.glob("failure-step-*.json")
    record = json.loads(failure.read_text())
    assert f"step {record['step']}" in done.stderr
    assert len(record["sample_indices"]) == 4
    assert len(set(record["sample_indices"])) == 4
    assert len(curve(run)) == record["step"] - 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("llama31_8b", "--seed", 3), "configuration"),
        (("llama31_8b", "--plan", "gbs=8"), "gbs"),
        (("llama31_8b", "--plan", "precision=bf16"), "precision"),
        (("llama31_8b", "--max-steps", 40), "higher --max-steps"),
        (("llama31_8b", "--data", "elsewhere"), "--data"),
        (("llama31_405b",), "llama31_8b"),
    ],
)
def test_a_refused_resume_changes_nothing(undisturbed, words, says):
    before = {p: p.read_bytes() for p in undisturbed.iterdir() if p.is_file()}
    done = timetrial("train", *words, "--out", undisturbed, "--resume")
    assert done.returncode == 2
    assert says in done.stderr
    assert {p: p.read_bytes() for p in undisturbed.iterdir() if p.is_file()} == before


def test_a_finished_run_is_over(tmp_path):
    run = tmp_path / "run"
    done = timetrial("train", "llama31_8b", "--out", run, *tiny("evaluation.target=9"))
    assert done.returncode == 0, done.stderr
    assert "target reached" in done.stdout
    assert json.loads((run / "result.json").read_text())["status"] == "success"
    log = (run / "result_0.txt").read_bytes()
    again = timetrial("train", "llama31_8b", "--out", run, "--resume")
    assert again.returncode == 2
    assert "reached its target" in again.stderr
    assert (run / "result_0.txt").read_bytes() == log


@pytest.mark.parametrize(
    "wrong", ["optim.name=sgd", "optim.schedule=linear", "keep_checkpoints=0", "init.kind=base", "optim.base_lr=-1"]
)
def test_a_run_that_cannot_start_leaves_nothing(tmp_path, wrong):
    run = tmp_path / "run"
    done = timetrial("train", "llama31_8b", "--out", run, *tiny(wrong))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert not run.exists()


def test_sigterm_reaches_every_rank(tmp_path):
    run = tmp_path / "run"
    process = start("llama31_8b", "--nproc", 2, "--out", run, "--max-steps", 5000, *tiny())
    wait_for_step(run, 8, process)
    process.terminate()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "stopped before the target" in stdout
    assert (run / "checkpoints" / f"step-{len(curve(run)):08d}" / "manifest.json").exists()


def test_a_killed_rank_ends_the_job_in_one_line(tmp_path):
    run = tmp_path / "run"
    process = start("llama31_8b", "--nproc", 2, "--out", run, "--max-steps", 5000, *tiny())
    wait_for_step(run, 8, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert "rank" in next(line for line in stderr.splitlines() if line.startswith("error:"))
    assert timetrial("train", "llama31_8b", "--out", run, "--resume", "--max-steps", 60).returncode == 0


def test_a_run_goes_on_under_other_plans(undisturbed, tmp_path):
    """Data, tensor, pipeline parallel, shards on two of four ranks, one rank: the same curve within rounding."""
    run = tmp_path / "run"
    sets = tiny()
    one = tmp_path / "one"
    assert timetrial("train", "llama31_8b", "--out", one, "--max-steps", 25, *sets).returncode == 0
    first = timetrial("train", "llama31_8b", "--out", run, "--nproc", 2, "--max-steps", 5, *sets)
    assert first.returncode == 0, first.stderr
    for steps, plan in ((10, "tp=2"), (15, "pp=2"), (20, "dp=4,shard=2"), (25, "dp=1")):
        done = timetrial("train", "llama31_8b", "--out", run, "--resume", "--max-steps", steps, "--plan", plan)
        assert done.returncode == 0, done.stderr
        assert f"resuming at step {steps - 5}" in done.stderr
    assert [row[0] for row in curve(run)] == pytest.approx([row[0] for row in curve(one)], rel=1e-4)
    assert [row[3] for row in curve(run)] == [row[3] for row in curve(one)]


def test_a_run_killed_before_its_result_was_written_gets_it(undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    (run / "result.json").unlink()
    log = (run / "result_0.txt").read_text()
    done = timetrial("train", "llama31_8b", "--out", run, "--resume")
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "result.json").read_text())["steps"] == 40
    assert curve(run) == curve(undisturbed)
    assert len((run / "result_0.txt").read_text().splitlines()) == len(log.splitlines())
