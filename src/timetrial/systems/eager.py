"""What eager code costs on a machine that `timetrial calibrate` measured, beside products, attention and collectives.

In a file of points (`points.py`), all optional together:
    {"elementwise": {"silu": [[bytes read and written, microseconds], ...]},
     "optimizer": [[elements, microseconds], ...],
     "host": {"one": [microseconds of an operator, microseconds of a step], "tp": [...]},
     "beside": {"2": {"matmul": 1.1, "attention": 1.1, "elementwise": 1.3}},
     "idle_bytes": [300000000, 400000000], "reserved": [0.1, 0.2]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from timetrial.errors import UserError
from timetrial.systems.curves import Line

KINDS = ("matmul", "attention", "elementwise")
LAYOUTS = ("one", "selective", "full", "lanes", "zero1", "zero3", "tp", "cp", "pp")
"""Ways of running whose host cost is measured: one rank, one that recomputes, one in lanes, two ranks over an axis."""
LARGEST = 100.0
"""A factor above this is a mistake."""


@dataclass(frozen=True)
class HostCost:
    """What Python, autograd and dispatch add to the operators' own time."""

    operator_s: float
    """Of each operator of a trace, views and bookkeeping around it counted in, seconds."""
    step_s: float
    """Of a step, outside of its layers, seconds."""


@dataclass(frozen=True)
class Eager:
    """Measured costs of eager code."""

    operators: Mapping[str, Line]
    """Operator bound by memory, as a trace names it -> (bytes read and written, seconds)."""
    optimizer: Line
    """(trained elements on one rank, seconds): clipping and AdamW."""
    hosts: Mapping[str, HostCost]
    """By LAYOUTS; "one" is always there."""
    beside: Mapping[int, Mapping[str, float]]
    """Processes at work at once -> kind of kernel -> its time as a multiple of that alone."""
    idle_bytes: tuple[int, int]
    """Memory of a rank that has imported all and holds nothing: alone, and one of several, bytes."""
    reserved: tuple[float, float]
    """What the heap holds beyond activations and temporaries, as a share of them: alone, and of one of several."""

    def host(self, layout: str) -> HostCost:
        """Of a layout; of one rank where it was not measured."""
        return self.hosts.get(layout, self.hosts["one"])

    def factor(self, kind: str, processes: int) -> float:
        """How many times longer a kernel takes while so many work at once; of the nearest measured number."""
        if processes == 1 or not self.beside:
            return 1.0
        return self.beside[min(self.beside, key=lambda n: abs(n - processes))][kind]


def parse(content: Mapping[str, Any], where: str, line: Callable[[Any, str], Line]) -> Eager | None:
    """None where the file has none of it. `line` reads rows of (size, microseconds).

    Raises UserError naming what is not as described above.
    """
    if "elementwise" not in content:
        return None
    operators = {
        name: line(rows, f"{where}: elementwise.{name}") for name, rows in _table(content, "elementwise", where).items()
    }
    hosts = {}
    for layout, pair in _table(content, "host", where).items():
        if layout not in LAYOUTS:
            raise UserError(f"rates file {where}: host.{layout} is no layout; there are {', '.join(LAYOUTS)}")
        if not isinstance(pair, list) or len(pair) != 2 or not all(_number(us, 0.0, 1e7) for us in pair):
            raise UserError(
                f"rates file {where}: host.{layout} is {pair!r}; give microseconds of an operator and a step"
            )
        hosts[layout] = HostCost(pair[0] / 1e6, pair[1] / 1e6)
    if "one" not in hosts:
        raise UserError(f"rates file {where}: host.one is missing; calibrate again")
    beside: dict[int, Mapping[str, float]] = {}
    for count, factors in _table(content, "beside", where).items():
        if not count.isdecimal() or int(count) < 2:
            raise UserError(f"rates file {where}: beside {count!r} processes; give a number from 2")
        if not isinstance(factors, dict) or set(factors) != set(KINDS):
            raise UserError(f"rates file {where}: beside.{count} must have {', '.join(KINDS)}")
        for kind, factor in factors.items():
            if not _number(factor, 1.0, LARGEST):
                raise UserError(f"rates file {where}: beside.{count}.{kind} is {factor!r}; give a number from 1")
        beside[int(count)] = factors
    idle = content.get("idle_bytes")
    if not isinstance(idle, list) or len(idle) != 2 or not all(_number(n, 1.0, 1e12) for n in idle):
        raise UserError(f"rates file {where}: idle_bytes is {idle!r}; give the bytes of an idle rank, alone and not")
    optimizer = line(content.get("optimizer"), f"{where}: optimizer")
    reserved = content.get("reserved")
    if not isinstance(reserved, list) or len(reserved) != 2 or not all(_number(n, 0.0, LARGEST) for n in reserved):
        raise UserError(f"rates file {where}: reserved is {reserved!r}; give two shares, of a rank alone and not")
    idle, reserved = (int(idle[0]), int(idle[1])), (float(reserved[0]), float(reserved[1]))
    return Eager(operators, optimizer, hosts, beside, idle, reserved)


def _table(content: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"rates file {where}: {name} is no object; see docs/systems.md for its form")
    return table


def _number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
