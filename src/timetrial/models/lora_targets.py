"""Which linear layers get a low-rank adapter, and how many parameters that makes, without torch.

A target is the last part of a layer's name (`wq`), or the name of a group of layers that read the same
input and share one adapter (`wqkv`). The MLPerf reference trains the latter: its checkpoint holds query,
key and value as one matrix, so its adapter for them is [r, d] and [d + 2 d_kv, r], with one A where three
adapters would have three.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Protocol

from timetrial.config import Lora
from timetrial.errors import UserError

GROUPS = {"wqkv": ("wq", "wk", "wv")}

# what other libraries call them: only for the advice in an error
_ALIASES = {
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "qkv_proj": "wqkv", "linear_qkv": "wqkv",
    "linear_proj": "wo", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "lm_head": "head",
    "attention": "wqkv",
}  # fmt: skip


class Linears(Protocol):
    """A model's configuration that can list its linear layers."""

    def linears(self) -> dict[str, tuple[int, int]]: ...


def adapted(names: Iterable[str], targets: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The layers among `names` that each adapter covers: one name, or those of a group, in model order.

    Raises UserError on a target that is unknown, or on one that covers a layer twice.
    """
    names = list(names)
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in names)
    known = [*leaves, *(group for group, members in GROUPS.items() if all(m in leaves for m in members))]
    if not targets:
        raise UserError(f"lora.targets is empty: name at least one of {', '.join(known)}")
    for target in targets:
        if target not in known:
            raise UserError(f"lora.targets: no linear layer is called {target!r}{_advice(target, known)}")
    covered = [leaf for target in targets for leaf in GROUPS.get(target, (target,))]
    twice = next((leaf for leaf in covered if covered.count(leaf) > 1), None)
    if twice is not None:
        raise UserError(f"lora.targets={','.join(targets)}: {twice} would get two adapters; name it once")
    found = []
    for name in names:
        parent, _, leaf = name.rpartition(".")
        for target in targets:
            members = GROUPS.get(target, (target,))
            if members[0] == leaf:
                found.append(tuple(f"{parent}.{member}" if parent else member for member in members))
    return found


def lora_params(config: Linears, lora: Lora) -> int:
    """Parameters that the adapters add, elements: r (inputs + outputs) each, a group's outputs together."""
    shapes: Mapping[str, tuple[int, int]] = config.linears()
    outputs_and_inputs = (
        sum(shapes[name][0] for name in group) + shapes[group[0]][1] for group in adapted(shapes, lora.targets)
    )
    return lora.rank * sum(outputs_and_inputs)


def _advice(target: str, known: list[str]) -> str:
    near = [_ALIASES[target]] if target in _ALIASES else difflib.get_close_matches(target, known, n=1)
    meant = f", did you mean {near[0]}?" if near and near[0] in known else ""
    return f"{meant}; there are {', '.join(known)}"
