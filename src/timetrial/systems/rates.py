"""What kernels reach on a system: times of products, attention, memory-bound kernels and collectives, as measured.

Curves lie in `kernels.json`, fitted by `make_rates.py` to the tables of aiconfigurator-core (NVIDIA, Apache-2.0), and
`relatives.json` says how machines without a table are derived from the nearest one that has one. A machine of the
user's own has a file of measured points instead (`points.py`). docs/systems.md has the residuals.

Torch-free, numpy-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from timetrial.errors import UserError
from timetrial.systems import points
from timetrial.systems.collectives import Collectives, bus_bytes
from timetrial.systems.curves import Attention, AttentionCurve, Line, Matmul, MatmulCurve, Roof
from timetrial.systems.eager import Eager
from timetrial.systems.system import System

PEAKS = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}
"""Format of a fitted curve -> the peak of the data sheet that it is a share of."""

SAME = {"fp16": "bf16", "mxfp8": "fp8_block", "mxfp4": "nvfp4"}
"""Formats without a table -> the format whose curve they take where the hardware has them."""


@dataclass(frozen=True)
class Rates:
    """Times of kernels on one system."""

    system: str
    """Its name, for messages."""
    matmul: Mapping[str, Matmul]
    """By format of the operands: bf16, fp16, tf32, fp32, fp8 (one scale a tensor), fp8_block, mxfp8, nvfp4, mxfp4."""
    attention: Mapping[str, Attention]
    """By format: bf16, fp16, fp8."""
    memory: Roof | Line
    collectives: Collectives | None
    """None where there is nothing to send to."""
    spread: dict[str, float]
    """Relative error of the curves on shapes that they were not fitted to: "matmul.bf16" the median,
    "matmul.bf16.p90" the 90th percentile; so for attention.FORMAT, attention.FORMAT.backward, memory, collective."""
    assumed: frozenset[str]
    """Keys of `spread` whose curves were not measured on this machine."""
    eager: Eager | None = None
    """What eager code costs beside the above; None where nobody calibrated."""

    @classmethod
    def load(cls, system: System) -> Rates:
        """Of a system: from the package's curves, or from the file of points that its `rates` names.

        Raises UserError where there is no such machine or the file cannot be used.
        """
        if system.rates.endswith(".json"):
            return cls.measured(system, points.read(Path(system.rates)))
        return _from_curves(system)

    @classmethod
    def measured(cls, system: System, content: Mapping[str, Any]) -> Rates:
        """From points measured on the machine itself; see `points.py` for what `content` holds."""
        found = points.parse(content, system.rates)
        collectives = None
        if found.collectives and system.scale_up.domain > 1:
            collectives = Collectives(found.collectives, system.scale_up.bytes_per_s, False, system.scale_up)
        return cls(
            system=system.name,
            matmul=found.matmul,
            attention=found.attention,
            memory=found.memory,
            collectives=collectives,
            spread=found.spread,
            assumed=frozenset(),
            eager=found.eager,
        )

    def matmul_s(self, format: str, m: int, n: int, k: int, batch: int = 1) -> float:
        """One product (m, k) x (k, n), or `batch` of them in one kernel, seconds, without casts of its operands.

        Raises UserError where the machine has no such format.
        """
        curve = self.matmul.get(format)
        if curve is None:
            raise self._unknown("products", format, self.matmul)
        return curve.seconds(m, n, k, batch)

    def attention_s(
        self,
        format: str,
        batch: int,
        heads: int,
        kv_heads: int,
        tokens: int,
        kv_tokens: int,
        head_dim: int,
        causal: bool,
        backward: bool,
    ) -> float:
        """One attention kernel, seconds; causal is half of the square of tokens and kv_tokens."""
        curve = self.attention.get(format)
        if curve is None:
            raise self._unknown("attention", format, self.attention)
        return curve.seconds(batch, heads, kv_heads, tokens, kv_tokens, head_dim, causal, backward)

    def memory_s(self, bytes: float) -> float:
        """One elementwise kernel that moves so many bytes in all, seconds; never below the shortest kernel."""
        return self.memory.seconds(bytes)

    def nccl_s(self, kind: str, ranks: int, bytes: float) -> float:
        """One collective within the scale-up domain, seconds; `bytes` is the whole tensor."""
        if self.collectives is None:
            raise UserError(f"system {self.system} has no scale-up domain; collectives have no rate there")
        return self.collectives.seconds(kind, ranks, bytes)

    def nccl_busbw(self, kind: str, ranks: int, bytes: float) -> float:
        """Bus bandwidth of that collective with its start counted in, bytes/s."""
        return bus_bytes(kind, ranks, bytes) / self.nccl_s(kind, ranks, bytes)

    def _unknown(self, what: str, format: str, known: Mapping[str, object]) -> UserError:
        return UserError(
            f"system {self.system} has no rates of {what} in {format!r}; it has {', '.join(sorted(known))}"
        )


def machines() -> list[str]:
    """Machines whose kernels are known, measured or derived, sorted."""
    return sorted({*_kernels()["machines"], *_relatives()["machines"]})


@lru_cache(maxsize=1)
def _kernels() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((_here() / "kernels.json").read_text(encoding="utf-8"))
    return content


@lru_cache(maxsize=1)
def _relatives() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((_here() / "relatives.json").read_text(encoding="utf-8"))
    return content


def _here() -> Any:
    return resources.files("timetrial.systems")


def _from_curves(system: System) -> Rates:
    change = _relatives()["machines"].get(system.rates, {})
    data = _kernels()["machines"].get(change.get("like", system.rates))
    if data is None:
        raise UserError(
            f"system {system.name}: rates = {system.rates!r} is no machine with known kernels; there are"
            f" {', '.join(machines())}, or give a .json file of measured points"
        )
    return from_data(system, data, change)


def from_data(system: System, data: Mapping[str, Any], change: Mapping[str, Any] = MappingProxyType({})) -> Rates:
    """From one machine's entry of `kernels.json`, with what `relatives.json` changes of it."""
    whole = bool(change)
    assumed: set[str] = set()
    spread: dict[str, float] = {}

    def note(key: str, error: Mapping[str, float], guess: bool) -> None:
        spread[key], spread[f"{key}.p90"] = error["median"], error["p90"]
        if guess:
            assumed.add(key)
            spread[key] = max(spread[key], _relatives()["assumed_spread"]["median"])
            spread[f"{key}.p90"] = max(spread[f"{key}.p90"], _relatives()["assumed_spread"]["p90"])

    matmul: dict[str, Matmul] = {}
    for fmt, fit in data["matmul"].items():
        if PEAKS[fmt] not in system.accelerator.peak_flops:
            continue
        curve = _matmul(system, fit, system.accelerator.peak_flops[PEAKS[fmt]])
        if fmt in change.get("efficiency", {}):
            curve = replace(curve, efficiency=change["efficiency"][fmt])
        matmul[fmt] = curve
        note(f"matmul.{fmt}", fit["error"], whole)
    wide = matmul["bf16"]
    for fmt in ("tf32", "fp32"):
        if fmt in system.accelerator.peak_flops and isinstance(wide, MatmulCurve):
            peak = system.accelerator.peak_flops[fmt]
            matmul[fmt] = replace(wide, flops=peak, element_bytes=4, result_bytes=4)
            note(f"matmul.{fmt}", data["matmul"]["bf16"]["error"], True)
    for fmt, like in SAME.items():
        if like in matmul and fmt not in _relatives()["without"].get(system.accelerator.generation, ()):
            matmul[fmt] = matmul[like]
            note(f"matmul.{fmt}", data["matmul"][like]["error"], whole or fmt.startswith("mx"))
    for fmt in _relatives()["without"].get(system.accelerator.generation, ()):
        matmul.pop(fmt, None)

    attention: dict[str, Attention] = {}
    for fmt, fit in data["attention"].items():
        if fmt in system.accelerator.peak_flops:
            attention[fmt] = _attention(system, fit, change.get("attention", 1.0))
            note(f"attention.{fmt}", fit["error"], whole)
            measured_backward = system.accelerator.generation == "hopper" and fmt == "bf16" and not whole
            note(f"attention.{fmt}.backward", _relatives()["backward"]["error"], not measured_backward)
    attention["fp16"] = attention["bf16"]
    for name in ("", ".p90", ".backward", ".backward.p90"):
        spread["attention.fp16" + name] = spread["attention.bf16" + name]

    fit = data["memory"]
    share = change.get("memory_share", fit["share"])
    note("memory", fit["error"], whole)
    return Rates(
        system=system.name,
        matmul=matmul,
        attention=attention,
        memory=Roof(fit["floor_us"] / 1e6, share * system.accelerator.memory_bytes_per_s),
        collectives=_collectives(system, data["collectives"], whole, note),
        spread=spread,
        assumed=frozenset(assumed),
    )


