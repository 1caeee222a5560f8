"""What a run ran on: versions, processor, memory, accelerators, revision, command, date.

Every reported number carries this record (`environment.json`), so that a reader can tell whether
two numbers may be compared. It names hardware and software, never the machine or its user: no host
name, no login, no path. The command is the one exception, kept as typed, since it must run again.

Why not `torch.utils.collect_env`: it takes seconds, shells out to a dozen tools, prints text for
bug reports and includes paths.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timetrial

PACKAGES = ("torch", "numpy", "tokenizers", "mlperf-logging")


def record(world_size: int, command: str | Sequence[str]) -> dict[str, Any]:
    """Everything `environment.json` holds, as plain JSON values; sizes in bytes.

    `command` is the command line that started the run, as text or as its words. Imports torch for
    the thread count and the accelerators. What cannot be found out is None, never a guess.
    """
    processor = _processor()
    processor["cores_used"] = min(world_size * processor["threads_per_rank"], processor["cores_available"])
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "command": command if isinstance(command, str) else shlex.join(command),
        "world_size": world_size,
        "versions": _versions(),
        "revision": revision(Path(__file__).parent.parent),
        "processor": processor,
        "memory_bytes": _memory_bytes(),
        "accelerators": _accelerators(),
        "os": _os(),
    }


def revision(package: Path) -> dict[str, Any]:
    """The git commit that the package's directory belongs to: {"git": 40 hex digits, "dirty": bool}.

    Dirty means that files of the package differ from that commit or are not in it. Both are None
    when the package does not run from a checkout of its own (an installed wheel, even one inside
    somebody else's repository) or when there is no git.
    """
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(package, "rev-parse", "HEAD") if tracked is not None else None
    if commit is None:
        return {"git": None, "dirty": None}
    changes = _git(package, "status", "--porcelain", "--", ".")
    return {"git": commit, "dirty": None if changes is None else bool(changes)}


def _git(where: Path, *arguments: str) -> str | None:
    # without optional locks: a report on the run must not hold up a commit in the same checkout
    words = ["git", "--no-optional-locks", "-C", str(where), *arguments]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str | None]:
    import torch

    versions: dict[str, str | None] = {"timetrial": timetrial.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["torch"] = str(torch.__version__)  # carries the build, such as +cpu; the metadata may not
    if torch.cuda.is_available():
        untyped: Any = torch
        versions["cuda"] = untyped.version.cuda
        versions["cudnn"] = str(untyped.backends.cudnn.version())
        versions["nccl"] = ".".join(map(str, untyped.cuda.nccl.version()))
    return versions


def _processor() -> dict[str, Any]:
    import torch

    return {
        "name": _processor_name(),
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores_in_machine": os.cpu_count(),
        "cores_available": cores_available(),
        "threads_per_rank": torch.get_num_threads(),
    }


def _processor_name() -> str:
    """The name that the processor gives itself, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    except OSError:
        pass  # not Linux
    if platform.system() == "Darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if done.stdout.strip():
            return done.stdout.strip()
    return platform.processor() or platform.machine()


def cores_available() -> int:
    """Logical cores that this process may use: its affinity, cut by the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, period = None, None
    if limits := _read("/sys/fs/cgroup/cpu.max"):  # cgroup v2: "200000 100000" or "max 100000"
        quota, _, period = limits.partition(" ")
    elif quota := _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):  # v1: -1 for no limit
        period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota and quota.isdigit() and period and period.isdigit() and int(period) > 0:
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _memory_bytes() -> int | None:
    """Memory that the run may use: the machine's, cut by the container's limit."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return min(total, int(limit)) if limit and limit.isdigit() else total


def _accelerators() -> list[dict[str, Any]]:
    """One entry per kind of CUDA device that this process sees."""
    import torch

    found: dict[tuple[str, int], int] = {}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        key = (device.name, device.total_memory)
        found[key] = found.get(key, 0) + 1
    return [{"name": name, "count": count, "memory_bytes": size} for (name, size), count in found.items()]


def _os() -> str:
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']} ({kernel})"
    except (OSError, KeyError):
        return kernel


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
