"""Makes `kernels.json` from the measured tables in the wheel of aiconfigurator-core.

    pip download aiconfigurator-core==0.12.0 --no-deps && unzip aiconfigurator_core-*.whl
    python -m timetrial.systems.make_rates DIRECTORY [--sample FILE]

needs numpy, scipy and pyarrow and about two minutes. For each machine and format the fastest kernel of all frameworks
per shape is taken, a fifth of the shapes is held out, the parameters of `curves.py` are fitted to the rest, and the
errors that the package's own curves make on the held-out shapes are written beside them and printed as a table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from timetrial.systems import make_tables as tables
from timetrial.systems import rates
from timetrial.systems.system import System, load

Array = Any

MACHINES = {
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "b200-sxm": "b200_sxm",
    "b300-sxm": "b300_sxm",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
    "l40s": "l40s",
}
"""System -> directory of the tables."""

FORMATS = {"bf16": ("bfloat16", 2.0), "fp8": ("fp8", 1.0), "fp8_block": ("fp8_block", 1.0), "nvfp4": ("nvfp4", 0.5625)}
"""Format -> (name in the tables, bytes of an operand's element with its scales)."""

TILES = [[128, 256], [256, 128], [128, 128]]
SETTLE_S = 3e-4
HEAD_DIMS = (64, 128, 192, 256)

NOTICE = (
    "Parameters of curves fitted by timetrial.systems.make_rates to kernel times measured by NVIDIA and published in"
    " aiconfigurator-core 0.12.0 (https://github.com/ai-dynamo/aiconfigurator), Copyright (c) 2025-2026 NVIDIA"
    " CORPORATION & AFFILIATES, Apache License 2.0. Changed: the tables are reduced to curves."
)


def main(arguments: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="make_rates")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sample", type=Path, help="where to write some held-out shapes, for the tests")
    options = parser.parse_args(arguments)
    root = options.directory / "aiconfigurator_core" / "systems" / "data"
    found: dict[str, Any] = {}
    sample: list[str] = []
    for name, directory in MACHINES.items():
        system = load(name)
        products = {fmt: tables.matmuls(root / directory, FORMATS[fmt][0]) for fmt in FORMATS}
        kernels = {
            fmt: tables.attentions(root / directory, table) for fmt, table in (("bf16", "bfloat16"), ("fp8", "fp8"))
        }
        matmul = {fmt: _matmul(system, fmt, *columns) for fmt, columns in products.items() if len(columns[0])}
        attention = {
            fmt: _attention(system, fmt, columns) for fmt, columns in kernels.items() if len(columns["t"]) > 1000
        }
        for fit in matmul.values():
            # what a low-precision product takes beyond the start of a bfloat16 one is the start of its cast
            fit["cast_us"] = round(max(fit["launch_us"] - matmul["bf16"]["launch_us"], 0.0), 3)
            fit["launch_us"] = round(fit["launch_us"] - fit["cast_us"], 3)
        for fit in attention.values():
            # serving also writes the cache of keys and values, casts, and plans; training's kernels do not
            fit["cache_us"] = round(max(fit["launch_us"] - matmul["bf16"]["launch_us"], 0.0), 3)
            fit["launch_us"] = round(fit["launch_us"] - fit["cache_us"], 3)
            fit["cache_traffic"] = round(max(fit["traffic"] - 1, 0.0), 4)
            fit["traffic"] = round(fit["traffic"] - fit["cache_traffic"], 4)
        if "fp8" in attention:
            attention["fp8"]["full"] = attention["bf16"]["full"]
        found[name] = {
            "matmul": matmul,
            "attention": attention,
            "memory": _memory(system, *tables.casts(root / directory)),
            "collectives": tables.collectives(root / directory, system),
        }
        _measure(system, found, products, kernels, sample)
    text = _dump({"notice": NOTICE, "machines": found})
    Path(__file__).with_name("kernels.json").write_text(text + "\n", encoding="utf-8")
    if options.sample:
        options.sample.write_text(
            "\n".join([f"# {NOTICE}", "system,format,m,n,k,cast_us,microseconds", *sample]) + "\n"
        )
    _print(found)


def _dump(value: Any, depth: int = 0) -> str:
    """JSON with one curve a line."""
    if depth == 4 or not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    inner = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(key)}: {_dump(v, depth + 1)}" for key, v in value.items())
    return f"{{\n{inner}\n{' ' * depth}}}"


def _held_out(count: int) -> Array:
    """A fifth, the same in each run."""
    return np.random.default_rng(0).random(count) < 0.2


def _fit(residuals: Callable[[Array], Array], start: list[float], low: list[float], high: list[float]) -> list[float]:
    """Parameters in logarithms, with little weight on outliers."""
    optimize = importlib.import_module("scipy.optimize")
    result = optimize.least_squares(
        lambda p: residuals(np.exp(p)), np.log(start), bounds=(np.log(low), np.log(high)), loss="soft_l1", f_scale=0.1
    )
    return [float(f"{x:.4g}") for x in np.exp(result.x)]


