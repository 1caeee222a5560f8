"""Seconds of a collective on a placement: the cheapest algorithm, as NCCL chooses, by a cost model of its kind.

Every algorithm costs a start, a number of steps over each network, and bytes over each network at the share of
line rate that messages of that size reach (alpha-beta; Thakur, Rabenseifner and Gropp 2005, Optimization of
Collective Communication Operations in MPICH). For n ranks, k of them in each of d domains, and S bytes of the whole
tensor, a rank carries

| collective             | algorithm    | over scale-up      | over scale-out     | steps up, out                  |
| ---------------------- | ------------ | ------------------ | ------------------ | ------------------------------ |
| all_gather, reduce_scatter | ring     | S (n-1)/n          | S/k (n-1)/n        | n-d, d-1                       |
|                        | in-switch    | S                  |                    | one fixed                      |
|                        | hierarchical*| S (k-1)/k          | S/k (d-1)/d        | k-1, d-1                       |
|                        | tree         |                    | S (n-1)/n, k = 1   | 0, log2 d (PAT)                |
| all_reduce             | ring         | 2 S (n-1)/n        | 2 S/k (n-1)/n      | 2 (n-d), 2 (d-1)               |
|                        | tree         | 2 S                | 2 S/k (S/k, d = 2) | 2 (k-1), 2 log2 d              |
|                        | in-switch    | S (1 + 1/n)        |                    | one fixed                      |
|                        | in-switch tree | S (1 + 1/k)      | 2 S/k (S/k, d = 2) | one fixed, 2 log2 d            |
|                        | hierarchical*| 2 S (k-1)/k        | 2 S/k (d-1)/d      | 2 (k-1), 2 (d-1)               |
| all_to_all             | pairwise     | S (k-1)/n          | S (n-k)/n          | (n-1)/8 over the slower        |
| broadcast              | ring, tree   | S                  | S/k                | as above, one way              |
| send, receive          | direct       | S, or              | S                  | 1                              |

(* where `Efficiency.hierarchical` says that the library has it; NCCL has not.)

Chunks are pipelined, so that the slower of the networks decides and the other one hides behind it. Across domains
each rank's own network adapter carries its share (rails). The double binary tree is that of Sanders, Speck and Träff
2009; in-switch is NVLink SHARP (NVLS): a rank's ports carry its data once each way, and the sum of its own part.

Constants: NCCL, src/graph/tuning.cc (latencies of its protocols LL, LL128 and Simple; efficiency of NVLS; PAT) and
src/graph/topo.h (rate of a link).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from timetrial.errors import UserError

if TYPE_CHECKING:
    from timetrial.predict.placement import Placement
    from timetrial.systems.system import System

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "receive")
CONCURRENT_PEERS = 8
"""Messages of one all-to-all under way at a time: NCCL, src/include/device.h, work elements of one batch."""


@dataclass(frozen=True)
class Protocol:
    """How NCCL moves bytes: with flags beside them for low latency, or in large chunks for throughput."""

    name: str
    start_s: float
    """Of any collective, seconds: baseLatencies of tuning.cc, ring."""
    step_up: float
    """Latency of a step over scale-up, share of a Simple step."""
    step_out: float
    """The same over scale-out."""
    rate_up: float
    """Share of the rate that Simple reaches over scale-up."""
    rate_out: float
    """The same over scale-out."""
    chunked: bool
    """Whether it reaches its rate with large messages only."""


PROTOCOLS = (
    Protocol("LL", 6.6e-6, 0.6 / 3.4, 2.7 / 14, 0.38, 0.10, False),  # rates: llMaxBws, Hopper, 141 and 35 of 371 GB/s
    Protocol("LL128", 14e-6, 1.9 / 3.4, 4.0 / 14, 0.92, 0.92, True),
    Protocol("Simple", 8.4e-6, 1.0, 1.0, 1.0, 1.0, True),
)
PLAIN = Protocol("plain", 0.0, 1.0, 1.0, 1.0, 1.0, False)
"""Of CPUs, whose figures are measured through their library (gloo): nothing is reached more slowly than they say."""


@dataclass(frozen=True)
class Efficiency:
    """What software reaches of the line rates. `Efficiency.of(system)` has the defaults; a stack may change any."""

    scale_up: float
    """Share of the scale-up line rate that a large message reaches."""
    scale_out: float
    """Share of the scale-out line rate that a large message reaches."""
    in_switch: float
    """Share of `scale_up` that reduction inside the switches reaches."""
    in_switch_s: float = 25e-6
    """Fixed latency of in-switch collectives, seconds: NCCL tuning.cc, hwLatencies, NVLS, NVLink."""
    ramp_s: float = 27e-6
    """A message that takes this long at its full rate reaches half of that rate, seconds. With `ramp_power` from
    measured points of 8 H100: all-gather 336, all-reduce 445 GB/s at 512 MiB, against 370 and 480 GB/s in the limit
    (nccl-tests issue 212)."""
    ramp_power: float = 2 / 3
    """How fast the rate grows with the size of the message: time = bytes / rate x (1 + (half / bytes)^power)."""
    tree: float = 0.92
    """Share of the rate that trees reach: NCCL tuning.cc."""
    pat: float = 0.75
    """Share of the rate that the tree algorithms of all-gather and reduce-scatter (PAT) reach: NCCL tuning.cc."""
    hierarchical: bool = False
    """Whether the library works inside the domains first and across them then. NCCL does not: its all-gathers and
    reduce-scatters between nodes are rings, and slow down as nodes are added (NCCL issue 1229)."""

    @classmethod
    def of(cls, system: System) -> Efficiency:
        """The defaults for `system`.

        Scale-up: NCCL topo.h counts 20.6 of 25 GB/s a link on Hopper and 40.1 of 50 on Blackwell; others assumed.
        In-switch: nvlsEfficiency of tuning.cc. Scale-out: 46 to 48 of 50 GB/s for NDR InfiniBand in rings of few
        nodes (nccl-tests issue 290), falling to about 0.7 over 128 nodes (NCCL issue 1229), so 0.9; Ethernet assumed.
        A CPU's figures are what its library reaches.
        """
        if system.accelerator.generation == "cpu":
            return cls(1.0, 1.0, 1.0)
        scale_up, in_switch = {
            "hopper": (20.6 / 25, 0.85),
            "blackwell": (40.1 / 50, 0.74),
            "blackwell-ultra": (40.1 / 50, 0.74),
        }.get(system.accelerator.generation, (0.78, 0.8))
        return cls(scale_up, 0.85 if system.scale_out.kind == "ethernet" else 0.9, in_switch)


@dataclass(frozen=True)
class Cost:
    """What one collective costs each of its ranks."""

    seconds: float
    algorithm: str
    """ring, tree, in-switch, in-switch tree, hierarchical, pairwise, direct, or none for a group of one."""
    wire_bytes: float
    """Bytes that a rank sends over `network`."""
    network: str
    """scale-up or scale-out: the one that decides."""
    protocol: str = ""
    """LL, LL128 or Simple; plain on CPUs."""


@dataclass(frozen=True)
class _Way:
    """One algorithm's demands on a rank."""

    algorithm: str
    up_bytes: float = 0.0
    out_bytes: float = 0.0
    up_steps: float = 0.0
    out_steps: float = 0.0
    share: float = 1.0
    """Of the rate that the algorithm reaches."""
    in_switch: bool = False


