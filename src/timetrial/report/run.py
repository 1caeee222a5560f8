"""A run directory, read and checked: what the page is made from.

    config.json, environment.json   must be there: what was run, and on what
    metrics.jsonl                   one object per optimizer step; at least one
    evaluations.jsonl               one object per evaluation; absent before the first
    result.json                     absent when the run was killed or is still going

A run may be killed at any byte, so a last line without its end is left out and said so; anything
else that cannot be read is an error that names the file, the line and the field. Non-finite numbers
are values here, not errors: a diverged run is what one most wants to look at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from timetrial import config
from timetrial.errors import UserError

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint", "other")

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Steps:
    """Per-step columns, each of shape [steps], in step order; NaN where a value was not recorded."""

    step: Array
    loss: Array
    samples: Array
    """Training samples consumed after the step."""
    step_time_s: Array
    lr: Array
    grad_norm: Array
    tokens_per_s: Array
    mfu: Array
    elapsed_s: Array
    """Seconds since the start of the run."""
    phases: Mapping[str, Array]
    """Seconds of each of PHASES."""

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on the held-out set."""

    step: int
    samples: int
    value: float
    reached: bool
    duration_s: float
    elapsed_s: float


@dataclass(frozen=True)
class Run:
    """Everything that a run directory says."""

    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: Steps
    evaluations: tuple[Evaluation, ...]
    result: Mapping[str, Any] | None
    """None for a run without a result: killed, or still going."""
    n_params: int | None = None
    """Elements of the model; None when this version does not know the model's configuration."""
    remarks: tuple[str, ...] = field(default=())
    """What a reader of the page should know about the files."""

    @property
    def metric(self) -> str:
        return str(self.config["evaluation"]["metric"])

    @property
    def target(self) -> float:
        return float(self.config["evaluation"]["target"])

    @property
    def comparable(self) -> bool:
        """Whether the quality metric is on the training loss's own scale."""
        return "loss" in self.metric.lower() or "perplexity" in self.metric.lower()

    @property
    def lost_steps(self) -> int:
        """Steps whose loss was not finite."""
        return int((~np.isfinite(self.steps.loss)).sum())

    @property
    def mini(self) -> bool:
        return str(self.config["preset"]) == "mini"


def read(run_dir: Path) -> Run:
    """The run in `run_dir`. Raises UserError with one line when it is none, or cannot be read."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory; give one that `timetrial train` made")
    settings = _settings(run_dir / "config.json")
    environment = _object(run_dir / "environment.json")
    rows, torn = _lines(run_dir / "metrics.jsonl")
    if not rows:
        raise UserError(f"{run_dir / 'metrics.jsonl'}: no step recorded; the run ended before its first one")
    steps, repeated = _steps(run_dir / "metrics.jsonl", rows)
    evaluations: tuple[Evaluation, ...] = ()
    if (run_dir / "evaluations.jsonl").exists():
        found, torn_too = _lines(run_dir / "evaluations.jsonl")
        evaluations = _evaluations(run_dir / "evaluations.jsonl", found)
        torn = torn or torn_too
    result = _result(run_dir / "result.json") if (run_dir / "result.json").exists() else None
    remarks = []
    if torn:
        remarks.append("A last line that was cut off while being written is left out.")
    if repeated:
        remarks.append(f"{repeated:,} steps were recorded twice, as a resumed run does; the later record counts.")
    return Run(settings, environment, steps, evaluations, result, _n_params(settings), tuple(remarks))


def number(value: Any) -> float:
    """A JSON number as float; NaN for null and for the texts that stand for non-finite numbers."""
    if value is None:
        return math.nan
    if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        raise TypeError from None


def clock(run: Run) -> Array:
    """Seconds since the start at the end of each step, [steps]; never going back.

    A resumed run may have started its clock again: then the time spent in steps stands in.
    """
    elapsed = run.steps.elapsed_s
    if np.isfinite(elapsed).all() and (np.diff(elapsed) >= 0).all():
        return elapsed
    return np.cumsum(run.steps.step_time_s)


def phase_columns(run: Run) -> dict[str, Array] | None:
    """Seconds of each phase, [steps], adding up to the step time; None when no phase was recorded.

    Time that no phase accounts for goes to `other`.
    """
    if not any(np.isfinite(column).any() for column in run.steps.phases.values()):
        return None
    columns = {name: np.nan_to_num(run.steps.phases[name]) for name in PHASES}
    columns["other"] = columns["other"] + np.maximum(0.0, run.steps.step_time_s - sum(columns.values()))
    return columns


# ---- files ---------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {path.parent} is not a complete run directory") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; the file is damaged") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}: not JSON{where}; the file is damaged") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object; the file is damaged")
    return value


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The objects of a .jsonl file, and whether its last line was cut off."""
    text = _text(path)
    rows: list[dict[str, Any]] = []
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            if index == len(lines) - 1:  # no newline after it: the writer was killed
                return rows, True
            raise UserError(f"{path} line {index + 1}: not JSON; the file is damaged") from None
        if not isinstance(value, dict):
            raise UserError(f"{path} line {index + 1}: holds no JSON object; the file is damaged")
        rows.append(value)
    return rows, False


