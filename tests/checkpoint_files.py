"""Checkpoints for the tests: made by workers in processes of their own, filled, restored and read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from timetrial.train.checkpoint import Checkpointer, Restored

WORKER = Path(__file__).with_name("checkpoint_worker.py")


def worker(root: Path, jobs: list[list[Any]], ranks: int = 1) -> list[list[dict[str, Any]]]:
    """What each rank of a worker process printed: one result for each job."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(WORKER), json.dumps(jobs, default=str)]
    places = [[str(rank), str(ranks), str(root / "rendezvous")] if ranks > 1 else [] for rank in range(ranks)]
    processes = [
        subprocess.Popen([*command, *place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for place in places
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(text) for text, _ in outputs]


def filled(directory: Path, steps: tuple[int, ...] = (1, 2, 3), keep: int = 3) -> None:
    """A directory with small checkpoints whose tensor is their step."""
    with Checkpointer(directory, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"model": {"w": torch.full((1000,), float(step))}}, {"samples": step * 8})


def restore(directory: Path) -> tuple[int, list[str], Tensor]:
    state = {"model": {"w": torch.zeros(1000)}}
    with Checkpointer(directory, keep=3) as checkpoints:
        restored = checkpoints.restore_newest(state)
    assert restored is not None
    assert restored.extra == {"samples": restored.step * 8}
    return restored.step, restored.skipped, state["model"]["w"]


def read(directory: Path) -> Restored:
    """What a reader finds; it leaves no trace."""
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    with Checkpointer(directory, read_only=True) as checkpoints:
        restored = checkpoints.restore_newest({"model": {"w": torch.zeros(1000)}})
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    assert restored is not None
    return restored