def _matmul(system: System, fmt: str, m: Array, n: Array, k: Array, t: Array) -> dict[str, Any]:
    """Fits curves.MatmulCurve and the cast of the activations that the tables' low-precision products include."""
    train = ~_held_out(len(m))
    # training's products have thousands of rows; the tables have few of those beyond 4,353
    usual = (m >= 2048) & (n >= 512) & (k >= 512)
    weight = np.where(usual & (m >= 8192), 2.0, np.where(usual, 1.0, 0.25))
    flops = system.accelerator.peak_flops[rates.PEAKS[fmt]]
    sms, bandwidth, element = system.accelerator.sms, system.accelerator.memory_bytes_per_s, FORMATS[fmt][1]

    def seconds(p: Array) -> Array:
        launch, efficiency, k_extra, rounding, share, cast, small, settling = p
        best = np.full(len(m), np.inf)
        for rows, columns in TILES:
            waves = np.ceil(m / rows) * np.ceil(n / columns) / sms
            work = (rounding * np.ceil(waves) + (1 - rounding) * waves) * rows * columns
            best = np.minimum(best, work / (small if [rows, columns] == TILES[-1] else 1))
        busy = best * 2 * (k + k_extra) * sms / (flops * efficiency)
        busy = busy * (1 + busy / SETTLE_S) ** settling
        memory = ((m + n) * k * element + 2 * m * n) / (bandwidth * share)
        return launch + (busy**4 + memory**4) ** 0.25 + cast * m * k / bandwidth

    p = _fit(
        lambda p: ((np.log(seconds(p)) - np.log(t)) * weight)[train],
        [4e-6, 0.8, 100, 0.5, 0.8, 5e-4 if fmt == "bf16" else 0.5, 0.95, 0.02],
        [5e-7, 0.1, 1, 0.02, 0.3, 1e-4 if fmt == "bf16" else 1e-3, 0.5, 1e-4],
        [3e-5, 1.1, 3000, 0.999, 1.1, 1e-3 if fmt == "bf16" else 8, 1.0, 0.5],
    )
    return {
        "launch_us": round(p[0] * 1e6, 3),
        "efficiency": p[1],
        "k_extra": p[2],
        "rounding": p[3],
        "small_tile": p[6],
        "settling": p[7],
        "settle_us": SETTLE_S * 1e6,
        "memory_share": p[4],
        "element_bytes": element,
        "result_bytes": 2,
        "cast_bytes": 0.0 if fmt == "bf16" else p[5],
        "tiles": TILES,
        "shapes": len(m),
        "error": {"median": 0.0, "p90": 0.0},
    }


def _attention(system: System, fmt: str, c: dict[str, Array]) -> dict[str, Any]:
    """Fits curves.AttentionCurve to forward kernels."""
    train = ~_held_out(len(c["t"]))
    usual = (c["tokens"] >= 1024) & (c["batch"] * c["heads"] >= 8) & (c["head_dim"] == 128)
    weight = np.where(usual, 1.0, 0.3)
    flops, sms = system.accelerator.peak_flops[fmt], system.accelerator.sms
    bandwidth, element = system.accelerator.memory_bytes_per_s, FORMATS[fmt][1]
    dims = np.searchsorted(HEAD_DIMS, c["head_dim"])
    queries = c["batch"] * c["heads"] * c["tokens"]
    moved = c["head_dim"] * (queries * (element + 2) + 2 * c["batch"] * c["kv_heads"] * c["tokens"] * element)
    waves = c["batch"] * c["heads"] * np.ceil(c["tokens"] / 128) / sms

    def seconds(p: Array) -> Array:
        launch, extra, rounding, traffic, settling, full = p[:6]
        keys = np.where(c["causal"], c["tokens"] / 2 + 64, c["tokens"]) + extra
        busy = 4 * queries * keys * c["head_dim"] / (flops * p[6:][dims]) * np.where(c["causal"], 1, full)
        busy = busy * (1 + rounding * (np.ceil(waves) / waves - 1))
        return launch + busy * (1 + busy / SETTLE_S) ** settling + traffic * moved / bandwidth

    p = _fit(
        lambda p: ((np.log(seconds(p)) - np.log(c["t"])) * weight)[train],
        [5e-6, 100, 0.3, 1, 0.02, 0.9] + [0.6] * 4,
        [1e-6, 1, 0.01, 0.2, 1e-4, 0.5] + [0.05] * 4,
        [5e-5, 4000, 1, 20, 0.3, 1.2] + [1.2] * 4,
    )
    shares = dict(zip(HEAD_DIMS, p[6:], strict=True))
    if shares[192] < 0.5 * min(shares[128], shares[256]):
        del shares[192]  # the frameworks fell back on a slow kernel, which training's libraries do not
    return {
        "launch_us": round(p[0] * 1e6, 3),
        "efficiency": {str(dim): share for dim, share in shares.items()},
        "tokens_extra": p[1],
        "rounding": p[2],
        "settling": p[4],
        "settle_us": SETTLE_S * 1e6,
        "full": p[5],
        "traffic": p[3],
        "element_bytes": element,
        "shapes": len(c["t"]),
        "error": {"median": 0.0, "p90": 0.0},
    }


