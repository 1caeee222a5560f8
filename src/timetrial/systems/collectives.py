"""Collectives within one scale-up domain, as measured with NCCL: time by kind, ranks and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from timetrial.errors import UserError
from timetrial.systems.curves import Line
from timetrial.systems.system import ScaleUp

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def bus_bytes(kind: str, ranks: int, size: float) -> float:
    """Bytes that each rank must send for a collective over a tensor of `size` bytes (nccl-tests' bus bandwidth)."""
    return size * (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class Collectives:
    """Measured times of one kind of machine, scaled to the fabric of another where they differ."""

    lines: Mapping[str, Mapping[int, Line]]
    """Kind -> ranks -> (bytes of the whole tensor, seconds)."""
    bytes_per_s: float
    """Of the fabric that was measured, one direction."""
    in_switch_reduction: bool
    """Whether the measured fabric's switches add up."""
    scale_up: ScaleUp
    """The fabric that is asked about."""

    def seconds(self, kind: str, ranks: int, size: float) -> float:
        """One collective over `ranks` of a domain; `size` in bytes is the whole tensor (all_to_all: all of one rank's).

        More ranks than were measured: the largest measured bandwidth, and a start that grows by the last measured
        step with each doubling.
        """
        if kind not in self.lines:
            raise UserError(f"no measured collective {kind!r}; there are {', '.join(self.lines)}")
        if not 2 <= ranks <= self.scale_up.domain:
            raise UserError(f"{ranks} ranks do not lie in one scale-up domain of {self.scale_up.domain}")
        if kind == "all_reduce" and self.in_switch_reduction and not self.scale_up.in_switch_reduction:
            # no switch adds up: a gather after a reduce-scatter
            return self.seconds("reduce_scatter", ranks, size) + self.seconds("all_gather", ranks, size)
        lines = self.lines[kind]
        known = sorted(lines)
        if ranks in lines:
            return self._line(kind, ranks, ranks, size)
        if ranks > known[-1]:
            step = lines[known[-1]].times[0] - lines[known[-2]].times[0] if len(known) > 1 else 0.0
            start = max(step, 0.0) * math.log2(ranks / known[-1])
            share = bus_bytes(kind, ranks, 1) / bus_bytes(kind, known[-1], 1)
            return start + self._line(kind, known[-1], ranks, size * share)
        if ranks < known[0]:
            return self._line(kind, known[0], ranks, size)
        above = next(n for n in known if n > ranks)
        below = known[known.index(above) - 1]
        part = math.log(ranks / below) / math.log(above / below)
        low, high = self._line(kind, below, ranks, size), self._line(kind, above, ranks, size)
        return float(low * (high / low) ** part)

    def _line(self, kind: str, measured: int, ranks: int, size: float) -> float:
        """The time measured over `measured` ranks, its part above the start scaled to this fabric."""
        line = self.lines[kind][measured]
        here = min(self.scale_up.bytes_per_s, self.scale_up.peer_bytes_per_s * (ranks - 1))
        return line.times[0] + (line.seconds(size) - line.times[0]) * self.bytes_per_s / here