def _collectives(system: System, data: Mapping[str, Any], guess: bool, note: Any) -> Collectives | None:
    if system.scale_up.domain < 2:
        return None
    sizes = tuple(float(size) for size in data["bytes"])
    lines = {
        kind: {int(n): Line(sizes, tuple(us / 1e6 for us in times)) for n, times in by_ranks.items()}
        for kind, by_ranks in data["us"].items()
    }
    most = max(max(by_ranks) for by_ranks in lines.values())
    note("collective", data["error"], guess)
    if system.scale_up.domain > most:
        note("collective.wide", data["error"], True)
    return Collectives(lines, data["gb_per_s"] * 1e9, data["in_switch_reduction"], system.scale_up)


def _matmul(system: System, fit: Mapping[str, Any], flops: float) -> MatmulCurve:
    return MatmulCurve(
        flops=flops,
        bytes_per_s=system.accelerator.memory_bytes_per_s,
        sms=system.accelerator.sms,
        launch_s=fit["launch_us"] / 1e6,
        efficiency=fit["efficiency"],
        k_extra=fit["k_extra"],
        rounding=fit["rounding"],
        small_tile=fit["small_tile"],
        settling=fit["settling"],
        settle_s=fit["settle_us"] / 1e6,
        memory_share=fit["memory_share"],
        element_bytes=fit["element_bytes"],
        result_bytes=fit["result_bytes"],
        tiles=tuple((rows, columns) for rows, columns in fit["tiles"]),
    )


def _attention(system: System, fit: Mapping[str, Any], scale: float) -> AttentionCurve:
    back = _relatives()["backward"]
    shares = back["share_of"].get(system.accelerator.generation, back["share"])
    fmt = "fp8" if fit["element_bytes"] == 1 else "bf16"
    return AttentionCurve(
        flops=system.accelerator.peak_flops[fmt],
        bytes_per_s=system.accelerator.memory_bytes_per_s,
        sms=system.accelerator.sms,
        launch_s=fit["launch_us"] / 1e6,
        efficiency=tuple((int(dim), share * scale) for dim, share in fit["efficiency"].items()),
        tokens_extra=fit["tokens_extra"],
        rounding=fit["rounding"],
        settling=fit["settling"],
        settle_s=fit["settle_us"] / 1e6,
        full=((64, fit["full"]), *((int(dim), time) for dim, time in _relatives()["full"]["time"].items())),
        traffic=fit["traffic"],
        element_bytes=fit["element_bytes"],
        backward=tuple((int(dim), share) for dim, share in shares.items()),
        backward_tokens=back["tokens"],
    )