def collective_s(
    kind: str, nbytes: float, placement: Placement, system: System, efficiency: Efficiency | None = None
) -> Cost:
    """The cheapest way to do one collective of `nbytes` (of the whole tensor, as `parallel/record.py` counts).

    `efficiency`: of the stack; `Efficiency.of(system)` where None. All ranks of the machine are taken to do the same
    at the same time, each with its own port and adapter. Raises ValueError on an unknown kind, UserError where the
    group needs a network that `system` has not got.
    """
    if kind not in KINDS:
        raise ValueError(f"no collective {kind!r}; there are {', '.join(KINDS)}")
    if placement.ranks == 1 or nbytes <= 0:
        return Cost(0.0, "none", 0.0, "scale-up")
    if not placement.inside and system.scale_out.kind == "none":
        raise UserError(
            f"{kind} over {placement.ranks} ranks in {placement.domains} scale-up domains, but {system.name} has no "
            f"scale-out network; use at most {system.scale_up.domain} ranks, or a system with one"
        )
    e = efficiency or Efficiency.of(system)
    protocols = (PLAIN,) if system.accelerator.generation == "cpu" else PROTOCOLS
    costs = [
        _cost(way, protocol, placement, system, e)
        for way in _ways(kind, nbytes, placement, system, e)
        for protocol in protocols
        if not way.in_switch or protocol is protocols[-1]
    ]
    return min(costs, key=lambda cost: cost.seconds)


def send_s(
    nbytes: float, placement: Placement, system: System, efficiency: Efficiency | None = None
) -> tuple[float, float]:
    """One message between pipeline neighbours: seconds that it fills the link, and seconds of latency."""
    cost = collective_s("send", nbytes, placement, system, efficiency)
    empty = collective_s("send", 1, placement, system, efficiency)
    latency = min(empty.seconds, cost.seconds)
    return cost.seconds - latency, latency


