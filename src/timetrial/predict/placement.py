"""How the groups of a plan's axes lie on a machine: how many of their ranks share a scale-up domain or a node.

`parallel/mesh.py` says which ranks form a group; here the same is said by strides alone, so that a plan for
131,072 ranks costs no more than one for 8 (a test compares both on random plans). Ranks fill nodes and
scale-up domains in order, as launchers place them.

A group is a set of runs: (stride, count) of each of its axes. With a domain of U ranks, a run lies wholly in a
domain where stride x count divides U, one rank a domain where U divides stride, and U / stride ranks a domain
where stride divides U and U divides stride x count. Other runs straddle domains: then one group of each kind is
laid out, over as many ranks as its pattern needs to repeat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from timetrial.config import AXES, Plan
from timetrial.errors import UserError
from timetrial.parallel.mesh import Mesh

if TYPE_CHECKING:
    from timetrial.systems.system import System

GROUPS = (*AXES, "dp-cp", "shard", "replicate", "ep", "edge")
"""What `lie` can place: an axis; dp and cp as one; ranks that share one copy of their parameters, and those that hold
the same shard; expert parallelism, over neighbours of dp x cp; two neighbours on the pipeline."""

Run = tuple[int, int]
"""Stride and count, ranks."""

Spread = tuple[int, int, int]
"""Units (domains or nodes) that a group reaches into, the fewest and the most of its ranks in one of them."""


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a group are. Of all groups over these axes it is the worst placed."""

    ranks: int
    """Ranks of the group."""
    domains: int
    """Scale-up domains that it reaches into."""
    in_domain: int
    """Its ranks in the domain where it has the fewest: they carry the traffic of that domain over their own network
    ports."""
    most_in_domain: int
    """Its ranks in the domain where it has the most."""
    nodes: int
    """Nodes that it reaches into."""
    per_node: int
    """Its ranks in the node where it has the most."""

    @property
    def inside(self) -> bool:
        """Whether the scale-up network alone connects it."""
        return self.domains == 1

    @property
    def even(self) -> bool:
        """Whether it has equally many ranks in each of its domains."""
        return self.in_domain == self.most_in_domain


