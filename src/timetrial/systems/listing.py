"""What `timetrial systems` prints: the machines and software generations that predictions know."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from timetrial.systems import stack as stacks
from timetrial.systems import system as systems
from timetrial.systems.system import System


def as_text(name: str | None = None) -> str:
    """All systems and stacks, a line each; or one system with the source of each figure."""
    return _one(systems.named(name)) if name else _all()


def as_json(name: str | None = None) -> str:
    """The same as data."""
    if name:
        return json.dumps(_plain(systems.named(name)), indent=1)
    both = {
        "systems": [_plain(systems.load(n)) for n in systems.names()],
        "stacks": [dataclasses.asdict(stacks.load(n)) for n in stacks.names()],
    }
    return json.dumps(both, indent=1, default=sorted)


def _all() -> str:
    lines = [f"{'system':12s} {'bf16':>6s} {'fp8':>6s} {'fp4':>6s}  {'memory':>8s}  TB/s  {'scale-up':>16s}  network"]
    for name in systems.names():
        s = systems.load(name)
        peaks = [s.accelerator.peak_flops.get(f) for f in ("bf16", "fp8", "fp4")]
        cells = " ".join(f"{peak / 1e12:6.0f}" if peak else f"{'-':>6s}" for peak in peaks)
        up = f"{s.scale_up.domain} x {s.scale_up.bytes_per_s / 1e9:.0f} GB/s"
        out = f"{s.scale_out.bytes_per_s / 1e9:.0f} GB/s {s.scale_out.kind}"
        memory = s.accelerator.memory_bytes / 2**30
        rate = s.accelerator.memory_bytes_per_s / 1e12
        lines.append(f"{name:12s} {cells}  {memory:4.0f} GiB {rate:5.1f}  {up:>16s}  {out}")
    lines += ["", "TFLOP/s dense, of one accelerator; scale-up and scale-out of one accelerator, one direction", ""]
    for name in stacks.names():
        stack = stacks.load(name)
        lines.append(f"{name:12s} {stack.title} ({', '.join((*stack.rounds, *stack.releases)) or 'no round'})")
    lines += ["", "`timetrial systems NAME` tells where each figure comes from; docs/systems.md how to add a machine"]
    return "\n".join(lines)


def _one(system: System) -> str:
    lines = [f"{system.name}: {system.title}", ""]
    groups = {name: getattr(system, name) for name in ("accelerator", "node", "scale_up", "scale_out", "host", "power")}
    figures = [
        (f"{name}.{key}", value)
        for name, group in groups.items()
        if group is not None
        for key, value in dataclasses.asdict(group).items()
    ]
    width = max(len(_words(name)) for name, _ in figures)
    lines += [f"  {_words(name):{width}s}  {_short(name, value)}" for name, value in figures]
    lines += ["", "sources:"] + [f"  {key}: {text}" for key, text in sorted(system.sources.items())]
    if system.assumed:
        lines += ["", "assumed: " + ", ".join(sorted(system.assumed))]
    return "\n".join(lines)


UNITS: dict[str, tuple[float, str]] = {
    "_flops": (1e12, "TFLOP/s"),
    "_bytes": (2.0**30, "GiB"),
    "_bytes_per_s": (1e9, "GB/s"),
    "_s": (1e-6, "\u00b5s"),
    "_w": (1.0, "W"),
}
"""How a figure's name ends -> what it is divided by, and the unit of that; the longest ending counts."""


def _ending(name: str) -> str:
    key = "_" + name.rpartition(".")[2]
    return max((end for end in UNITS if key.endswith(end)), key=len, default="")


def _words(name: str) -> str:
    """A figure's name without its unit: it stands beside the value."""
    if name.endswith("bytes_per_s"):
        return name.removesuffix("bytes_per_s") + "bandwidth"
    return name.removesuffix(_ending(name))


def _short(name: str, value: Any) -> str:
    by, unit = UNITS.get(_ending(name), (1.0, ""))

    def one(x: Any) -> str:
        if isinstance(x, bool):
            return "yes" if x else "no"
        if not isinstance(x, int | float):
            return str(x)
        y = x / by
        return f"{y:,.0f}" if y >= 1000 or y == round(y) else f"{y:.4g}"

    told = ", ".join(f"{k} {one(v)}" for k, v in value.items()) if isinstance(value, dict) else one(value)
    return f"{told} {unit}".strip()


def _plain(system: System) -> dict[str, Any]:
    values = dataclasses.asdict(system)
    values["assumed"] = sorted(system.assumed)
    return values
