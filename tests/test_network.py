"""Seconds of collectives: against measured points, against what must hold, and which algorithm wins where."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from timetrial.config import Plan, replace
from timetrial.errors import UserError
from timetrial.predict.network import KINDS, Cost, Efficiency, collective_s, send_s, with_overrides
from timetrial.predict.placement import Placement, lie
from timetrial.systems.rates import Rates
from timetrial.systems.system import ScaleOut, System, load

H100, GB200 = load("h100-sxm"), load("gb200-nvl72")
MIB = 2**20


def placed(ranks: int, domains: int = 1, most: int | None = None) -> Placement:
    k = ranks // domains
    return Placement(ranks, domains, k, most or k, max(1, ranks // 8), min(k, 8))


def bus_rate(kind: str, nbytes: float, place: Placement, system: System) -> float:
    """GB/s as nccl-tests count them: what the slowest link of a ring would carry."""
    n = place.ranks
    factor = (2 if kind == "all_reduce" else 1) * (n - 1) / n
    return factor * nbytes / collective_s(kind, nbytes, place, system).seconds / 1e9


@pytest.mark.parametrize(
    ("system", "kind", "ranks", "measured"),
    [
        (H100, "all_gather", 8, 336),
        (H100, "all_reduce", 8, 445),
        (GB200, "all_gather", 4, 564),
        (GB200, "all_reduce", 4, 628),
    ],
)
def test_measured_rates_at_512_mib(system: System, kind: str, ranks: int, measured: float) -> None:
    assert bus_rate(kind, 512 * MIB, placed(ranks), system) == pytest.approx(measured, rel=0.15)


def test_a_small_all_reduce_takes_16_us() -> None:
    assert collective_s("all_reduce", 1024, placed(8), H100).seconds == pytest.approx(16e-6, rel=0.15)


def test_limits_that_nccl_s_developers_give() -> None:
    """nccl-tests issue 212: about 370 GB/s without and 480 with NVLink SHARP on 8 H100."""
    assert bus_rate("all_gather", 2**35, placed(8), H100) == pytest.approx(370, rel=0.03)
    assert bus_rate("all_reduce", 2**35, placed(8), H100) == pytest.approx(480, rel=0.03)


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200-nvl72", "gb300-nvl72"])
def test_measured_curves_of_four_and_eight_accelerators(name: str) -> None:
    """What NCCL took at 64 and 512 MiB (`systems/rates.py` says where from); only ramp_s was set by any, of 8 H100."""
    system = load(name)
    rates = Rates.load(system)
    for kind, size in itertools.product(("all_gather", "reduce_scatter", "all_reduce"), (64 * MIB, 512 * MIB)):
        ranks = system.node.accelerators
        predicted = collective_s(kind, size, placed(ranks), system).seconds
        assert predicted == pytest.approx(rates.nccl_s(kind, ranks, size), rel=0.25), (kind, size)


def test_all_gathers_slow_down_over_nodes() -> None:
    """NCCL issue 1229: reduce-scatter over 4, 8, ... 128 nodes of 8 H100 gave 360, 345, 320, 300, 280, 260 GB/s.

    The size is not said; large ones are taken.
    """
    rates = [bus_rate("reduce_scatter", 2**33, placed(8 * n, n), H100) for n in (4, 8, 16, 32, 64, 128)]
    assert rates == sorted(rates, reverse=True)
    assert rates == pytest.approx([360, 345, 320, 300, 280, 260], rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [placed(8), placed(64, 8), placed(16, 16), placed(12, 2, 7)], ids=str)
def test_time_grows_with_bytes_and_never_beats_the_wire(kind: str, place: Placement) -> None:
    place = placed(2, min(2, place.domains)) if kind in ("send", "receive") else place
    before = 0.0
    for size in (1, 1000, 10**6, 3 * 10**6, 10**7, 10**8, 10**9, 10**10):
        cost = collective_s(kind, size, place, H100)
        assert cost.seconds > before
        before = cost.seconds
        rate = H100.scale_up.bytes_per_s if cost.network == "scale-up" else H100.scale_out.bytes_per_s
        assert cost.seconds > cost.wire_bytes / rate


def test_wire_bytes_of_rings() -> None:
    alone = Efficiency.of(H100)
    cost = collective_s("all_gather", 2**33, placed(64, 8), H100, alone)
    assert (cost.algorithm, cost.network) == ("ring", "scale-out")
    assert cost.wire_bytes == pytest.approx(2**33 * 63 / 64 / 8)  # eight rails share what leaves a node
    inside = collective_s("reduce_scatter", 2**33, placed(8), H100)
    assert (inside.algorithm, inside.network, inside.wire_bytes) == ("ring", "scale-up", 2**33 * 7 / 8)


def test_switches_add_up_large_all_reduces() -> None:
    assert collective_s("all_reduce", 2**30, placed(8), H100).algorithm == "in-switch"
    without = replace(H100, scale_up=replace(H100.scale_up, in_switch_reduction=False))
    slower = collective_s("all_reduce", 2**30, placed(8), without)
    assert slower.algorithm == "ring"
    assert 1.2 < slower.seconds / collective_s("all_reduce", 2**30, placed(8), H100).seconds < 1.75
    assert collective_s("all_reduce", 2**32, placed(16, 2), H100).algorithm == "in-switch tree"


def test_trees_win_where_steps_cost_more_than_bytes() -> None:
    assert collective_s("all_reduce", 1024, placed(256, 256), H100).algorithm == "tree"
    assert collective_s("all_reduce", 2**33, placed(256, 256), H100).algorithm == "ring"
    assert collective_s("all_gather", 1024, placed(256, 256), H100).algorithm == "tree"


def test_working_inside_first_is_for_libraries_that_do() -> None:
    does = with_overrides(Efficiency.of(H100), {"hierarchical": True})
    ring, cost = (collective_s("all_gather", 2**30, placed(32, 4), H100, e) for e in (None, does))
    assert (ring.algorithm, cost.algorithm) == ("ring", "hierarchical")
    assert cost.seconds < ring.seconds


def test_all_to_all_splits_over_both_networks() -> None:
    cost = collective_s("all_to_all", 2**30, placed(64, 8), H100)
    assert (cost.network, cost.wire_bytes) == ("scale-out", 2**30 * 56 / 64)
    in_rack = collective_s("all_to_all", 2**30, placed(64), GB200)
    assert (in_rack.network, in_rack.wire_bytes) == ("scale-up", 2**30 * 63 / 64)
    assert cost.seconds > 10 * in_rack.seconds


def test_the_domain_with_the_fewest_ranks_decides() -> None:
    even, uneven = placed(16, 2), Placement(16, 2, 4, 12, 4, 4)
    assert (
        collective_s("all_gather", 2**30, uneven, GB200).seconds
        > 1.5 * collective_s("all_gather", 2**30, even, GB200).seconds
    )


def test_a_mesh_without_switches_is_as_fast_as_its_peers() -> None:
    mesh = replace(H100, scale_up=replace(H100.scale_up, peer_bytes_per_s=450e9 / 7, in_switch_reduction=False))
    whole = collective_s("all_gather", 2**30, placed(8), mesh).seconds
    assert whole == pytest.approx(collective_s("all_gather", 2**30, placed(8), H100).seconds)
    assert (
        collective_s("send", 2**30, placed(2), mesh).seconds > 6 * collective_s("send", 2**30, placed(2), H100).seconds
    )


def test_a_message_is_its_latency_and_the_time_on_the_link() -> None:
    far = lie(Plan(tp=8, pp=4), H100, "edge")
    link, latency = send_s(32 * MIB, far, H100)
    assert link + latency == pytest.approx(collective_s("send", 32 * MIB, far, H100).seconds)
    assert 5e-6 < latency < 3e-5
    assert 32 * MIB / 50e9 < link < 1.5 * 32 * MIB / 50e9
    assert send_s(0, far, H100) == (0.0, 0.0)


def test_a_cpu_reaches_what_was_measured() -> None:
    cpu = replace(H100, accelerator=replace(H100.accelerator, generation="cpu"))
    cpu = replace(cpu, scale_up=replace(cpu.scale_up, bytes_per_s=2e9, peer_bytes_per_s=2e9, in_switch_reduction=False))
    cost = collective_s("all_reduce", 4e9, placed(2), cpu)
    assert (cost.algorithm, cost.protocol) == ("ring", "plain")
    assert cost.seconds == pytest.approx(2 + 2 * cpu.scale_up.latency_s)


def test_nothing_to_do() -> None:
    assert collective_s("all_reduce", 2**30, placed(1), H100) == Cost(0.0, "none", 0.0, "scale-up")
    assert collective_s("all_reduce", 0, placed(8), H100).seconds == 0


def test_bad_requests() -> None:
    with pytest.raises(ValueError, match="no collective 'gather'"):
        collective_s("gather", 1, placed(8), H100)
    alone = replace(H100, scale_out=ScaleOut(0.0, 0.0, "none", 0))
    with pytest.raises(UserError, match="16 ranks in 2 scale-up domains, but h100-sxm has no scale-out network"):
        collective_s("all_gather", 1, placed(16, 2), alone)
    assert collective_s("all_gather", 1, placed(8), alone).seconds > 0
    base = Efficiency.of(H100)
    assert with_overrides(base, {"scale_out": 0.7}).scale_out == 0.7
    for values, words in (({"scale_in": 0.5}, "unknown"), ({"scale_up": 1.5}, "share"), ({"ramp_s": -1.0}, "seconds")):
        with pytest.raises(UserError, match=words):
            with_overrides(base, values)


def test_no_torch() -> None:
    code = (
        "import sys, timetrial.predict.network, timetrial.predict.placement, timetrial.predict.schedule, "
        "timetrial.predict.actions, timetrial.predict.quick; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
