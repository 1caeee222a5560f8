"""Bases: the short pretraining that some minis start from, made once and kept.

The official workload starts from a checkpoint that somebody else pretrained; its mini must make its
own. A base is keyed by its whole configuration and this package's version, so that a changed recipe makes a new one.
It lies in the user's cache as Hugging Face safetensors, next to the run that made it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from timetrial import __version__
from timetrial.config import RunConfig, dumps, replace
from timetrial.errors import RunFailed, UserError
from timetrial.train.launch import LAUNCHER_VARIABLES, launched
from timetrial.workloads.workload import find


def cache_dir() -> Path:
    """Where this user keeps caches: $XDG_CACHE_HOME/timetrial, by default ~/.cache/timetrial."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "timetrial"


def base_config(config: RunConfig) -> RunConfig:
    """The pretraining that `config.init` asks for. Raises UserError when the workload has none."""
    workload = find(config.init.base or config.workload)
    if workload.mini_base is None:
        raise UserError(f"init.base: {workload.name} defines no base; use init.kind=hf with init.path")
    return replace(workload.mini_base(), threads=1)  # the same base however busy the machine is


def base_path(config: RunConfig) -> Path:
    """Where the base of `config` lies, made or not."""
    key = hashlib.sha256(f"{__version__}\n{dumps(base_config(config))}".encode()).hexdigest()[:16]
    return cache_dir() / "bases" / f"{config.workload}-{key}"


def find_base(config: RunConfig) -> Path | None:
    """The finished base of `config`, or None when it is yet to be made."""
    path = base_path(config)
    return path / "weights" if (path / "weights").is_dir() else None


def make_base(config: RunConfig) -> Path:
    """Pretrain the base of `config` unless it is there; its weights' directory.

    Ranks of a job leave that to a process of its own, one a node, and wait for it.
    """
    done = find_base(config)
    if done is None and launched() and torch.distributed.is_initialized():
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _make_in_own_process(config)
        torch.distributed.barrier()
        done = find_base(config)
        if done is None:
            raise RunFailed(f"the base of {config.workload} could not be made; run `timetrial base {config.workload}`")
    return done or _make_here(config)


def _make_in_own_process(config: RunConfig) -> None:
    """`timetrial base` without the launcher's variables, so that it is a run of one process."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    subprocess.run([sys.executable, "-m", "timetrial", "base", config.workload], env=environment, check=False)


def _make_here(config: RunConfig) -> Path:
    from timetrial.train.run import train_run

    path = base_path(config)
    print(f"{config.workload}: pretraining its base first; it is kept in {path}", file=sys.stderr)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        command = f"base of {config.workload}"
        result = train_run(base_config(config), work / "run", resume=False, command=command, export=work / "weights")
        if result["status"] == "aborted":
            raise RunFailed(f"the base of {config.workload} missed its target: {result['value']:.4f}")
        if result["status"] != "success":
            raise RunFailed(f"the base of {config.workload} was stopped before it was done; run the command again")
        try:
            work.rename(path)
        except OSError:  # another process was faster; its base is the same
            if find_base(config) is None:
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path / "weights"


def check_init(config: RunConfig) -> None:
    """Refuse a start that cannot be, before anything is trained or written."""
    init = config.init
    if init.kind == "base" and base_config(config).model != config.model:
        raise UserError(f"init.kind=base: the base of {config.workload} has another shape; use init.kind=random or hf")
    if init.kind == "hf":
        if init.path is None:
            raise UserError("init.kind=hf: give a directory of Hugging Face safetensors with --set init.path=DIR")
        if not Path(init.path).is_dir():
            raise UserError(f"init.path={init.path}: no such directory; it must hold Hugging Face safetensors")
    if init.kind not in ("random", "base", "hf"):
        raise UserError(f"init.kind={init.kind}: unknown; use random, base or hf")


def initial_weights(config: RunConfig) -> Path | None:
    """The directory of the weights that the run starts from, or None for random ones; makes a base if need be."""
    check_init(config)
    if config.init.kind == "base":
        return make_base(config)
    return Path(config.init.path) if config.init.path is not None and config.init.kind == "hf" else None