def _memory(system: System, size: Array, t: Array) -> dict[str, Any]:
    """Floor and share of the peak, from casts of bfloat16 to fp8 that are larger than the caches."""
    large = size >= 2e8
    peak = system.accelerator.memory_bytes_per_s
    train = large & ~_held_out(len(size))
    # kernels of a stream follow each other no faster than every two microseconds or so
    floor = max(float(np.median(t[size <= 1e6])), 2e-6)
    (share,) = _fit(lambda p: np.log(floor + size[train] / (peak * p[0])) - np.log(t[train]), [0.9], [0.3], [1.0])
    test = large & ~train
    return {
        "floor_us": round(floor * 1e6, 3),
        "share": share,
        "shapes": int(large.sum()),
        "error": _error(floor + size[test] / (peak * share), t[test]),
    }


def _error(predicted: Array, measured: Array) -> dict[str, float]:
    off = np.abs(np.asarray(predicted) / measured - 1)
    return {"median": round(float(np.median(off)), 4), "p90": round(float(np.quantile(off, 0.9)), 4)}


def _measure(system: System, found: dict[str, Any], products: Any, kernels: Any, sample: list[str]) -> None:
    """Errors on held-out shapes through the code that predictions use."""
    name = system.name
    curves = rates.from_data(system, found[name])
    for fmt, fit in found[name]["matmul"].items():
        m, n, k, t = products[fmt]
        cast = fit["cast_us"] / 1e6 + fit["cast_bytes"] * m * k / system.accelerator.memory_bytes_per_s
        chosen = np.flatnonzero(_held_out(len(m)) & (m >= 1024) & (n >= 1024) & (k >= 1024))
        times = [curves.matmul_s(fmt, int(m[i]), int(n[i]), int(k[i])) + cast[i] for i in chosen]
        fit["error"] = _error(times, t[chosen])
        wide = m[chosen] >= 8192
        fit["error_8192"] = _error(np.array(times)[wide], t[chosen][wide])
        fit["bias_8192"] = round(float(np.median(np.array(times)[wide] / t[chosen][wide])) - 1, 4)
        rows = np.random.default_rng(1).choice(chosen, 25, replace=False)
        sample += [
            f"{name},{fmt},{m[i]:g},{n[i]:g},{k[i]:g},{cast[i] * 1e6:.4g},{t[i] * 1e6:.5g}" for i in sorted(rows)
        ]
    for fmt, fit in found[name]["attention"].items():
        c = kernels[fmt]
        usual = (c["tokens"] >= 2048) & (c["batch"] * c["heads"] >= 8) & (c["head_dim"] == 128) & c["causal"]
        chosen = np.flatnonzero(_held_out(len(c["t"])) & usual)
        times = []
        for i in chosen:
            batch, heads, kv_heads, tokens = (int(c[x][i]) for x in ("batch", "heads", "kv_heads", "tokens"))
            element = FORMATS[fmt][1]
            moved = 128 * batch * tokens * (heads * (element + 2) + 2 * kv_heads * element)
            cache = fit["cache_us"] / 1e6 + fit["cache_traffic"] * moved / system.accelerator.memory_bytes_per_s
            times.append(cache + curves.attention_s(fmt, batch, heads, kv_heads, tokens, tokens, 128, True, False))
        fit["error"] = _error(times, c["t"][chosen])


def _print(found: dict[str, Any]) -> None:
    columns = ["machine", "kernel", "shapes", "share of the peak", "median error", "90th percentile"]
    print("| " + " | ".join([*columns, "from 8,192 rows", "bias there"]) + " |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, machine in found.items():
        for kind in ("matmul", "attention"):
            for fmt, fit in machine[kind].items():
                share = fit["efficiency"]["128"] if kind == "attention" else fit["efficiency"]
                row = f"| {name} | {kind} {fmt} | {fit['shapes']:,} | {share:.2f} | {_percent(fit['error'])} |"
                if kind == "matmul":
                    row += f" {fit['error_8192']['median'] * 100:.1f} % | {fit['bias_8192'] * 100:+.1f} % |"
                print(row if kind == "matmul" else row + " | |")
        memory = machine["memory"]
        print(f"| {name} | memory | {memory['shapes']:,} | {memory['share']:.2f} | {_percent(memory['error'])} | | |")
        network = machine["collectives"]
        print(f"| {name} | collectives | | | {_percent(network['error'])} | | |")


def _percent(error: dict[str, float]) -> str:
    return f"{error['median'] * 100:.1f} % | {error['p90'] * 100:.1f} %"


if __name__ == "__main__":
    main(sys.argv[1:])
