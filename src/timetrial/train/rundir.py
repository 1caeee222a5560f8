"""The directory that a run leaves behind: which files, and who may write into it.

config.json, environment.json, metrics.jsonl, evaluations.jsonl, result_0.txt, result.json,
checkpoints/, adapters/ (LoRA) and report.html; `docs/how-it-works.md` has each file's fields.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from timetrial.config import RunConfig, dumps, load
from timetrial.errors import UserError
from timetrial.train.durable import writable_directory, write_atomic


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "result_0.txt"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def report(self) -> Path:
        return self.path / "report.html"


def default_path(config: RunConfig) -> Path:
    """runs/<workload>-<preset>-<UTC time>, under the working directory."""
    return Path("runs") / f"{config.workload}-{config.preset}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def create(path: Path, config: RunConfig) -> RunDir:
    """A new run directory holding config.json. Raises UserError when there is a run already."""
    run = RunDir(path)
    # a run killed while it wrote config.json leaves that file's temporary behind, and nothing else
    if path.is_dir() and any(entry.name != ".config.json.tmp" for entry in path.iterdir()):
        hint = "add --resume to go on with it, or choose another --out"
        raise UserError(f"--out {path}: is not empty; {hint if run.config.exists() else 'choose another --out'}")
    writable_directory(path)
    write_atomic(run.config, dumps(config))
    return run


def reopen(path: Path) -> tuple[RunDir, RunConfig]:
    """The run directory of an earlier run and its configuration. Raises UserError when there is none."""
    run = RunDir(path)
    if not run.config.exists():
        raise UserError(f"{path}: holds no run (no config.json); `timetrial train` makes one")
    try:
        return run, load(json.loads(run.config.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{run.config}: is damaged ({error}); start a new run in another --out") from None


def refuse_finished(run: RunDir) -> None:
    """Raise UserError where the run has met or missed its target: there is nothing to go on with."""
    try:
        status = json.loads(run.result.read_text())["status"] if run.result.exists() else None
    except (json.JSONDecodeError, KeyError, TypeError):
        return  # damaged; it is written anew at the end
    if status in ("success", "aborted"):
        how = "reached its target" if status == "success" else "used up its samples"
        raise UserError(f"--resume: the run in {run.path} {how} and is over; start another with a new --out")


def discard(run: RunDir) -> None:
    """Take away what `create` and the start of a run wrote, when it turned out that it cannot start."""
    if run.metrics.exists() and run.metrics.stat().st_size:
        return
    for name in (run.config, run.environment, run.log, run.metrics, run.evaluations, run.checkpoints / ".lock"):
        name.unlink(missing_ok=True)
    for directory in (run.checkpoints, run.path):
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
