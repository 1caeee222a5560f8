"""The peers' own Python environments: each made once in a directory, with pinned versions."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

TORCH = "torch==2.13.0"
"""Installed first and by itself: beside others, a resolver may take a larger build of it."""
PACKAGES = (
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "torchtitan==0.3.0",
    "torchao==0.18.0",
    "triton==3.9.0",  # TorchTitan imports it on any machine
    "torchdata==0.11.0",
    "torch_checkpointing==0.1.1",
    "spmd_types==0.2.3",
    "datasets==4.7.0",
    "tokenizers==0.23.3",
    "safetensors==0.8.0",
    "huggingface_hub==1.33.0",
    "numpy==2.4.6",
)


def python(directory: Path) -> Path:
    """The environment's interpreter; makes the environment, or finishes it, when it is not there as pinned.

    Takes minutes and about 3 GB. Raises SystemExit when pip fails.
    """
    directory = directory.absolute()
    interpreter, done = directory / "bin" / "python", directory / "installed.txt"
    wanted = "\n".join((TORCH, *PACKAGES)) + "\n"
    if done.exists() and done.read_text() == wanted:
        return interpreter
    print(f"making the peers' environment in {directory}: takes minutes", file=sys.stderr, flush=True)
    constraints = directory / "constraints.txt"
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "venv", str(directory)])
    constraints.write_text(TORCH + "\n")
    _run([*pip, TORCH])
    _run([*pip, "--constraint", str(constraints), *PACKAGES])
    done.write_text(wanted)
    return interpreter


def small(directory: Path, packages: Sequence[str], sources: Sequence[str] = ()) -> Path:
    """The interpreter of an environment with `packages` and nothing that they ask for beside, made when not there.

    `sources` are unpacked into `directory`/sources and not built. Says what it does and how long that takes.
    Raises SystemExit when pip fails.
    """
    directory = directory.absolute()
    interpreter, done = directory / "bin" / "python", directory / "installed.txt"
    wanted = "\n".join((*packages, *sources)) + "\n"
    if done.exists() and done.read_text() == wanted:
        return interpreter
    began = time.monotonic()
    print(f"making {directory.name}'s environment: {' '.join((*packages, *sources))}", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", str(directory)])
    pip = [str(interpreter), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "install", "--no-deps", *packages])
    for name in sources:
        _run(
            [
                *pip,
                "download",
                "--no-deps",
                "--no-binary",
                name.split("==")[0],
                "--dest",
                str(directory / "sources"),
                name,
            ]
        )
    for archive in (directory / "sources").glob("*.tar.gz"):
        with tarfile.open(archive) as file:
            file.extractall(directory / "sources", filter="data")
    done.write_text(wanted)
    print(f"made after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return interpreter


def _run(command: list[str]) -> None:
    if subprocess.run(command).returncode:
        raise SystemExit(f"error: failed: {' '.join(command)}; run it by hand, or choose another --env")
