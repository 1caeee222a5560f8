"""Which figures a system file may hold, and between which bounds each makes sense.

The bounds are wide: they catch a wrong unit (TB/s for GB/s, sparse for dense times a thousand), not a new chip.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Bounds of one figure, both allowed."""

    low: float
    high: float
    unit: str
    whole: bool = False
    """Whole numbers only."""

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.low:g} to {self.high:g}{' ' + self.unit if self.unit else ''}"


_PEAK = Range(0.005, 200_000, "TFLOP/s, dense")

RANGES: dict[str, Range] = {
    "accelerator.memory_gb": Range(1, 2000, "GB (1e9 bytes)"),
    "accelerator.memory_gib": Range(1, 2000, "GiB"),
    "accelerator.memory_gb_per_s": Range(5, 50_000, "GB/s"),
    "accelerator.sms": Range(1, 2000, "multiprocessors", whole=True),
    "accelerator.tdp_w": Range(5, 10_000, "W"),
    **{f"accelerator.peak_tflops.{fmt}": _PEAK for fmt in ("fp32", "tf32", "bf16", "fp8", "fp6", "fp4")},
    "node.accelerators": Range(1, 128, "accelerators", whole=True),
    "scale_up.domain": Range(1, 4096, "accelerators", whole=True),
    "scale_up.gb_per_s": Range(0.1, 20_000, "GB/s, one direction"),
    "scale_up.peer_gb_per_s": Range(0.1, 20_000, "GB/s, one direction"),
    "scale_up.latency_us": Range(0.05, 1000, "microseconds"),
    "scale_up.in_switch_reduction": Range(0, 1, ""),
    "scale_out.gb_per_s": Range(0.05, 2000, "GB/s, one direction"),
    "scale_out.latency_us": Range(0.1, 10_000, "microseconds"),
    "scale_out.rails": Range(1, 128, "adapters of a node", whole=True),
    "host.launch_us": Range(0.05, 1000, "microseconds"),
    "power.average_w": Range(1, 20_000, "W"),
}
"""Dotted name of each figure that needs a source -> its bounds."""

TEXTS: dict[str, str] = {
    "name": "a short name in lower case",
    "title": "one line that says what it is",
    "aliases": "a list of names under which results are published",
    "rates": "the name of a system whose measured kernels hold, or the path of a file of measured points",
    "accelerator.name": "the vendor's name",
    "accelerator.generation": "the architecture",
    "scale_up.kind": "nvlink, xgmi, pcie, memory or none",
    "scale_out.kind": "infiniband, ethernet or none",
    "power.basis": "what was measured",
}
"""What needs no source -> what it must be."""


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean ...?)", or nothing where no known name is near."""
    import difflib  # costs milliseconds, and only a mistake needs it

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" (did you mean {found[0]}?)" if found else ""
