"""The least that a step can take, by sums alone: which plans of a search are worth a layout.

Whatever the schedule, a pipeline rank does all its work, after the first micro batch has come through the stages
before its first one and before the last gradient has gone back through them. So the longest over ranks of

    micro batches x (forward + backward of its stages) + (forward + backward of the stages before its first)

is a bound from below; with equal stages it is the bubble of Narayanan et al. 2021, section 2.2.1. Messages and
data-parallel communication are left out, the optimizer too. (Schedules that put weight gradients off need not wait for
the way back; there the first term alone counts.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from timetrial.config import Plan
from timetrial.parallel.plan import split_layers, stage_rank

Counts = tuple[int, int, int]
"""Layers of the kinds embed, block and head."""


def least_s(plan: Plan, n_layers: int, seconds: Mapping[str, float], fixed_s: float, skew: float = 0.0) -> float:
    """Seconds that a step of `plan` takes at least; `seconds` by kind of layer, of one micro batch."""
    embed, block, head = (seconds.get(kind, 0.0) for kind in ("embed", "block", "head"))
    ranks, before = _shares(n_layers, plan.pp, plan.vp, plan.schedule)
    m = plan.grad_accumulation_steps
    way = longest = 0.0
    for rank, (e, b, h) in enumerate(ranks):
        longest = max(longest, m * (e * embed + b * block + h * head) + way)
        e, b, h = before[rank]
        way += (e * embed + b * block + h * head) if plan.schedule == "1f1b" else 0.0
    return longest * (1 + skew * math.log2(plan.world_size)) + fixed_s


@lru_cache(4096)
def _shares(n_layers: int, pp: int, vp: int, schedule: str) -> tuple[tuple[Counts, ...], tuple[Counts, ...]]:
    """Layers of each pipeline rank, and of its first stage."""
    plan = Plan(pp=pp, vp=vp, schedule=schedule)
    ranks = [[0, 0, 0] for _ in range(pp)]
    stages: list[Counts] = []
    for stage, (embed, kept, head) in enumerate(split_layers(n_layers, pp * vp)):
        counts = (int(embed), len(kept), int(head))
        stages.append(counts)
        own = ranks[stage_rank(stage, plan)]
        for i, n in enumerate(counts):
            own[i] += n
    return tuple((a, b, c) for a, b, c in ranks), tuple(stages[:pp])
