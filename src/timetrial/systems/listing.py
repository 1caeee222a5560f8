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
    return _one(systems.load(name)) if name else _all()


def as_json(name: str | None = None) -> str:
    """The same as data."""
    if name:
        return json.dumps(_plain(systems.load(name)), indent=1)
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
    for group in ("accelerator", "node", "scale_up", "scale_out", "host"):
        for key, value in dataclasses.asdict(getattr(system, group)).items():
            lines.append(f"  {group}.{key:24s} {_short(value)}")
    lines += ["", "sources:"] + [f"  {key}: {text}" for key, text in sorted(system.sources.items())]
    if system.assumed:
        lines += ["", "assumed: " + ", ".join(sorted(system.assumed))]
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v:.4g}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(system: System) -> dict[str, Any]:
    values = dataclasses.asdict(system)
    values["assumed"] = sorted(system.assumed)
    return values
