"""The two files of a calibration: points by kind as JSON, and the system that names them as TOML."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from timetrial.predict.calibrate_layers import Samples
from timetrial.systems import points as reader
from timetrial.systems import system as systems
from timetrial.train.durable import write_atomic
from timetrial.train.environment import _memory_bytes, _processor_name

NAME = systems.LOCAL
STEPS_A_DOUBLING = 2
"""Sizes of one operator that lie nearer than this are one point."""


def points(
    samples: Samples, ring: Samples, memory: list[tuple[int, float]], optimizer: list[tuple[int, float]]
) -> dict[str, Any]:
    """The content of the file of points, as far as one process can measure it."""
    matmul = [[*shape, _us(times)] for shape, times in sorted(samples.matmul.items())]
    attention = {"fp32": _attention(samples), "bf16": _attention(samples), "ring": _attention(ring)}
    return {
        # bf16 on a CPU: operands rounded by operators of their own, multiplied in float32 (precision/bf16.py)
        "matmul": {"fp32": matmul, "bf16": matmul},
        "attention": attention,
        "memory": [[size, seconds * 1e6] for size, seconds in memory],
        "elementwise": {name: binned(sizes) for name, sizes in sorted(samples.elementwise.items())},
        "optimizer": [[size, seconds * 1e6] for size, seconds in optimizer],
        "collectives": {},
        "beside": {},
        "host": {"one": [0.0, 0.0]},
        "notes": {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "scatter": {
                "matmul": _scatter(samples.matmul.values()),
                "attention": _scatter(samples.attention.values()),
                "elementwise": _scatter(t for sizes in samples.elementwise.values() for t in sizes.values()),
            },
        },
    }


def binned(sizes: Mapping[int, list[float]]) -> list[list[float]]:
    """Rows of (bytes, microseconds): the mean size and time of all calls of nearly one size."""
    bins: dict[int, list[tuple[int, float]]] = {}
    for size, times in sizes.items():
        bins.setdefault(round(STEPS_A_DOUBLING * math.log2(size)), []).extend((size, s) for s in times)
    return [
        [statistics.mean(size for size, _ in calls), max(1e-3, statistics.mean(s for _, s in calls) * 1e6)]
        for _, calls in sorted(bins.items())
    ]


def write(folder: Path, content: Mapping[str, Any], cores: int) -> Path:
    """Both files; the path of the system's."""
    found = reader.parse(content, str(folder / f"{NAME}.json"))  # what cannot be read is not written
    peak = max(2.0 * m * n * k / us for m, n, k, us in content["matmul"]["fp32"]) / 1e6
    wide = max(size / us for size, us in content["memory"]) / 1e3
    sends = content["collectives"].get("send", {}).get("2") or [[1.0, 1.0], [wide * 1e3, 1.0]]
    operator_us = content["host"]["one"][0]
    gib = (_memory_bytes() or 2**30 * cores) / 2**30 / cores
    lines = [
        f'name = "{NAME}"',
        f'title = "this machine: {_text(_processor_name())}, {cores} cores"',
        "aliases = []",
        f'rates = "{NAME}.json"',
        "",
        "[accelerator]                 # one core",
        f'name = "{_text(_processor_name())}"',
        'generation = "cpu"',
        f"peak_tflops = {{ fp32 = {_in(peak, 0.005, 2e5):.4g}, bf16 = {_in(peak, 0.005, 2e5):.4g} }}",
        f"memory_gib = {_in(gib, 1, 2000):.4g}",
        f"memory_gb_per_s = {_in(wide, 5, 5e4):.4g}",
        "sms = 1",
        "tdp_w = 10",
        "",
        "[node]",
        f"accelerators = {min(cores, 128)}",
        "",
        "[scale_up]",
        f"domain = {min(cores, 128)}",
        f"gb_per_s = {_in(max(size / us for size, us in sends) / 1e3, 0.1, 2e4):.4g}",
        f"latency_us = {_in(min(us for _, us in sends), 0.05, 1000):.4g}",
        "in_switch_reduction = false",
        'kind = "memory"',
        "",
        "[scale_out]",
        'kind = "none"',
        "",
        "[host]",
        f"launch_us = {_in(operator_us, 0.05, 1000):.4g}",
        "",
        "[sources]",
        f'accelerator = "timetrial calibrate, {content["notes"]["date"]}"',
        '"accelerator.tdp_w" = "no meter here; assumed"',
        'node = "cores that a process may use"',
        'scale_up = "timetrial calibrate: messages over gloo"',
        'host = "timetrial calibrate: tiny steps beyond their kernels"',
        "",
    ]
    assert found.eager is not None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{NAME}.json", json.dumps(content) + "\n")
    path = folder / f"{NAME}.toml"
    write_atomic(path, "\n".join(lines))
    systems.load(path)
    return path


def _attention(samples: Samples) -> list[list[float]]:
    return [[*key, _us(times)] for key, times in sorted(samples.attention.items())]


def _us(times: list[float]) -> float:
    return max(1e-3, statistics.median(times) * 1e6)


def _scatter(groups: Iterable[list[float]]) -> float:
    """Median over kernels that were timed in several places of (largest - smallest) / (2 median)."""
    found = [(max(t) - min(t)) / 2 / statistics.median(t) for t in groups if len(t) > 1 and statistics.median(t) > 0]
    return round(statistics.median(found), 4) if found else 0.0


def _in(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _text(name: str) -> str:
    return name.replace("\\", " ").replace('"', "'")
