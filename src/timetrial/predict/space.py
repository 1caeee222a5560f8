"""Which plans a search tries: every degree that the accelerators, the model and the batch allow.

Degrees that a caller leaves open are chosen here, those that it gives are taken as they are and refused by
`parallel/plan.validate` where they cannot be. Plans are made one after another and never held together, so that a
space of millions takes no more memory than one of ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from timetrial.config import Plan, replace
from timetrial.errors import UserError
from timetrial.predict.request import ALIASES, PRECISIONS, Cells, Request, normal, request
from timetrial.systems.system import System

DEGREES = ("tp", "pp", "vp", "cp", "ep", "dp", "mbs")
MAPPING = ("fsdp", "recompute", "dp_last", "segment")
"""Columns that tell a mapping, beside the degrees."""


@dataclass(frozen=True)
class Space:
    """What a search varies. An empty tuple: all degrees that fit."""

    tp: tuple[int, ...] = ()
    """Open: those that divide the model's heads and the accelerators, inside one scale-up domain."""
    cp: tuple[int, ...] = ()
    """Open: those that divide the accelerators and leave each rank `least_tokens`."""
    pp: tuple[int, ...] = ()
    """Open: those that divide the accelerators, up to a stage for each layer, embedding and loss."""
    vp: tuple[int, ...] = ()
    """Open: those up to `most_vp` that split layers, embedding and loss evenly; where none does, all that leave no
    stage empty."""
    ep: tuple[int, ...] = ()
    """Open: those that divide the model's experts; 1 where it has none."""
    mbs: tuple[int, ...] = ()
    """Open: those that divide the batch of a data-parallel rank, up to `most_mbs`."""
    orders: tuple[str, ...] = ("tp-cp-dp-pp", "tp-cp-pp-dp")
    """Of the axes, fastest first."""
    recompute: tuple[str, ...] = ("none", "selective", "full")
    zero: tuple[int, ...] = (1, 3)
    """Stages of ZeRO without a pipeline. With one it is 1."""
    precisions: tuple[str, ...] = ()
    """Of linear layers, as `Request.precision`. Empty: the request's own alone."""
    least_tokens: int = 1024
    """Tokens of a sample on one context-parallel rank."""
    most_vp: int = 16
    most_mbs: int = 8
    offload: float = 0.0
    """Activations beyond an accelerator's memory that a plan may have, as a share of that memory. They go to the host
    or are computed again, at no cost in the step."""


@dataclass(frozen=True)
class Task:
    """Plans that share traces but for the micro batch: one piece of work."""

    precision: str
    tp: int
    cp: int
    ep: int
    recompute: str


def question(row: Mapping[str, str]) -> Request:
    """The request of a row (`request.request`) without its mapping, which the search is to find.

    Raises UserError where the row tells no number of accelerators.
    """
    cells = {normal(name): cell for name, cell in row.items()}
    counts = {alias for key in ("accelerators", "nodes", "per_node") for alias in ALIASES[key]}
    mapping = {alias for key in (*MAPPING, *DEGREES) for alias in ALIASES[key]}
    told = Cells(row)
    number, nodes, per_node = (told.count(key) for key in ("accelerators", "nodes", "per_node"))
    if number is None and nodes and per_node:
        number = nodes * per_node
    if number is None:
        raise UserError("search: no number of accelerators: fill the column accelerators (or gpus)")
    alone = {name: cell for name, cell in cells.items() if name not in counts | mapping}
    ones = dict.fromkeys(DEGREES, "1")
    found = request(alone | ones | {"accelerators": "1"})
    return replace(found, accelerators=number, nodes=nodes)


