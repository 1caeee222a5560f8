"""What eager code costs on a machine that `timetrial calibrate` measured, beside products, attention and collectives.

In a file of points (`points.py`), all optional together:
    {"elementwise": {"silu": [[bytes read and written, microseconds], ...]},
     "optimizer": [[elements, microseconds], ...],
     "host": {"one": [microseconds of an operator, microseconds of a step], "tp": [...]},
     "beside": {"2": {"matmul": 1.1, "attention": 1.1, "elementwise": 1.3}},
     "idle_bytes": {"one": 300000000, "several": 400000000}, "reserved": {"one": 0.1, "several": 0.2}}
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
PATTERNS = ("one", "accumulating", "selective", "full", "several")
"""Ways of using memory: one rank, with several micro batches, with recomputation, one of several ranks."""
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
    idle_bytes: Mapping[str, float]
    """Memory of a rank that has imported all and holds nothing, bytes: "one" alone, "several" one of several."""
    reserved: Mapping[str, float]
    """By PATTERNS: what the heap holds beyond activations and temporaries, as a share of them."""

    def idle(self, ranks: int) -> float:
        """Bytes of an idle rank of so many."""
        return self.idle_bytes.get("several" if ranks > 1 else "one", self.idle_bytes["one"])

    def share(self, ranks: int, recompute: str, micro_batches: int) -> float:
        """What the heap holds beyond what is alive, as a share. Each way of running adds what it adds on one rank."""
        one = self.reserved["one"]
        ways = ["several"] * (ranks > 1) + [recompute] + ["accumulating"] * (micro_batches > 1)
        return one + sum(max(0.0, self.reserved.get(way, one) - one) for way in ways)

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
    shares: dict[str, Mapping[str, float]] = {}
    for name, low, high in (("idle_bytes", 1.0, 1e12), ("reserved", 0.0, LARGEST)):
        shares[name] = _table(content, name, where)
        for pattern, value in shares[name].items():
            if pattern not in PATTERNS or not _number(value, low, high):
                raise UserError(f"rates file {where}: {name}.{pattern} is {value!r}; calibrate again")
        if "one" not in shares[name]:
            raise UserError(f"rates file {where}: {name}.one is missing; calibrate again")
    optimizer = line(content.get("optimizer"), f"{where}: optimizer")
    return Eager(operators, optimizer, hosts, beside, shares["idle_bytes"], shares["reserved"])


def _table(content: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"rates file {where}: {name} is no object; see docs/systems.md for its form")
    return table


def _number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