def _ways(kind: str, size: float, p: Placement, system: System, e: Efficiency) -> Iterator[_Way]:
    """The algorithms that can do it. Each rank in the domain with the fewest carries 1/k of what passes its border."""
    n, k, d = p.ranks, p.in_domain, p.domains
    if kind in ("send", "receive"):
        yield _Way("direct", size, 0, 1, 0) if d == 1 else _Way("direct", 0, size, 0, 1)
        return
    if kind == "all_to_all":
        rounds = -(-(n - 1) // CONCURRENT_PEERS)
        up, out = size * (k - 1) / n, size * (n - k) / n
        yield _Way("pairwise", up, out, rounds, 0) if d == 1 else _Way("pairwise", up, out, 0, rounds)
        return
    several = p.most_in_domain > 1  # otherwise nothing passes over scale-up
    switch = system.scale_up.in_switch_reduction and several
    depth = math.ceil(math.log2(d))
    if kind == "broadcast":
        yield _Way("ring", size * several, size / k if d > 1 else 0, n - d, d - 1)
        yield _Way("tree", size * several, size / k if d > 1 else 0, p.most_in_domain - 1, depth, e.tree)
        return
    passes = 2 if kind == "all_reduce" else 1
    ring = passes * size * (n - 1) / n
    yield _Way("ring", ring * several, ring / k if d > 1 else 0, passes * (n - d), passes * (d - 1))
    if switch and d == 1:
        yield _Way("in-switch", size * (1 + 1 / n) if passes == 2 else size, in_switch=True)
    if e.hierarchical and d > 1 and several:
        inside, across = (passes * size * (x - 1) / x for x in (p.most_in_domain, d))
        if not p.even:  # the domain with the fewest still takes in all that it has not got
            across = passes * size * (n - k) / n
        yield _Way("hierarchical", inside, across / k, passes * (p.most_in_domain - 1), passes * (d - 1))
    if passes == 2:
        across = size if d == 2 else 2 * size
        out = across / k if d > 1 else 0.0
        yield _Way("tree", 2 * size * several, out, 2 * (p.most_in_domain - 1), 2 * depth, e.tree)
        if switch and d > 1:
            yield _Way("in-switch tree", size * (1 + 1 / k), out, 0, 2 * depth, e.tree, in_switch=True)
    elif not several:
        yield _Way("tree", 0, ring, 0, depth, e.pat)


def _cost(way: _Way, protocol: Protocol, p: Placement, system: System, e: Efficiency) -> Cost:
    up_rate = system.scale_up.bytes_per_s
    peers = 1 if way.algorithm == "direct" else max(1, p.most_in_domain - 1)
    up_rate = min(up_rate, peers * system.scale_up.peer_bytes_per_s) * e.scale_up
    up_rate *= e.in_switch if way.in_switch else protocol.rate_up * way.share
    out_rate = system.scale_out.bytes_per_s * e.scale_out * protocol.rate_out * way.share
    up_s, out_s = _moving_s(way.up_bytes, up_rate, protocol, e), _moving_s(way.out_bytes, out_rate, protocol, e)
    steps_s = way.up_steps * protocol.step_up * system.scale_up.latency_s
    steps_s += way.out_steps * protocol.step_out * system.scale_out.latency_s
    start_s = e.in_switch_s if way.in_switch else protocol.start_s
    wire, network = (way.out_bytes, "scale-out") if out_s > up_s else (way.up_bytes, "scale-up")
    return Cost(start_s + steps_s + max(up_s, out_s), way.algorithm, wire, network, protocol.name)


def _moving_s(nbytes: float, rate: float, protocol: Protocol, e: Efficiency) -> float:
    """Seconds for `nbytes` at the share of `rate` that a message of this size reaches."""
    if nbytes <= 0:
        return 0.0
    seconds = nbytes / rate
    return seconds * (1 + (e.ramp_s / seconds) ** e.ramp_power) if protocol.chunked else seconds


def with_overrides(efficiency: Efficiency, values: Mapping[str, float | bool]) -> Efficiency:
    """`efficiency` with a stack's own values. Raises UserError on a field that it has not got, or one out of range."""
    fields = efficiency.__dataclass_fields__
    for name, value in values.items():
        if name not in fields:
            raise UserError(f"network efficiency {name!r} is unknown; it has {', '.join(fields)}")
        if name == "hierarchical":
            fits, range_ = isinstance(value, bool), "true or false"
        elif name.endswith("_s"):
            fits, range_ = value >= 0, "seconds, 0 or more"
        else:
            fits, range_ = 0 < value <= 1, "a share above 0 and at most 1"
        if not fits:
            raise UserError(f"network efficiency {name}={value} is out of range; give {range_}")
    changes: dict[str, Any] = dict(values)
    return replace(efficiency, **changes)