def check(space: Space, base: Request) -> None:
    """Raise UserError on degrees below 1 and on precisions that nobody knows."""
    for name in ("tp", "cp", "pp", "vp", "ep", "mbs"):
        if wrong := [n for n in getattr(space, name) if n < 1]:
            raise UserError(f"search: {name}={wrong[0]} must be at least 1")
    for name in ("orders", "recompute", "zero"):
        if not getattr(space, name):
            raise UserError(f"search: {name} is empty; give at least one")
    if wrong_precisions := [p for p in space.precisions if p not in PRECISIONS.values()]:
        known = ", ".join(sorted(set(PRECISIONS.values())))
        raise UserError(f"search: precision {wrong_precisions[0]} is not known; use some of {known}")
    if not 0 <= space.offload <= 1:
        raise UserError(f"search: offload={space.offload} must lie between 0 and 1, a share of the memory")
    if base.accelerators < 1 or base.plan.gbs < 1:
        raise UserError(f"search: {base.accelerators} accelerators and gbs={base.plan.gbs} must be at least 1")


def tasks(base: Request, space: Space, system: System) -> list[Task]:
    """The pieces of work of a search, in a fixed order."""
    world, model = base.accelerators, base.config.model
    sizes = [getattr(model, name, None) for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")]
    shared = math.gcd(world, *(size for size in sizes if size is not None))
    tps = _sorted(space.tp) or [n for n in divisors(shared) if n <= max(system.scale_up.domain, 1)]
    experts = getattr(model, "n_experts", 0)
    eps = _sorted(space.ep) or (divisors(experts) if experts else [1])
    return [
        Task(precision, tp, cp, ep, recompute)
        for precision in dict.fromkeys(space.precisions or (base.precision,))
        for tp in tps
        for cp in _cps(base, space, tp)
        for ep in eps
        for recompute in dict.fromkeys(space.recompute)
        if world % (tp * cp) == 0
    ]


def plans(base: Request, space: Space, task: Task) -> Iterator[Plan]:
    """Its plans in the first of the orders, smallest micro batches first.

    Where the batch does not divide over the data-parallel ranks that are left, there is one plan, for `validate` to
    refuse.
    """
    world, gbs = base.accelerators, base.plan.gbs
    units = base.config.model.n_layers + 2
    left = world // (task.tp * task.cp)
    pps = [pp for pp in (_sorted(space.pp) or divisors(left)) if left % pp == 0 and (space.pp or pp <= units)]
    common = {"tp": task.tp, "cp": task.cp, "ep": task.ep, "gbs": gbs, "recompute": task.recompute}
    common["precision"] = "fp32" if task.precision in ("fp32", "tf32") else "bf16"
    common["order"] = space.orders[0]
    sizes = _sorted(space.mbs) or [n for n in divisors(gbs) if n <= space.most_mbs]
    for mbs in sizes:
        for pp in pps:
            dp = left // pp
            if gbs % (dp * mbs):
                if mbs == sizes[0] or space.mbs:
                    yield replace(base.plan, pp=pp, vp=1, dp=dp, mbs=mbs, zero=1, **common)
                continue
            for vp in _vps(space, pp, units):
                for zero in _sorted(space.zero) if pp == 1 else (1,):
                    yield replace(base.plan, pp=pp, vp=vp, dp=dp, mbs=mbs, zero=zero, **common)


def orders(plan: Plan, space: Space) -> list[str]:
    """The orders that lay the plan's ranks out in different ways: axes of one rank may stand anywhere."""
    seen: dict[tuple[str, ...], str] = {}
    for order in space.orders:
        axes = tuple(axis for axis in order.split("-") if getattr(plan, axis, 2) > 1)
        seen.setdefault(axes, order)
    return list(seen.values())


def divisors(n: int) -> list[int]:
    """Of `n`, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def _cps(base: Request, space: Space, tp: int) -> list[int]:
    if space.cp:
        return _sorted(space.cp)
    seq, world = base.seq_len, base.accelerators
    return [cp for cp in divisors(world) if cp == 1 or (seq // cp >= space.least_tokens and seq % (2 * cp * tp) == 0)]


def _vps(space: Space, pp: int, units: int) -> list[int]:
    if pp == 1:
        return [1]
    every = range(1, max(1, min(space.most_vp, units // pp)) + 1)
    return _sorted(space.vp) or [vp for vp in every if units % (pp * vp) == 0] or list(every)


def _sorted(values: tuple[int, ...]) -> list[int]:
    return sorted(set(values))
