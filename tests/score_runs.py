"""Small result logs for tests of reader, tree and score: made, written and read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
LOGS = SHARED / "logs"
PUBLISHED = SHARED / "facts" / "published_results.csv"

needs_logs = pytest.mark.skipif(not LOGS.is_dir(), reason="no published logs beside the repository")

START = 1_760_000_000_000


def line(key: str, value: Any = None, at: int = 0, kind: str = "POINT_IN_TIME", **metadata: Any) -> str:
    event = {"namespace": "", "time_ms": START + at, "event_type": kind, "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**event, "metadata": {"file": "train.py", "lineno": 1, **metadata}})


def run_lines(
    minutes: float = 60.0,
    samples: Sequence[float] = (12288, 24576),
    benchmark: str = "llama31_8b",
    gbs: int = 32,
    status: str | None = "success",
    seed: int = 1,
    offset: int = 0,
    position: str = "samples_count",
    values: Sequence[float] | None = None,
) -> list[str]:
    """A run that evaluates after each of `samples` and ends `minutes` after its start; no run_stop without status."""
    end = offset + round(minutes * 60_000)
    made = [
        line("submission_benchmark", benchmark, offset),
        line("submission_division", "closed", offset),
        line("submission_org", "Nobody", offset),
        line("seed", seed, offset),
        line("global_batch_size", gbs, offset),
        line("run_start", None, offset, "INTERVAL_START"),
    ]
    for i, count in enumerate(samples):
        at = offset + (i + 1) * (end - offset) // (len(samples) + 1)
        made.append(line("eval_accuracy", values[i] if values else 3.5 - 0.1 * i, at, **{position: count}))
    if status is not None:
        made.append(line("run_stop", None, end, "INTERVAL_END", status=status))
    return made


def write(path: Path, lines: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def benchmark_directory(
    directory: Path, minutes: Sequence[float], samples: Sequence[float] | None = None, **options: Any
) -> Path:
    """result_0.txt ... of runs that took so long and converged after so many samples."""
    for i, took in enumerate(minutes):
        last = samples[i] if samples else 172_032
        given = {"seed": i, "offset": i * 100_000_000, "samples": (last - 12288, last), **options}
        write(directory / f"result_{i}.txt", run_lines(took, **given))
    return directory
