"""Traces at larger micro batches from those at one and two samples.

Every count in a trace (rows of a product, samples of attention, bytes of a tensor or a collective) is a part that
does not depend on the micro batch and one that is proportional to it. So two traces say all others, as long as they
ask for the same operators; a loss in chunks of tokens does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from timetrial.config import Plan, RunConfig, replace
from timetrial.predict.events import LayerTrace, Op


def traced(config: RunConfig, traces: Callable[[RunConfig], dict[str, LayerTrace]]) -> dict[str, LayerTrace]:
    """`traces(config)`, for three samples and more from those of one and two. Raises what `traces` does."""
    mbs = config.plan.mbs
    if mbs < 3 or chunked(config.plan):
        return traces(config)
    one, two = (traces(replace(config, plan=replace(config.plan, mbs=n))) for n in (1, 2))
    return extended(one, two, mbs) or traces(config)


def chunked(plan: Plan) -> bool:
    """Whether the loss is in chunks: where a rank has the whole vocabulary and there is no pipeline."""
    return plan.tp == 1 and plan.pp == 1


def extended(one: Mapping[str, LayerTrace], two: Mapping[str, LayerTrace], mbs: int) -> dict[str, LayerTrace] | None:
    """Traces at `mbs` samples from those at one and two; None where these are not alike."""
    made = {kind: _extended(trace, two[kind], mbs) for kind, trace in one.items() if kind in two}
    if len(made) != len(two) or len(made) != len(one):
        return None
    return {kind: trace for kind, trace in made.items() if trace is not None} if all(made.values()) else None


def _extended(one: LayerTrace, two: LayerTrace, mbs: int) -> LayerTrace | None:
    def at(a: int, b: int) -> int:
        return a + (b - a) * (mbs - 1)

    alike = (
        len(one.ops) == len(two.ops)
        and one.tensor_bytes.keys() == two.tensor_bytes.keys()
        and (one.weights, one.inputs, one.outputs, one.saved) == (two.weights, two.inputs, two.outputs, two.saved)
        and all(map(_alike, one.ops, two.ops))
    )
    if not alike:
        return None
    ops = tuple(
        replace(a, shape=tuple(map(at, a.shape, b.shape)), bytes=at(a.bytes, b.bytes))
        for a, b in zip(one.ops, two.ops, strict=True)
    )
    return replace(one, ops=ops, tensor_bytes={i: at(n, two.tensor_bytes[i]) for i, n in one.tensor_bytes.items()})


def _alike(a: Op, b: Op) -> bool:
    return replace(a, shape=(), bytes=0) == replace(b, shape=(), bytes=0) and len(a.shape) == len(b.shape)
