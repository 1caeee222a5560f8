"""What every pipeline rank does in the predicted step, and what a layer's kernels do inside of one pass.

Forward and backward passes are those of the action table as `schedule.lay` puts them. Behind them come, on every
rank, the optimizer and the rest of the step. Without a pipeline one rank works off its micro batches, and what of the
data-parallel communication computing does not hide stands behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from timetrial.predict import actions, schedule
from timetrial.predict.constants import load as load_constants
from timetrial.predict.kernels import Kernel, Layer
from timetrial.predict.predict import pricing_of
from timetrial.predict.price import Pricing
from timetrial.predict.schedule import Interval
from timetrial.report.prediction_record import Answered, words_of


class Tail(NamedTuple):
    """Work of every rank behind the pipeline."""

    part: str
    """Of the breakdown."""
    start: float
    """Seconds from the start of the step."""
    end: float


@dataclass(frozen=True)
class Laid:
    """One step on streams."""

    ranks: int
    """Pipeline ranks."""
    intervals: tuple[Interval, ...]
    pipeline_s: float
    """Where forward and backward passes end, and the communication that belongs to them."""
    tails: tuple[Tail, ...]
    seconds: float
    """Of the whole step."""


class Piece(NamedTuple):
    """One kernel inside of a pass."""

    stream: str
    """compute or communication."""
    kernel: Kernel
    layer: str
    """embed, block or head, and its number in the stage."""
    start: float
    """Share of the pass, 0 to 1."""
    end: float


def lay(answered: Answered) -> Laid:
    """The step of a prediction, with all its intervals."""
    step, plan = answered.prediction.step, answered.prediction.request.plan
    found = schedule.lay(actions.table(plan), step.durations)
    tails, now = [], found.seconds
    for part in ("dp",) * (plan.pp == 1) + ("optimizer", "skew", "fixed"):
        if seconds := step.parts.get(part, 0.0):
            tails.append(Tail(part, now, now + seconds))
            now += seconds
    return Laid(plan.pp, found.intervals, found.seconds, tuple(tails), now)


def pricing(answered: Answered) -> Pricing:
    """With which the prediction's kernels were priced."""
    p = answered.prediction
    return pricing_of(p.request, p.system, p.stack, answered.constants or load_constants())


def kinds(answered: Answered, stage: int) -> tuple[str, ...]:
    """The layers of a virtual stage, in the order of the model."""
    s = answered.prediction.step.stages[stage]
    return ("embed",) * s.embed + ("block",) * s.layers + ("head",) * s.head


def faster(answered: Answered, kind: str, price: Pricing) -> Layer:
    """The kernels of a kind of layer; of several ways to run it ("block by ...") the one that the step takes."""

    def seconds(layer: Layer) -> float:
        return sum(
            price.pass_s(price.totals([k for k in layer.kernels if (k.phase == "forward") == forward])).total
            for forward in (True, False)
        )

    layers = answered.prediction.layers
    ways = [layer for name, layer in layers.items() if name.partition(" by ")[0] == kind]
    return min(ways, key=seconds) if len(ways) > 1 else ways[0]


def passes(answered: Answered, layers: Iterable[str], kind: str, price: Pricing | None = None) -> tuple[Piece, ...]:
    """The kernels of one pass through `layers`, in order, scaled so that the pass is 1 long.

    `kind`: F, B, or its halves I (without weights' gradients) and W (these alone). Backward passes go through the
    layers in reverse. A collective that computing hides lies beside it: a gather under what follows, a scatter or
    reduction under what came before; it is cut where the pass ends. Pieces of one stream never overlap.
    """
    price = price or pricing(answered)
    pen, ways = _Pen(), dict[str, Layer]()
    order = list(enumerate(layers))
    for number, layer in order if kind == "F" else reversed(order):
        if layer not in ways:
            ways[layer] = faster(answered, layer, price)
        kernels = _of(ways[layer].kernels, kind)
        if kernels:
            pen.layer(f"{layer} {number}", kernels, price)
    return pen.pieces()


