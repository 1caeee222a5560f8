"""Ranks that die or hang, as real processes: the job ends, and says which rank and in which collective."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conftest import tiny
from timetrial.train import launch
from timetrial.train.watchdog import RESUME

WORKER = Path(__file__).with_name("fault_worker.py")
LAST = r"last in all_reduce #(\d+) of ranks 0-1 \(step (\d+)\)"


def job(how: str, culprit: int, take: signal.Signals | None, where: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a job of two workers says; `take` goes to the culprit once all have trained a little."""
    monkeypatch.chdir(where)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    watcher = threading.Thread(target=send_when_ready, args=(where, culprit, take), daemon=True)
    if take is not None:
        watcher.start()
    code, message, _ = launch.start_once(2, [sys.executable, str(WORKER), how, str(culprit)])
    assert code == 1
    assert message is not None
    assert "\n" not in message
    return message


def send_when_ready(where: Path, culprit: int, take: signal.Signals) -> None:
    while not all((where / f"ready-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.02)
    time.sleep(0.5)
    for pid in children(os.getpid()):
        if variables(pid).get("RANK") == str(culprit):
            os.kill(pid, take)


def children(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def variables(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return {}
    return dict(pair.partition("=")[::2] for pair in text.split("\0"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_with_its_last_collective(rank, tmp_path, monkeypatch):
    said = job("train", rank, signal.SIGKILL, tmp_path, monkeypatch)
    found = re.fullmatch(rf"rank {rank} was killed by signal 9, {LAST}; --resume goes on .*", said)
    assert found, said
    assert int(found[1]) >= 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_job(rank, tmp_path, monkeypatch):
    said = job("train", rank, signal.SIGSTOP, tmp_path, monkeypatch)
    assert re.match(rf"rank {rank} hangs: no sign of life for \d+ s, {LAST}; ended after --timeout 5 s", said), said


@pytest.mark.parametrize(
    ("how", "others"),
    [
        ("sleep", r"while rank 0 waits in all_reduce #4 of ranks 0-1"),
        ("busy", r"while rank 0 waits in all_reduce #4 of ranks 0-1"),
        ("background", r"while rank 0 waits in all_reduce #4 of ranks 0-1"),
        ("message", r"while rank 0 waits for "),
    ],
)
def test_a_rank_that_is_stuck_in_its_own_code_is_named(how, others, tmp_path, monkeypatch):
    said = job(how, 1, None, tmp_path, monkeypatch)
    last = r"last in all_reduce #3 of ranks 0-1 \(step 3\)"
    assert re.match(rf"rank 1 hangs for \d+ s, {last} {others}", said), said


def test_ranks_in_different_collectives_wait_for_one_another(tmp_path, monkeypatch):
    said = job("order", 1, None, tmp_path, monkeypatch)
    assert re.match(r"the ranks wait for one another for \d+ s: ", said), said
    assert "rank 0 in barrier #4 of ranks 0-1" in said
    assert "rank 1 in barrier #1 of ranks 0-1" in said


def test_a_rank_that_stops_when_all_is_done_is_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, str(WORKER), "end", "1"]
    code, message, again = launch.start_once(2, command, timeout_s=1.0)
    assert (code, message, again) == (1, "rank 1 did not end with the others; " + RESUME, True)


def test_a_rank_that_fails_by_itself_is_the_one_that_is_named(tmp_path, monkeypatch):
    said = job("raise", 1, None, tmp_path, monkeypatch)
    assert said.startswith("rank 1 ended with exit code 1: ValueError: a rank's own mistake"), said


# ---- starting again ------------------------------------------------------------------------------


def words(out: Path) -> list[str]:
    more = ("evaluation.target=0.01", "evaluation.max_samples=400")
    return ["train", "llama31_8b", "--out", str(out), "--threads", "1", "--max-steps", "30", *tiny(*more)]


def losses(out: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def events(out: Path) -> list[tuple[str, object]]:
    lines = (line.partition(":::MLLOG ")[2] for line in (out / "result_0.txt").read_text().splitlines())
    return [(event["key"], event["value"]) for event in (json.loads(line) for line in lines if line)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run([sys.executable, "-m", "timetrial", *words(out), "--nproc", "2"], check=True, capture_output=True)
    return out


@pytest.mark.parametrize("launcher", ["torchrun", "timetrial"])
def test_a_job_whose_rank_was_killed_goes_on_by_itself(launcher, undisturbed, tmp_path):
    out = tmp_path / "run"
    starts = {
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "timetrial", *words(out)),
        ],
        "timetrial": [sys.executable, "-m", "timetrial", *words(out), "--nproc", "2", "--restarts", "2"],
    }
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(starts[launcher], stdout=said, stderr=said)
        while process.poll() is None and not list((out / "checkpoints").glob("step-*")):
            time.sleep(0.005)
        for pid in children(process.pid):
            if variables(pid).get("RANK") == "1":
                os.kill(pid, signal.SIGKILL)
        code = process.wait(120)
    text = (tmp_path / "said").read_text()
    assert code == 0, text
    assert "resuming at step" in text, text
    assert json.loads((out / "result.json").read_text())["resumed"] == 1
    assert losses(out) == losses(undisturbed)
    assert events(out) == events(undisturbed)


def test_a_requeued_slurm_job_goes_on_and_one_that_is_over_stays_so(tmp_path):
    out = tmp_path / "run"
    environment = {**os.environ, "SLURM_RESTART_COUNT": "1"}
    command = [sys.executable, "-m", "timetrial", *words(out)]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr  # there was no run yet
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert [step for step, *_ in losses(out)] == list(range(1, 31))
    other = subprocess.run(
        [*command, "--set", "optim.base_lr=0.5"], env=environment, capture_output=True, text=True, check=False
    )
    assert other.returncode == 2
    assert "optim.base_lr" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1
