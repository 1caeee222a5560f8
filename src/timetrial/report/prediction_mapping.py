"""How a plan lies on the machine, as the page shows it: which groups are inside of one scale-up domain."""

from __future__ import annotations

from typing import Any

from timetrial.predict import placement
from timetrial.report.prediction_record import GROUPS, Answered

FABRICS = {"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe", "memory": "memory", "none": "scale-up"}
"""Kind of scale-up fabric -> its name."""
MOST_CELLS = 144
"""Accelerators of a domain above which its picture is left out."""


def mapping(answered: Answered) -> dict[str, Any]:
    """Rows of the table, and the picture of the first domain."""
    p, plan = answered.prediction, answered.prediction.request.plan
    fabric, domain = FABRICS[p.system.scale_up.kind], p.system.scale_up.domain
    used = min(placement.usable_domain(plan.world_size, p.system), plan.world_size)
    rows = []
    for group, lies in answered.groups.items():
        if lies.inside:
            how = f"all {lies.ranks} share {fabric}" if lies.nodes > 1 else f"all {lies.ranks} in one node"
        elif lies.most_in_domain == 1:
            how = f"one rank in each of {lies.domains:,} domains: over the network between them"
        else:
            each = str(lies.in_domain) if lies.even else f"{lies.in_domain} to {lies.most_in_domain}"
            how = f"{each} ranks in each of {lies.domains:,} domains"
        rows.append({"words": GROUPS[group], "ranks": lies.ranks, "inside": lies.inside, "lies": how})
    words = (
        f"Ranks fill {fabric} domains of {domain} accelerators in the order {plan.order}, fastest first; the run uses "
        f"{used} of each. Of all groups of a kind the worst placed is told."
    )
    return {"words": words, "rows": rows, **_cells(answered, used, fabric)}


def _cells(answered: Answered, used: int, fabric: str) -> dict[str, Any]:
    """The first domain's accelerators, shaded by their pipeline rank, or by their data-parallel rank without one."""
    plan = answered.prediction.request.plan
    if not 1 < used <= MOST_CELLS:
        return {"cells": [], "cells_words": "", "columns": 1}
    strides, stride = {}, 1
    for axis in plan.order.split("-"):
        strides[axis], stride = stride, stride * getattr(plan, axis)
    axis = "pp" if plan.pp > 1 else "dp"
    count = getattr(plan, axis)
    places = [rank // strides[axis] % count for rank in range(used)]
    held = sorted(set(places))
    strength = {
        place: round(25 + 75 * n / max(1, len(held) - 1)) if len(held) > 1 else 80 for n, place in enumerate(held)
    }
    names = {"pp": "pipeline rank", "dp": "data-parallel rank"}
    first = next((a for a in plan.order.split("-") if getattr(plan, a) > 1), axis)
    columns = next((n for n in (16, 12, 8, 9, 6, 4) if used % n == 0 and n <= used), used)
    words = (
        f"The first {fabric} domain's {used} accelerators in order of rank, shaded by {names[axis]} "
        f"({len(held)} of {count} here); {getattr(plan, first)} neighbours are one {GROUPS[first]} group."
    )
    return {"cells": [("backward", strength[place]) for place in places], "cells_words": words, "columns": columns}
