"""What several tests need: the published facts beside the checkout, and small runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# a small model on few tokens: a step takes milliseconds
TINY = (
    "model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=64",
    "data.seq_len=32", "plan.gbs=4", "plan.mbs=4", "evaluation.every_samples=40", "evaluation.samples=8",
    "checkpoint_every=5", "threads=1",  # runs that are compared must not choose by how busy the machine is
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches are made anew, and the user's are not touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    """Tests share a small machine with each other's ranks."""
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture
def shared() -> Path:
    """The directory of published facts and logs; tests on it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the published facts (../shared) are not beside this checkout")
    return SHARED


def tiny(*more: str) -> list[str]:
    """--set options of a run whose steps take milliseconds."""
    return [word for setting in (*TINY, *more) for word in ("--set", setting)]


def timetrial(*words: object, cwd: Path | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would; no check of its exit code."""
    command = [sys.executable, "-m", "timetrial", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd)
