"""What a search found, in words and as data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from timetrial.config import Plan
from timetrial.predict.memory import GIB, Memory, RankMemory, Verdict
from timetrial.predict.request import Request
from timetrial.predict.step import Step

WORDS: Mapping[str, str] = {
    "matmul": "products",
    "attention": "attention",
    "other": "memory-bound kernels",
    "cast": "casts",
    "tp": "exposed tp",
    "cp": "exposed cp",
    "ep": "exposed ep",
    "pp": "exposed pp",
    "dp": "exposed dp",
    "launch": "launches",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "skew": "slowest rank",
    "fixed": "fixed",
}
"""Part of the breakdown -> what people call it."""
KINDS = ("weights", "gradients", "optimizer", "activations", "working", "fixed")
SMALL = 0.0005
"""Differences below this share of the winner's step are not told."""


@dataclass(frozen=True)
class Ranked:
    """One plan with its price."""

    plan: Plan
    precision: str
    """Of linear layers."""
    step: Step
    exact: bool
    """Whether the pipeline is laid out; otherwise it is by formula, on unequal stages up to a tenth too short."""
    memory: Memory
    verdict: Verdict

    @property
    def seconds(self) -> float:
        """Step time, s."""
        return self.step.seconds

    @property
    def name(self) -> str:
        """`tp4 cp2 pp8 vp8 dp8 mbs1 tp-cp-pp-dp`, degrees of 1 left out."""
        p = self.plan
        degrees = [f"{axis}{getattr(p, axis)}" for axis in ("tp", "cp", "pp", "vp", "ep") if getattr(p, axis) > 1]
        extra = [f"recompute={p.recompute}"] if p.recompute != "none" else []
        extra += [f"zero={p.zero}"] if p.pp == 1 and p.dp * p.cp > 1 else []
        return " ".join([*degrees, f"dp{p.dp}", f"mbs{p.mbs}", *extra, p.order])


@dataclass(frozen=True)
class Refusal:
    """Plans that cannot be, for one kind of reason."""

    plans: int
    example: str
    """The reason of the first of them, in full."""


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    base: Request
    system: str
    stack: str
    memory_bytes: int
    """Of one accelerator."""
    tried: int
    """Plans of the space."""
    refused: tuple[Refusal, ...]
    """Most frequent first."""
    misfits: int
    """Valid plans that do not fit into memory."""
    fitting: int
    """Plans that can run."""
    ranked: tuple[Ranked, ...]
    """The fastest of those, fastest first."""
    near: tuple[Ranked, ...]
    """The fastest of those that do not fit into memory but would into twice as much, by formula."""
    tightest: Ranked | None
    """Of those the one that lacks least; None where all fit."""
    priced: int
    """Step times that were worked out; of all other plans a bound says that they are slower."""
    workers: int
    seconds: float
    """Wall time of the search."""

    @property
    def rate(self) -> float:
        """Plans per second of wall time."""
        return self.tried / self.seconds if self.seconds else 0.0

    @property
    def best(self) -> Ranked | None:
        """The fastest plan; None where none fits."""
        return self.ranked[0] if self.ranked else None


def differences(row: Ranked, best: Ranked) -> dict[str, float]:
    """Part of the breakdown -> seconds that `row` takes more than `best`. They add up to the difference in steps.

    Where one of both is by formula, sends, data-parallel communication and the bubble are one part, the bubble.
    """
    mine, theirs = dict(row.step.parts), dict(best.step.parts)
    if row.exact != best.exact:
        for parts, pipelined in ((mine, row.plan.pp > 1), (theirs, best.plan.pp > 1)):
            if pipelined:
                parts["bubble"] = sum(parts.pop(name, 0.0) for name in ("pp", "dp", "bubble"))
    names = [name for name in WORDS if name in mine or name in theirs]
    return {name: mine.get(name, 0.0) - theirs.get(name, 0.0) for name in names}


def lacks(row: Ranked, memory_bytes: int) -> tuple[float, int, str]:
    """What a plan lacks in memory, bytes; on which pipeline rank; and which kind of bytes is largest there."""
    rank = max(range(len(row.memory.ranks)), key=lambda r: row.memory.ranks[r].used)
    there = row.memory.ranks[rank]
    return there.used - memory_bytes, rank, max(KINDS, key=lambda kind: float(getattr(there, kind)))


