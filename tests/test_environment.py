"""The record of what a run ran on, and the rate that its MFU is measured against."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from timetrial import __version__
from timetrial.train import environment, peak

# ---- the record ----------------------------------------------------------------------------------


def test_the_record_names_versions_machine_and_command() -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    found = environment.record(4, "timetrial train llama31_8b --preset mini")
    assert found["command"] == "timetrial train llama31_8b --preset mini"
    assert found["world_size"] == 4
    assert found["date"].endswith("Z")
    assert before <= datetime.fromisoformat(found["date"]) <= datetime.now(UTC)
    assert found["versions"]["timetrial"] == __version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["versions"]["torch"] == torch.__version__
    for name in ("numpy", "tokenizers", "mlperf-logging"):
        assert found["versions"][name] == importlib.metadata.version(name)
    processor = found["processor"]
    assert processor["threads_per_rank"] == torch.get_num_threads()
    assert processor["cores_in_machine"] == os.cpu_count()
    assert processor["cores_used"] == min(4 * torch.get_num_threads(), processor["cores_available"])
    assert processor["architecture"] == platform.machine()
    assert processor["name"]
    assert platform.system() in found["os"]
    assert sum(device["count"] for device in found["accelerators"]) == torch.cuda.device_count()


def test_memory_is_what_the_kernel_says() -> None:
    info = Path("/proc/meminfo")
    if not info.exists():
        pytest.skip("no /proc/meminfo: not Linux")
    total = int(re.search(r"MemTotal: +(\d+) kB", info.read_text())[1]) * 1024  # type: ignore[index]
    found = environment.record(1, "x")["memory_bytes"]
    assert 0 < found <= total


def test_the_record_is_json_and_names_neither_machine_nor_user() -> None:
    text = json.dumps(environment.record(1, "x"))
    assert json.loads(text) == json.loads(json.dumps(json.loads(text)))
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text
    values = set(re.split(r"[^\w.-]+", text))
    # a name that is also a word of the record, such as linux, gives nothing away
    known = set(re.split(r"[^\w.-]+", f"{platform.platform()} {platform.machine()}"))
    assert not values & ({socket.gethostname(), getpass.getuser()} - known)


def test_a_command_in_words_is_quoted_to_run_again() -> None:
    found = environment.record(1, ["timetrial", "train", "--set", "data.path=/a b", "--out", "it's"])
    split = subprocess.run(
        ["sh", "-c", f'set -- {found["command"]}; printf "%s\\n" "$@"'], capture_output=True, text=True, check=True
    )
    assert split.stdout.splitlines() == ["timetrial", "train", "--set", "data.path=/a b", "--out", "it's"]


def test_a_version_that_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "mlperf-logging":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert environment.record(1, "x")["versions"]["mlperf-logging"] is None


def test_the_module_loads_without_torch() -> None:
    code = "import sys, timetrial.train.environment; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
        ({}, 8),
    ],
)
def test_a_containers_quota_cuts_the_cores(
    files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(environment, "_read", files.get)
    assert environment.cores_available() == expected


# ---- the git revision ----------------------------------------------------------------------------


def git(where: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.invalid", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-C", str(where), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package directory in a git checkout of its own, committed."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    package = tmp_path / "checkout" / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    git(tmp_path, "init", "--quiet", "checkout")
    git(package, "add", ".")
    git(package, "commit", "--quiet", "-m", "first")
    return package


def test_a_checkout_gives_its_commit(package: Path) -> None:
    assert environment.revision(package) == {"git": git(package, "rev-parse", "HEAD"), "dirty": False}


def test_changes_and_new_files_in_the_package_make_it_dirty(package: Path) -> None:
    (package.parent / "notes.txt").write_text("beside the package, so no part of what ran")
    assert environment.revision(package)["dirty"] is False
    (package / "new.py").write_text("")
    assert environment.revision(package)["dirty"] is True
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("x = 2\n")
    assert environment.revision(package) == {"git": git(package, "rev-parse", "HEAD"), "dirty": True}


def test_a_package_inside_somebody_elses_checkout_has_no_revision(package: Path) -> None:
    installed = package.parent / "site-packages" / "timetrial"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert environment.revision(installed) == {"git": None, "dirty": None}


def test_no_checkout_and_no_git_are_no_failure(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.revision(tmp_path) == {"git": None, "dirty": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.revision(package) == {"git": None, "dirty": None}


# ---- the matrix-multiply rate --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_is_measured_and_nothing_else_changed(dtype: torch.dtype) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    rate = peak.matmul_flops_per_s("cpu", dtype, threads + 1)
    assert math.isfinite(rate)
    assert rate > 1e6
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("seconds", "n", "median"),
    [
        # 107 GFLOP/s at 1024 beats 34 and 90; four products of 2048 would take longer than the time left
        ({256: [1e-3, 9.0, 1e-3], 512: [4e-3, 2e-3, 3e-3], 1024: [2e-2, 3e-2, 2e-2]}, 1024, 2e-2),
        # a busy machine: 256 is all waiting, and still the larger ones are tried
        ({256: [8e-3, 9e-3, 8e-3], 512: [8e-3, 8e-3, 9e-3], 1024: [3e-2, 3e-2, 2e-1]}, 1024, 3e-2),
        # a slow machine: four products of 1024 would take six seconds
        ({256: [3e-2, 3e-2, 3e-2], 512: [2e-1, 2e-1, 3e-1]}, 512, 2e-1),
    ],
    ids=["usual", "busy", "slow"],
)
def test_the_rate_is_the_best_median(
    seconds: dict[int, list[float]], n: int, median: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def timed(n: int, device: torch.device, dtype: torch.dtype, budget_s: float) -> list[float]:
        asked.append(n)
        return seconds[n]

    monkeypatch.setattr(peak, "_time_products", timed)
    rate = peak.matmul_flops_per_s(torch.device("cpu"), torch.float32, torch.get_num_threads())
    assert rate == 2 * n**3 / median
    assert asked == [256, *seconds]  # the first to warm up


def test_every_timed_product_is_really_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = torch.mm

    def counted(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        made.append((a.dtype, a.shape, b.shape, bool((a != 0).all())))
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    times = peak._time_products(64, torch.device("cpu"), torch.bfloat16, 0.0)
    assert len(times) == peak.FEWEST
    assert made == [(torch.bfloat16, (64, 64), (64, 64), True)] * (peak.FEWEST + 1)  # one of them to warm up