def usable_domain(world: int, system: System) -> int:
    """Accelerators of one scale-up domain that a job of `world` ranks fills before it goes to the next.

    Schedulers give whole nodes in blocks of equal size: a job of 512 takes 64 of the 72 of an NVL72 rack (segments
    of 16 trays), one of 2,304 takes all. So: the largest part of the job in whole nodes that divides it evenly and
    fits; the whole domain where that would leave half of it empty.
    """
    node, domain = system.node.accelerators, system.scale_up.domain
    if world <= domain:
        return domain
    for size in range(domain - domain % node, domain // 2, -node):
        if world % size == 0:
            return size
    return domain


def lie(plan: Plan, system: System, group: str, usable: int | None = None) -> Placement:
    """How the worst placed group over `group` (one of GROUPS) of `plan` lies on `system`.

    `usable` accelerators of a scale-up domain are filled in order; `usable_domain` where None. Raises UserError on
    a `usable` that the system has not got, ValueError on an unknown group.
    """
    if group not in GROUPS:
        raise ValueError(f"no group {group!r}; there are {', '.join(GROUPS)}")
    domain = _domain(plan, system, usable)
    if group == "edge":
        return max(edges(plan, system, usable), key=_badness)
    runs = _runs(plan, group)
    strides = _strides(plan)
    if runs is None:  # parts that cut across an axis: no strides describe them
        return _brute(plan, system, group, domain)
    domains = _spread(runs, strides, domain)
    nodes = _spread(runs, strides, system.node.accelerators)
    ranks = math.prod(count for _, count in runs)
    return Placement(ranks, domains[0], domains[1], domains[2], nodes[0], nodes[2])


def edges(plan: Plan, system: System, usable: int | None = None) -> tuple[Placement, ...]:
    """The pairs (p, p + 1) of pipeline ranks, the last of them (pp - 1, 0), each where it is worst placed.

    Empty without a pipeline.
    """
    if plan.pp == 1:
        return ()
    domain = _domain(plan, system, usable)
    stride = Mesh.of(plan).stride("pp")
    others = [(s, c) for axis, (s, c) in _strides(plan).items() if axis != "pp"]
    placements = []
    for p in range(plan.pp):
        here, there = p * stride, (p + 1) % plan.pp * stride
        apart = []
        for unit in (domain, system.node.accelerators):
            apart.append(any((b + here) // unit != (b + there) // unit for b in _residues(others, unit)))
        far, off_node = apart
        placements.append(Placement(2, 1 + far, 2 - far, 2 - far, 1 + off_node, 2 - off_node))
    return tuple(placements)


def _domain(plan: Plan, system: System, usable: int | None) -> int:
    if usable is None:
        return usable_domain(plan.world_size, system)
    if not 1 <= usable <= system.scale_up.domain:
        raise UserError(
            f"usable={usable} accelerators of a scale-up domain, but one of {system.name} has "
            f"{system.scale_up.domain}; use 1 to {system.scale_up.domain}"
        )
    return usable


def _badness(p: Placement) -> tuple[int, int, int]:
    return p.domains, -p.in_domain, p.nodes


def _worse(spread: Spread) -> tuple[int, int, int]:
    units, least, most = spread
    return units, -least, most


def _strides(plan: Plan) -> dict[str, Run]:
    """Axis -> stride and count, fastest first."""
    strides, stride = {}, 1
    for axis in plan.order.split("-"):
        count: int = getattr(plan, axis)
        strides[axis] = (stride, count)
        stride *= count
    return strides


def _runs(plan: Plan, group: str) -> list[Run] | None:
    """The runs of a group, fastest first; None where strides do not describe it."""
    strides = _strides(plan)
    if group in AXES:
        return [strides[group]]
    fast, slow = sorted((strides["dp"], strides["cp"]))
    if group == "dp-cp":
        return [fast, slow]
    part = plan.ep if group == "ep" else plan.shard_size
    inner, outer = _cut(fast, slow, part)
    return outer if group == "replicate" else inner


def _cut(fast: Run, slow: Run, part: int) -> tuple[list[Run] | None, list[Run] | None]:
    """Runs of `part` neighbours on two axes taken as one, and of those that have the same place in their part."""
    (s, n), (t, m) = fast, slow
    if n % part == 0:
        return [(s, part)], [(s * part, n // part), (t, m)]
    if part % n == 0 and m % (part // n) == 0:
        k = part // n
        return [(s, n), (t, k)], [(t * k, m // k)]
    return None, None


def _spread(runs: list[Run], strides: dict[str, Run], unit: int) -> Spread:
    """Units of `unit` consecutive ranks that a group touches, the fewest and the most of its ranks in one of them."""
    runs = [run for run in runs if run[1] > 1]
    within, units = 1, 1
    for stride, count in runs:
        if unit % (stride * count) == 0:
            within *= count
        elif stride % unit == 0:
            units *= count
        elif unit % stride == 0 and stride * count % unit == 0:
            within *= unit // stride
            units *= stride * count // unit
        else:
            return _straddle(runs, strides, unit)
    return units, within, within


def _straddle(runs: list[Run], strides: dict[str, Run], unit: int) -> Spread:
    """As `_spread`, for groups that lie differently on different domains: the worst of them."""
    *inner, (stride, count) = runs
    period = unit // math.gcd(stride, unit)
    repeats = max(0, count // period - 2)  # whole periods beyond the second look like the ones before
    offsets = [0]
    for s, c in inner:
        offsets = [o + s * i for i in range(c) for o in offsets]
    worst: Spread | None = None
    for base in _residues(_rest(runs, strides), unit):
        hist = _histogram(base, offsets, stride, count - repeats * period, unit)
        units = len(hist)
        if repeats:
            more = _histogram(base, offsets, stride, count - (repeats - 1) * period, unit)
            units += repeats * (len(more) - units)
        found = (units, min(hist.values()), max(hist.values()))
        worst = found if worst is None else max(worst, found, key=_worse)
    assert worst is not None
    return worst


def _histogram(base: int, offsets: list[int], stride: int, count: int, unit: int) -> dict[int, int]:
    hist: dict[int, int] = {}
    for i in range(count):
        first = base + i * stride
        for offset in offsets:
            at = (first + offset) // unit
            hist[at] = hist.get(at, 0) + 1
    return hist


def _rest(runs: list[Run], strides: dict[str, Run]) -> list[Run]:
    """What the ranks of the plan vary by outside of a group: all strides between those of its runs."""
    world = math.prod(count for _, count in strides.values())
    rest, at = [], 1
    for stride, count in sorted(runs):
        rest.append((at, stride // at))
        at = stride * count
    return [*rest, (at, world // at)]


def _residues(others: list[Run], unit: int) -> set[int]:
    """Places within a unit of `unit` ranks at which groups begin."""
    found = {0}
    for stride, count in others:
        steps = min(count, unit // math.gcd(stride, unit))
        found = {(r + i * stride) % unit for r in found for i in range(steps)}
    return found


def _brute(plan: Plan, system: System, group: str, domain: int) -> Placement:
    mesh = Mesh.of(plan)
    if group == "ep":
        n = plan.ep
        groups = [g[i : i + n] for g in mesh.groups(*mesh.data_axes) for i in range(0, len(g), n)]
    else:
        groups = mesh.shard_groups() if group == "shard" else mesh.replicate_groups()
    units, least, most = max((_count(ranks, domain) for ranks in groups), key=_worse)
    nodes, _, per_node = max((_count(ranks, system.node.accelerators) for ranks in groups), key=_worse)
    return Placement(len(groups[0]), units, least, most, nodes, per_node)


def _count(ranks: list[int], unit: int) -> Spread:
    hist: dict[int, int] = {}
    for rank in ranks:
        hist[rank // unit] = hist.get(rank // unit, 0) + 1
    return len(hist), min(hist.values()), max(hist.values())
