"""Model FLOPs of a training sample, and the peak of an accelerator, each with its source.

`data/model_flops.toml` has the FLOPs by benchmark. Peaks are the figures of `timetrial.systems` (read as package data,
by the names that system descriptions use), and `data/accelerators.toml` for accelerators that have no system file.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from timetrial.systems import files

FORMATS = {
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "fp4": "fp4",
    "mxfp6": "fp6",
    "fp6": "fp6",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "bf16",
    "float16": "bf16",
    "tf32": "tf32",
    "fp32": "fp32",
    "float32": "fp32",
}
"""Name of a format in a log -> whose peak holds; fp16 runs at the rate of bf16."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one training sample of a benchmark."""

    tflop: float | None
    """10^12 FLOP, forward and backward, recomputation not counted; None where nothing is published."""
    causal: bool | None
    """Whether attention is halved for its causal mask; None where the source does not say."""
    counted: float | None
    """The same by our own count, causal attention halved, 10^12 FLOP."""
    seq_len: int | None
    """Tokens of one sample; None where samples are no text."""
    source: str
    """Where the figure comes from, or why there is none."""


@dataclass(frozen=True)
class Peak:
    """Dense peak of one accelerator in one format."""

    tflops: float
    format: str
    """Format whose peak this is: bf16, fp8, fp4 ..."""
    source: str


def model_flops(benchmark: str) -> ModelFlops:
    """FLOPs of a sample of `benchmark` (`llama31_405b`); one without a figure says why."""
    row = _table("model_flops.toml").get(benchmark)
    if row is None:
        return ModelFlops(None, None, None, None, f"no count of FLOPs for {benchmark or 'an unnamed benchmark'}")
    if "tflop" not in row:
        return ModelFlops(None, None, None, None, row["why"])
    causal = row["causal"]
    return ModelFlops(
        tflop=float(row["tflop"]),
        causal=causal if isinstance(causal, bool) else None,
        counted=row.get("counted"),
        seq_len=row["seq_len"],
        source=row["source"],
    )


def peaks(accelerator: str) -> tuple[Mapping[str, float], str]:
    """(format -> dense peak, TFLOP/s; source) of an accelerator by its name in a description or log.

    Empty where the name or the peak is unknown; the second then says which.
    """
    return _peaks().get(_key(accelerator), ({}, f"the accelerator {accelerator or '(unnamed)'} is unknown"))


def peak(accelerator: str, format_: str) -> Peak | None:
    """The dense peak of `accelerator` in a format as logs name it (nvfp4, fp8, bf16 ...); None where unknown."""
    name = FORMATS.get(format_.strip().lower().replace("-", "").replace("_", ""))
    figures, source = peaks(accelerator)
    if name is None or name not in figures:
        return None
    return Peak(figures[name], name, source)


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@functools.cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("timetrial.results") / "data" / name).read_text("utf-8"))


@functools.cache
def _peaks() -> dict[str, tuple[Mapping[str, float], str]]:
    found: dict[str, tuple[Mapping[str, float], str]] = {}
    prefix = "accelerator.peak_tflops."
    by_system: dict[str, tuple[Mapping[str, float], str]] = {}
    for system in files.names():
        figures = files.bundled(system)
        rates = {name.removeprefix(prefix): float(figures[name]) for name in figures if name.startswith(prefix)}
        source = figures["sources"].get(f"{prefix}bf16", f"systems/{system}.toml")
        by_system[system] = (rates, source)
        for name in (system, *figures.get("aliases", ())):
            found[_key(name)] = by_system[system]
    table = _table("accelerators.toml")
    for name, system in table["same"].items():
        found.setdefault(_key(name), by_system[system])
    for row in table["peak"]:
        for name in row["names"]:
            found.setdefault(_key(name), ({k: float(v) for k, v in row["tflops"].items()}, row["source"]))
    for row in table["unknown"]:
        for name in row["names"]:
            found.setdefault(_key(name), ({}, f"{name}: {row['why']}"))
    return found
