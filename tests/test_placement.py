"""Placements by strides against a count of the mesh's ranks, and the domains that jobs fill."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from timetrial.config import AXES, Plan, replace
from timetrial.errors import UserError
from timetrial.parallel.mesh import Mesh
from timetrial.predict.placement import GROUPS, Placement, edges, lie, usable_domain
from timetrial.systems.system import System, load

HOPPER = load("h100-sxm")
RACK = load("gb200-nvl72")


def system(node: int, domain: int) -> System:
    return replace(
        HOPPER, node=replace(HOPPER.node, accelerators=node), scale_up=replace(HOPPER.scale_up, domain=domain)
    )


def counted(groups: list[list[int]], unit: int) -> tuple[int, int, int]:
    """Units, fewest and most ranks in one, of the worst of `groups`."""
    spreads = []
    for group in groups:
        counts = [sum(1 for _ in same) for _, same in itertools.groupby(sorted(r // unit for r in group))]
        spreads.append((len(counts), -min(counts), max(counts)))
    units, least, most = max(spreads)
    return units, -least, most


def groups_of(plan: Plan, group: str) -> list[list[int]]:
    mesh = Mesh.of(plan)
    if group in AXES:
        return mesh.groups(group)
    if group == "dp-cp":
        return mesh.groups("dp", "cp")
    if group == "shard":
        return mesh.shard_groups()
    if group == "replicate":
        return mesh.replicate_groups()
    if group == "ep":
        return [g[i : i + plan.ep] for g in mesh.groups(*mesh.data_axes) for i in range(0, len(g), plan.ep)]
    return [[g[p], g[(p + 1) % plan.pp]] for g in mesh.groups("pp") for p in range(plan.pp)]


def random_plan(rng: random.Random) -> Plan:
    degrees = {axis: rng.choice((1, 1, 2, 3, 4, 5, 6, 8, 12)) for axis in AXES}
    parts = [n for n in range(1, degrees["dp"] * degrees["cp"] + 1) if degrees["dp"] * degrees["cp"] % n == 0]
    order = "-".join(rng.sample(AXES, 4))
    return Plan(**degrees, order=order, shard=rng.choice(parts), ep=rng.choice(parts))


@pytest.mark.parametrize("seed", range(120))
def test_strides_say_what_counting_says(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    while plan.world_size > 3000:
        plan = random_plan(rng)
    node, domain = rng.choice(((8, 8), (4, 72), (4, 36), (8, 16), (1, 6), (8, 4)))
    machine = system(node, domain)
    usable = rng.choice((None, rng.randint(1, domain)))
    unit = usable or usable_domain(plan.world_size, machine)
    for group in GROUPS:
        if group == "edge" and plan.pp == 1:
            continue
        ranks = groups_of(plan, group)
        found = lie(plan, machine, group, usable)
        assert found.ranks == len(ranks[0])
        assert (found.domains, found.in_domain, found.most_in_domain) == counted(ranks, unit), (plan, group)
        nodes, _, per_node = counted(ranks, node)
        assert (found.nodes, found.per_node) == (nodes, per_node), (plan, group)
    for p, edge in enumerate(edges(plan, machine, usable)):
        pairs = [[g[p], g[(p + 1) % plan.pp]] for g in Mesh.of(plan).groups("pp")]
        assert (edge.domains, edge.in_domain) == counted(pairs, unit)[:2]


@pytest.mark.parametrize(
    ("degrees", "order", "usable"),
    [
        ({"dp": 1000, "cp": 2}, "cp-tp-pp-dp", 72),
        ({"tp": 5, "dp": 700}, "tp-cp-dp-pp", 36),
        ({"dp": 997}, "dp-tp-cp-pp", 7),
    ],
)
def test_long_groups_repeat_their_pattern(degrees: dict[str, int], order: str, usable: int) -> None:
    plan = Plan(order=order, **{"tp": 3, "pp": 1} | degrees)
    for group in ("dp", "dp-cp"):
        found = lie(plan, RACK, group, usable)
        assert (found.domains, found.in_domain, found.most_in_domain) == counted(groups_of(plan, group), usable)


def test_the_405b_plan_of_64_dgx_h100() -> None:
    """TP8 fills a node, everything else crosses (NVIDIA's configuration of MLPerf Training v5.0)."""
    plan = Plan(tp=8, pp=8, cp=2, dp=4, vp=8, gbs=1152)
    assert lie(plan, HOPPER, "tp") == Placement(8, 1, 8, 8, 1, 8)
    assert lie(plan, HOPPER, "dp-cp") == Placement(8, 8, 1, 1, 8, 1)
    assert all(edge.domains == 2 for edge in edges(plan, HOPPER))


def test_a_rack_holds_whole_pipelines_when_data_parallelism_is_last() -> None:
    plan = Plan(tp=4, pp=8, cp=2, dp=8, order="tp-cp-pp-dp")
    assert usable_domain(plan.world_size, RACK) == 64
    assert all(edge.inside for edge in edges(plan, RACK))
    assert lie(plan, RACK, "dp-cp") == Placement(16, 8, 2, 2, 16, 1)
    across = replace(plan, order="tp-cp-dp-pp")
    assert all(not edge.inside for edge in edges(across, RACK))
    assert lie(across, RACK, "dp-cp").inside


@pytest.mark.parametrize(
    ("world", "usable"),
    [(4, 72), (72, 72), (128, 64), (512, 64), (2304, 72), (2560, 64), (104, 52), (148, 72), (96, 48)],
)
def test_jobs_fill_racks_in_equal_blocks(world: int, usable: int) -> None:
    assert usable_domain(world, RACK) == usable


def test_edges_differ_where_domains_hold_parts_of_a_pipeline() -> None:
    found = edges(Plan(tp=4, pp=4), HOPPER)
    assert [edge.domains for edge in found] == [1, 2, 1, 2]
    assert lie(Plan(tp=4, pp=4), HOPPER, "edge").domains == 2


def test_bad_requests() -> None:
    with pytest.raises(UserError, match=r"usable=80 .* has 72; use 1 to 72"):
        lie(Plan(tp=4), RACK, "tp", usable=80)
    with pytest.raises(ValueError, match="no group 'tpp'"):
        lie(Plan(tp=4), RACK, "tpp")
    assert edges(Plan(tp=4), RACK) == ()


def test_131072_ranks_take_microseconds() -> None:
    plan = Plan(tp=8, cp=2, pp=16, dp=512, shard=64)
    assert plan.world_size == 131072
    start = time.perf_counter()
    for group in GROUPS:
        lie(plan, HOPPER, group)
    assert time.perf_counter() - start < 0.01
