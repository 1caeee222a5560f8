"""One mesh of ranks with named axes, in any order.

rank = sum over axes of coordinate(axis) * stride(axis), strides growing in the order of `plan.order`:
with `tp-cp-dp-pp` tensor-parallel neighbours are ranks r and r+1, pipeline neighbours are far apart;
`tp-cp-pp-dp` puts data parallelism last, so that a scale-up domain holds whole pipelines.

All of it is arithmetic on integers and works for any number of ranks without a process group; only
`device_mesh` makes torch's. Torch's mesh always has the axes (pp, dp, cp, tp), and the rank tensor it
is built from is permuted: code above never needs to know the order.

Parameters are sharded over dp and cp as one axis, in runs of `plan.shard` ranks whose neighbours lie as
near as the order allows: dp x cp = replicate x shard, and (pp, replicate, shard, tp) is another view of
the same ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from timetrial.config import AXES, Plan

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

CANONICAL = ("pp", "dp", "cp", "tp")
"""Axes by which ranks are told apart. In torch's mesh dp and cp may change places: see `data_axes`."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of one plan."""

    sizes: dict[str, int]
    """Axis -> degree."""
    order: tuple[str, ...]
    """Axes from the fastest to the slowest varying."""
    shard: int
    """Ranks of a shard group, a divisor of dp x cp."""

    @classmethod
    def of(cls, plan: Plan) -> Mesh:
        """The mesh of `plan`, whose order must be a permutation of the axes (`plan.validate`)."""
        return cls({axis: getattr(plan, axis) for axis in AXES}, tuple(plan.order.split("-")), plan.shard_size)

    @property
    def world_size(self) -> int:
        size = 1
        for degree in self.sizes.values():
            size *= degree
        return size

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on `axis`."""
        stride = 1
        for faster in self.order[: self.order.index(axis)]:
            stride *= self.sizes[faster]
        return stride

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; axes left out are 0."""
        return sum(coordinate * self.stride(axis) for axis, coordinate in coordinates.items())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> coordinate of `rank`."""
        return {axis: rank // self.stride(axis) % self.sizes[axis] for axis in self.order}

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that share with `rank` every coordinate but those of `axes`, first axis slowest."""
        here = self.coordinates(rank)
        spans = [range(self.sizes[axis]) for axis in axes]
        return [self.rank(**(here | dict(zip(axes, point, strict=True)))) for point in itertools.product(*spans)]

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups over `axes`, by their lowest rank; each rank is in exactly one."""
        firsts = (r for r in range(self.world_size) if all(self.coordinates(r)[axis] == 0 for axis in axes))
        return [self.group(first, *axes) for first in firsts]

    @property
    def data_axes(self) -> tuple[str, str]:
        """dp and cp, the slower varying first."""
        slower, faster = sorted(("dp", "cp"), key=self.order.index, reverse=True)
        return slower, faster

    def shard_groups(self) -> list[list[int]]:
        """Ranks that share one copy of their parameters."""
        n = self.shard
        return [g[i : i + n] for g in self.groups(*self.data_axes) for i in range(0, len(g), n)]

    def replicate_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard, one of each shard group."""
        n = self.shard
        return [g[i::n] for g in self.groups(*self.data_axes) for i in range(n)]

    def rank_tensor(self) -> torch.Tensor:
        """Ranks [pp, *data_axes, tp]."""
        import torch

        axes = ("pp", *self.data_axes, "tp")
        spans = [range(self.sizes[axis]) for axis in axes]
        ranks = [self.rank(**dict(zip(axes, point, strict=True))) for point in itertools.product(*spans)]
        return torch.tensor(ranks, dtype=torch.int).view([self.sizes[axis] for axis in axes])

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Torch's mesh with axes pp, dp, cp, tp. Needs the process group; collective."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh(device_type, self.rank_tensor(), mesh_dim_names=("pp", *self.data_axes, "tp"))

    def fsdp_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        """The view of `mesh` that parameters are sharded over, of this rank.

        One axis where all ranks of dp x cp share a copy, else (replicate, shard); None where there is one
        such rank. Collective.
        """
        ranks = self.sizes["dp"] * self.sizes["cp"]
        if ranks == 1:
            return None
        both = mesh[self.data_axes]._flatten("fsdp")
        if self.shard == ranks:
            return both
        return both._unflatten(0, (ranks // self.shard, self.shard), ("replicate", "shard"))


def describe(plan: Plan, gpus_per_node: int = 8, domain: int | None = None) -> str:
    """The mesh in words, for `--dry-run`: each axis's groups and how far they reach.

    `domain` is the number of ranks in one scale-up (NVLink) domain; a node where None. Ranks fill nodes
    and domains in order.
    """
    mesh = Mesh.of(plan)
    world = mesh.world_size
    domain = domain or gpus_per_node
    nodes = -(-world // gpus_per_node)
    lines = [
        f"{world} ranks on {nodes} node{'s' * (nodes != 1)} of {gpus_per_node}"
        + (f", scale-up domains of {domain}" if domain != gpus_per_node else "")
        + f"; order {plan.order}, fastest first"
    ]
    views = [(axis, mesh.groups(axis)) for axis in mesh.order]
    if plan.dp > 1 and plan.cp > 1:
        views.append(("dp x cp", mesh.groups("dp", "cp")))
    if plan.shard_size < plan.dp * plan.cp:
        views += [("shard", mesh.shard_groups()), ("replicate", mesh.replicate_groups())]
    for name, groups in views:
        size = len(groups[0])
        if size == 1:
            lines.append(f"  {name:8} 1")
            continue
        reach = _inside(groups, gpus_per_node, "node")
        if domain != gpus_per_node:
            reach += "; " + _inside(groups, domain, "domain")
        lines.append(f"  {name:8} {size:<5} {len(groups)} group{'s' * (len(groups) != 1)}, {reach}")
        shown = groups if len(groups) <= 3 else [*groups[:2], groups[-1]]
        for i, group in enumerate(shown):
            gap = "... " if len(groups) > 3 and i == 2 else ""
            lines.append(f"           {gap}{_ranks(group)}")
    return "\n".join(lines)


def _inside(groups: list[list[int]], size: int, word: str) -> str:
    """How many groups lie within one unit of `size` consecutive ranks."""
    inside = sum(1 for group in groups if len({rank // size for rank in group}) == 1)
    if inside == len(groups):
        return f"all within one {word}"
    if inside == 0:
        spans = [len({rank // size for rank in group}) for group in groups]
        low, high = min(spans), max(spans)
        return f"each over {low if low == high else f'{low} to {high}'} {word}s"
    return f"{inside} of {len(groups)} within one {word}"


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks in short: `0-3`, `0, 8, ... 56`, or one after another."""
    ranks = sorted(ranks)
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(ranks) > 2 and steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 6:
        return f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ... {ranks[-1]}"
    return ", ".join(map(str, ranks))
