"""Traces at other micro batches from those at two and four samples.

Every count in a trace (rows of a product, samples of attention, bytes of a tensor or a collective) is a part that
does not depend on the micro batch and one that is proportional to it. So two traces say all others, as long as they
ask for the same operators. One sample does not, for there some copies are views; a loss in chunks of tokens neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from timetrial.config import Plan, RunConfig, replace
from timetrial.predict.events import LayerTrace, Op


def traced(config: RunConfig, traces: Callable[[RunConfig], dict[str, LayerTrace]]) -> dict[str, LayerTrace]:
    """`traces(config)`, for more than two samples from those of two and four. Raises what `traces` does."""
    mbs = config.plan.mbs
    if mbs in (1, 2, 4) or chunked(config.plan):
        return traces(config)
    two, four = (traces(replace(config, plan=replace(config.plan, mbs=n))) for n in (2, 4))
    return extended(two, four, mbs) or traces(config)


def chunked(plan: Plan) -> bool:
    """Whether the loss is in chunks: where a rank has the whole vocabulary and there is no pipeline."""
    return plan.tp == 1 and plan.pp == 1


def extended(two: Mapping[str, LayerTrace], four: Mapping[str, LayerTrace], mbs: int) -> dict[str, LayerTrace] | None:
    """Traces at `mbs` samples from those at two and four; None where these are not alike."""
    made: dict[str, LayerTrace] = {}
    for kind in two:
        trace = _extended(two[kind], four[kind], mbs) if kind in four else None
        if trace is None:
            return None
        made[kind] = trace
    return made if two.keys() == four.keys() else None


def _extended(two: LayerTrace, four: LayerTrace, mbs: int) -> LayerTrace | None:
    def at(a: int, b: int) -> int:
        return a + (b - a) * (mbs - 2) // 2

    alike = (
        len(two.ops) == len(four.ops)
        and two.tensor_bytes.keys() == four.tensor_bytes.keys()
        and (two.weights, two.inputs, two.outputs, two.saved) == (four.weights, four.inputs, four.outputs, four.saved)
        and all(map(_alike, two.ops, four.ops))
    )
    if not alike:
        return None
    ops = tuple(
        replace(a, shape=tuple(map(at, a.shape, b.shape)), bytes=at(a.bytes, b.bytes))
        for a, b in zip(two.ops, four.ops, strict=True)
    )
    return replace(two, ops=ops, tensor_bytes={i: at(n, four.tensor_bytes[i]) for i, n in two.tensor_bytes.items()})


def _alike(a: Op, b: Op) -> bool:
    return replace(a, shape=(), bytes=0) == replace(b, shape=(), bytes=0) and len(a.shape) == len(b.shape)
