"""Reads the measured tables of an unpacked aiconfigurator-core wheel, for `make_rates.py`; needs pyarrow."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from timetrial.systems.system import System

Array = Any

SIZES = [1 << power for power in range(10, 30, 2)] + [1 << 29]
"""Bytes at which times of collectives are kept."""

KINDS = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}


def _rows(directory: Path, pattern: str) -> list[dict[str, Any]]:
    parquet = importlib.import_module("pyarrow.parquet")
    rows: list[dict[str, Any]] = []
    for path in sorted(directory.glob(pattern)):
        rows += parquet.read_table(path).to_pylist()
    return rows


def _fastest(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> dict[tuple[Any, ...], float]:
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        key = tuple(row[name] for name in columns)
        best[key] = min(best.get(key, np.inf), row["latency"] * 1e-3)
    return dict(sorted(best.items()))


def matmuls(machine: Path, dtype: str) -> tuple[Array, Array, Array, Array]:
    """m, n, k and seconds of the fastest kernel per shape, all sizes from 128."""
    rows = [r for r in _rows(machine, "gemm/*/*/gemm_perf.parquet") if r["gemm_dtype"] == dtype]
    best = _fastest([r for r in rows if min(r["m"], r["n"], r["k"]) >= 128], ("m", "n", "k"))
    table = np.array([(*key, t) for key, t in best.items()], dtype=float).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def attentions(machine: Path, dtype: str) -> dict[str, Array]:
    """Forward kernels without a window, keys and values in the same format: causal of any head dimension, full of 64.

    Only those large enough to occupy the machine.
    """
    names = ("batch_size", "num_heads", "num_key_value_heads", "isl", "head_dim")
    causal = [
        r
        for r in _rows(machine, "attention/*/*/context_attention_perf.parquet")
        if r["window_size"] == 0 and r["attn_dtype"] == r["kv_cache_dtype"] == dtype
    ]
    full = [
        {**r, "num_key_value_heads": r["num_heads"]}
        for r in _rows(machine, "encoder_attention/*/*/encoder_attention_perf.parquet")
        if r["attn_dtype"] == dtype
    ]
    table: list[tuple[Any, ...]] = []
    for rows, is_causal in ((causal, True), (full, False)):
        for key, t in _fastest(rows, names).items():
            batch, heads, _, tokens, head_dim = key
            if tokens >= 256 and batch * heads * tokens >= 8192 and head_dim in (64, 128, 192, 256):
                table.append((*key, is_causal, t))
    columns = np.array(table, dtype=float).reshape(-1, 7).T
    found = dict(zip(("batch", "heads", "kv_heads", "tokens", "head_dim", "causal", "t"), columns, strict=True))
    found["causal"] = found["causal"] > 0
    return found


def casts(machine: Path) -> tuple[Array, Array]:
    """Bytes and seconds of casts from bfloat16 to fp8 by a known scale: two bytes read, one written an element."""
    rows = [r for r in _rows(machine, "quantize/*/*/scale_matrix_perf.parquet") if r["quant_dtype"] == "fp8"]
    best = _fastest(rows, ("m", "k"))
    return np.array([3.0 * m * k for m, k in best]), np.array(list(best.values()))


def collectives(machine: Path, system: System) -> dict[str, Any]:
    """Times by kind and ranks at SIZES, the fastest version of NCCL, and the error of leaving out each second size."""
    rows = [r for r in _rows(machine, "comm/nccl/*/nccl_perf.parquet") if r["nccl_dtype"] == "half"]
    best = _fastest(rows, ("op_name", "num_gpus", "message_size"))
    times: dict[str, dict[str, list[float]]] = {}
    errors: list[float] = []
    for (kind, ranks, _), _t in best.items():
        times.setdefault(KINDS[kind], {}).setdefault(str(ranks), [])
    for kind, name in KINDS.items():
        for ranks in list(times[name]):
            # message sizes count elements of two bytes
            line = {size * 2: t for (k, n, size), t in best.items() if k == kind and str(n) == ranks}
            # more bytes never take less: what the tables show of it is noise
            rising = np.maximum.accumulate([line[size] * 1e6 for size in SIZES])
            times[name][ranks] = [float(f"{us:.4g}") for us in rising]
            x = np.log(SIZES)
            between = [size for size in line if SIZES[0] < size < SIZES[-1] and size not in SIZES]
            guess = np.exp(np.interp(np.log(between), x, np.log([line[size] for size in SIZES])))
            errors += list(np.abs(guess / np.array([line[size] for size in between]) - 1))
    if system.scale_up.kind == "pcie":
        # beyond two cards the tables' machine has no direct path between them (2 GB/s); hosts that train do
        times = {kind: {"2": by_ranks["2"]} for kind, by_ranks in times.items()}
    return {
        "gb_per_s": system.scale_up.bytes_per_s / 1e9,
        "in_switch_reduction": system.scale_up.in_switch_reduction,
        "bytes": SIZES,
        "us": times,
        "error": {"median": round(float(np.median(errors)), 4), "p90": round(float(np.quantile(errors, 0.9)), 4)},
    }