def _of(kernels: Iterable[Kernel], kind: str) -> list[Kernel]:
    if kind == "F":
        return [k for k in kernels if k.phase == "forward"]
    back = [k for k in kernels if k.phase != "forward"]
    if kind == "B":
        return back
    return [k for k in back if (k.kind == "matmul" and k.role == "wgrad") == (kind == "W")]


class _Pen:
    """Writes kernels one behind the other on two streams."""

    def __init__(self) -> None:
        self.now = 0.0
        self.link_free = 0.0
        self.found: list[Piece] = []

    def layer(self, name: str, kernels: list[Kernel], price: Pricing) -> None:
        """One layer's kernels, so long that its parts are those of its price."""
        seconds = [price.kernel_s(k) for k in kernels]
        whole: dict[str, float] = {}
        for kernel, single in zip(kernels, seconds, strict=True):
            whole[kernel.part] = whole.get(kernel.part, 0.0) + single
        parts = price.pass_s(price.totals(kernels)).parts
        gap = parts.get("launch", 0.0) / len(kernels)
        for kernel, single in zip(kernels, seconds, strict=True):
            share = parts.get(kernel.part, 0.0) / whole[kernel.part] if whole[kernel.part] else 0.0
            if kernel.kind == "collective":
                self._collective(name, kernel, single / price.fitted.network, single * share)
            else:
                self.found.append(Piece("compute", kernel, name, self.now, self.now + single * share))
                self.now += single * share
            self.now += gap

    def _collective(self, name: str, kernel: Kernel, seconds: float, exposed: float) -> None:
        """On the wire for `seconds`, of which computing waits `exposed`."""
        exposed = min(exposed, seconds) if kernel.role != "all_to_all" else exposed
        leads = kernel.role in ("all_gather", "send", "receive", "broadcast")
        start = max(self.link_free, self.now if leads else self.now - (seconds - exposed))
        self.now += exposed
        end = start + seconds if leads else max(self.now, start + exposed)
        if end > start:
            self.found.append(Piece("communication", kernel, name, start, end))
            self.link_free = end

    def pieces(self) -> tuple[Piece, ...]:
        whole = self.now or 1.0
        cut = ((p, min(1.0, p.start / whole), min(1.0, p.end / whole)) for p in self.found)
        return tuple(p._replace(start=start, end=end) for p, start, end in cut if end > start)


def waits(laid: Laid) -> list[list[tuple[float, float]]]:
    """By pipeline rank: when its compute stream is idle, until the pipeline's end."""
    found: list[list[tuple[float, float]]] = []
    for rank in range(laid.ranks):
        now, idle = 0.0, []
        for i in sorted((i for i in laid.intervals if (i.rank, i.stream) == (rank, "compute")), key=lambda i: i.start):
            if i.start > now:
                idle.append((now, i.start))
            now = i.end
        if laid.pipeline_s > now:
            idle.append((now, laid.pipeline_s))
        found.append(idle)
    return found


def label(kernel: Kernel) -> str:
    """A kernel in a few words: "attention.qkv fprop fp8"."""
    name = kernel.module or "layer"
    if kernel.kind == "collective":
        return f"{kernel.role} ({kernel.part}) {name}"
    more = [kernel.role] if kernel.kind == "matmul" else []
    more += [kernel.format] if kernel.kind in ("matmul", "attention") else [words_of(kernel.part)]
    return " ".join([name, *more])


def arguments(kernel: Kernel) -> Mapping[str, object]:
    """A kernel's shape or bytes."""
    if kernel.kind == "matmul":
        return dict(zip(("batch", "m", "n", "k"), kernel.shape, strict=True)) | {"format": kernel.format}
    if kernel.kind == "attention":
        names = ("batch", "heads", "kv_heads", "tokens", "kv_tokens", "head_dim")
        return dict(zip(names, kernel.shape, strict=True)) | {"format": kernel.format}
    return {"bytes": kernel.bytes}


def stages_of_rank(answered: Answered, rank: int) -> tuple[int, ...]:
    """The virtual stages that a pipeline rank holds."""
    return tuple(i for i, s in enumerate(answered.prediction.step.stages) if s.rank == rank)