# ---- what is in them -----------------------------------------------------------------------------


def _settings(path: Path) -> dict[str, Any]:
    values = _object(path)
    for key in ("workload", "preset", "round"):
        if not isinstance(values.get(key), str):
            raise UserError(f"{path}: has no {key}; it is not the configuration of a run")
    for key in ("evaluation", "plan", "optim", "data", "model"):
        if not isinstance(values.get(key), dict):
            raise UserError(f"{path}: has no group {key}; it is not the configuration of a run")
    evaluation = values["evaluation"]
    if not isinstance(evaluation.get("metric"), str):
        raise UserError(f"{path}: evaluation.metric is missing")
    _number(path, evaluation, "target", "evaluation.target")
    return values


def _n_params(settings: Mapping[str, Any]) -> int | None:
    try:
        return int(config.load(dict(settings)).model.n_params())
    except (UserError, ImportError, AttributeError, TypeError, ValueError, ArithmeticError):
        return None  # written by another version: the page leaves the count out


def _result(path: Path) -> dict[str, Any]:
    values = _object(path)
    if values.get("status") not in ("success", "aborted", "stopped"):
        raise UserError(f"{path}: status is {values.get('status')!r}, not success, aborted or stopped")
    keys = ("value", "steps", "samples", "time_to_train_s", "tokens_per_s", "step_time_s", "mfu")
    for key in (*keys, "matmul_flops_per_s", "data_wait_share"):
        values[key] = _number(path, values, key)
    return values


def _steps(path: Path, rows: list[dict[str, Any]]) -> tuple[Steps, int]:
    by_step: dict[float, tuple[int, dict[str, Any]]] = {}
    for line, row in enumerate(rows, start=1):
        step = _number(path, row, "step", line=line)
        if not math.isfinite(step):
            raise UserError(f"{path} line {line}: step is not a number")
        by_step[step] = (line, row)
    ordered = [by_step[step] for step in sorted(by_step)]

    phases: dict[str, Array] = {}
    spent = [(line, row.get("phases") or {}) for line, row in ordered]
    for line, value in spent:
        if not isinstance(value, dict):
            raise UserError(f"{path} line {line}: phases is no JSON object; the file is damaged")
    for name in PHASES:
        phases[name] = _column(path, spent, name, f"phases.{name}")
    columns = ("step", "loss", "samples", "step_time_s", "lr", "grad_norm", "tokens_per_s", "mfu", "elapsed_s")
    steps = Steps(**{key: _column(path, ordered, key, key) for key in columns}, phases=phases)
    for key in ("samples", "step_time_s"):
        bad = np.flatnonzero(~np.isfinite(getattr(steps, key)))
        if len(bad):
            raise UserError(f"{path} line {ordered[bad[0]][0]}: {key} is not a number")
    return steps, len(rows) - len(ordered)


def _evaluations(path: Path, rows: list[dict[str, Any]]) -> tuple[Evaluation, ...]:
    by_step: dict[int, Evaluation] = {}
    for line, row in enumerate(rows, start=1):
        values = {key: _number(path, row, key, line=line) for key in ("step", "samples", "value", "duration_s")}
        for key in ("step", "samples"):
            if not math.isfinite(values[key]):
                raise UserError(f"{path} line {line}: {key} is not a number")
        step = int(values["step"])
        by_step[step] = Evaluation(
            step=step,
            samples=int(values["samples"]),
            value=values["value"],
            reached=bool(row.get("reached")),
            duration_s=values["duration_s"],
            elapsed_s=_number(path, row, "elapsed_s", line=line),
        )
    return tuple(by_step[step] for step in sorted(by_step))


def _column(path: Path, rows: list[tuple[int, dict[str, Any]]], key: str, name: str) -> Array:
    """The numbers under `key` in (line, object) pairs, [rows]."""
    values = [row.get(key) for _, row in rows]
    if set(map(type, values)) == {float}:  # the usual case, and much the faster one
        return np.array(values)
    return np.array([_number(path, row, key, name, line) for line, row in rows])


def _number(path: Path, row: Mapping[str, Any], key: str, name: str = "", line: int = 0) -> float:
    try:
        return number(row.get(key))
    except TypeError:
        where = f"{path} line {line}" if line else str(path)
        raise UserError(f"{where}: {name or key} is {str(row[key])[:40]!r}, not a number") from None