def explain(found: Found, rows: int = 10) -> str:
    """The search in words: the winner, the next ones against it, what nearly fits, and what is refused."""
    base, plan = found.base, found.base.plan
    lines = [
        f"{base.model} on {base.accelerators:,} x {found.system} ({found.stack}), {base.precision}, "
        f"{plan.gbs:,} x {base.seq_len:,} tokens a step",
        f"{found.tried:,} plans in {found.seconds:.1f} s ({found.rate:,.0f} a second): {found.fitting:,} fit, "
        f"{found.misfits:,} do not fit into memory, {sum(r.plans for r in found.refused):,} cannot be",
        "",
    ]
    best = found.best
    if best is None:
        lines.append("no plan fits" if found.misfits else "no plan can be")
    else:
        parts = sorted(best.step.parts.items(), key=lambda item: -item[1])
        lines += [
            f" 1  {best.seconds:9.4f} s  {best.name}{_precision(best, base)}",
            "    " + ", ".join(f"{WORDS.get(k, k)} {v:.3g} s" for k, v in parts if v > SMALL * best.seconds),
            f"    {_state(best, found.memory_bytes)}",
        ]
        for number, row in enumerate(found.ranked[1:rows], 2):
            lines += [
                f"{number:2}  {row.seconds:9.4f} s  {row.name}{_precision(row, base)}",
                f"    {_against(row, best)}",
            ]
    if found.near or found.tightest:
        lines += ["", "with more memory, the fastest and the nearest:"]
        shown = [*found.near[:3], *([found.tightest] if found.tightest else [])]
        told = (f"    {row.seconds:9.4f} s  {row.name}: {_lack(row, found.memory_bytes)}" for row in shown)
        lines += dict.fromkeys(told)
    if found.refused:
        lines += ["", "cannot be:"]
        lines += [f"    {refusal.plans:6,}  such as {refusal.example}" for refusal in found.refused[:8]]
    return "\n".join(lines)


def as_json(found: Found) -> str:
    """All of it, one JSON object: seconds and bytes."""
    best = found.best
    content: dict[str, Any] = {
        "prediction": True,
        "model": found.base.model,
        "workload": found.base.config.workload,
        "system": found.system,
        "stack": found.stack,
        "accelerators": found.base.accelerators,
        "gbs": found.base.plan.gbs,
        "seq_len": found.base.seq_len,
        "memory_bytes": found.memory_bytes,
        "plans_tried": found.tried,
        "plans_fitting": found.fitting,
        "plans_not_fitting": found.misfits,
        "plans_refused": [{"plans": r.plans, "example": r.example} for r in found.refused],
        "plans_priced": found.priced,
        "workers": found.workers,
        "seconds": round(found.seconds, 3),
        "plans_per_s": round(found.rate, 1),
        "ranked": [_row(row, found.memory_bytes, best) for row in found.ranked],
        "near_misses": [_row(row, found.memory_bytes, best) for row in found.near],
        "tightest": _row(found.tightest, found.memory_bytes, best) if found.tightest else None,
    }
    return json.dumps(content, indent=1)


def _row(row: Ranked, memory_bytes: int, best: Ranked | None) -> dict[str, Any]:
    lack, rank, kind = lacks(row, memory_bytes)
    return {
        "plan": dataclasses.asdict(row.plan),
        "precision": row.precision,
        "step_s": row.seconds,
        "exact": row.exact,
        "parts_s": dict(row.step.parts),
        "against_best_s": {} if best is None else differences(row, best),
        "memory_bytes": row.memory.ranks[rank].used,
        "lacks_bytes": max(0.0, lack),
        "fullest_rank": rank,
        "largest_kind": kind,
        "verdict": row.verdict.text,
    }


def _against(row: Ranked, best: Ranked) -> str:
    apart = differences(row, best)
    told = sorted((k for k, v in apart.items() if abs(v) >= SMALL * best.seconds), key=lambda k: -abs(apart[k]))
    text = ", ".join(f"{apart[k]:+.2g} s {WORDS[k]}" for k in told) or "no part differs by more than 0.05 %"
    bytes_apart = _fullest(row.memory.ranks).used - _fullest(best.memory.ranks).used
    return f"{row.seconds - best.seconds:+.3g} s: {text}; {bytes_apart / GIB:+.1f} GiB" + _offloaded(row)


def _state(row: Ranked, memory_bytes: int) -> str:
    used = _fullest(row.memory.ranks).used
    return f"{used / GIB:.1f} of {memory_bytes / GIB:.1f} GiB at the peak" + _offloaded(row)


def _offloaded(row: Ranked) -> str:
    return f"; {row.verdict.text}, which takes time that is not in this step" if row.verdict.over > 0 else ""


def _lack(row: Ranked, memory_bytes: int) -> str:
    lack, rank, kind = lacks(row, memory_bytes)
    there = row.memory.ranks[rank]
    size = getattr(there, kind) / GIB
    return (
        f"lacks {lack / GIB:.1f} GiB on pipeline rank {rank}, of whose {there.used / GIB:.1f} GiB {kind} are {size:.1f}"
    )


def _precision(row: Ranked, base: Request) -> str:
    return f" {row.precision}" if row.precision != base.precision else ""


def _fullest(ranks: Iterable[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.used)
