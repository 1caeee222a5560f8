"""The charts of a prediction's page: the step on its pipeline ranks, one layer's kernels, scaling.

Each is drawn twice, wide for a desk and narrow for a phone; the style sheet shows one of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from timetrial.predict.schedule import Interval
from timetrial.report import prediction_timeline as timeline
from timetrial.report import text
from timetrial.report.prediction_record import Answered
from timetrial.report.prediction_svg import Drawing, log_ticks, ticks
from timetrial.report.prediction_timeline import Laid

WIDE, NARROW = 860, 340
MOST_RANKS = 16
"""Pipeline ranks that are drawn; of more, so many evenly spread ones."""
READABLE = 3.0
"""Mean width of a pass in pixels from which passes are drawn one by one."""
ROLES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
"""Kind of pass -> colour."""
STREAMS = {"gather": "part-dp", "reduce": "part-dp", "send": "part-pp"}
"""Kind of communication -> colour."""
LEAST = 0.8
"""Width of a message that would be too thin to be seen, pixels."""


def drawn(ranks: int) -> list[int]:
    """The pipeline ranks that are drawn."""
    if ranks <= MOST_RANKS:
        return list(range(ranks))
    return sorted({round(i * (ranks - 1) / (MOST_RANKS - 1)) for i in range(MOST_RANKS)})


def step(laid: Laid, wide: bool, title: str) -> str:
    """The whole step: passes one by one where they can be seen, else the share of each kind over time."""
    lanes = _Lanes(laid, wide, title, 0.0, laid.seconds)
    most = max((len(lanes.of(rank, "compute")) for rank in lanes.ranks), default=0)
    shown = lanes.right - lanes.left
    for rank in lanes.ranks:
        if most * READABLE <= shown:
            lanes.passes(rank)
            lanes.messages(rank)
        else:
            bins = int(max(40, min(shown / 2, most / 14)))
            lanes.shares(rank, ("compute",), bins, ROLES)
            lanes.shares(rank, ("data", "send"), bins, STREAMS)
        lanes.tails(rank)
    return lanes.finish()


def readable(laid: Laid, wide: bool) -> bool:
    """Whether the whole step shows every pass."""
    lanes = _Lanes(laid, wide, "", 0.0, laid.seconds)
    most = max((len(lanes.of(rank, "compute")) for rank in lanes.ranks), default=0)
    return most * READABLE <= lanes.right - lanes.left


def start_s(laid: Laid) -> float:
    """How far the chart of the first passes goes, seconds: until the first rank has a few backward passes behind it."""
    first = sorted((i for i in laid.intervals if (i.rank, i.stream) == (0, "compute")), key=lambda i: i.start)
    at = next((n for n, i in enumerate(first) if i.kind != "F"), 0)
    return min(laid.seconds, first[min(len(first) - 1, at + 4)].end) if first else laid.seconds


def start(laid: Laid, wide: bool, title: str) -> str:
    """The first passes, with numbers of micro batches where they have room."""
    lanes = _Lanes(laid, wide, title, 0.0, start_s(laid))
    for rank in lanes.ranks:
        lanes.passes(rank, numbers=True)
        lanes.messages(rank)
    return lanes.finish()


class _Lanes:
    """One lane a pipeline rank: computing above, communication below it."""

    def __init__(self, laid: Laid, wide: bool, title: str, begin: float, end: float) -> None:
        self.laid, self.begin, self.end = laid, begin, end
        self.ranks = drawn(laid.ranks)
        self.left, self.right = (58, WIDE - 12) if wide else (44, NARROW - 12)
        one = len(self.ranks) == 1
        self.high, self.low, self.gap = (40, 10, 8) if one else (18, 5, 7) if wide else (14, 4, 6)
        self.pitch = self.high + 1 + self.low + self.gap
        bottom = self.pitch * len(self.ranks)
        self.pen = Drawing(WIDE if wide else NARROW, bottom + 42, title)
        self.scale = (self.right - self.left) / (end - begin or 1.0)
        self.by: dict[tuple[int, str], list[Interval]] = defaultdict(list)
        for i in laid.intervals:
            if i.start < end and i.end > begin:
                self.by[i.rank, i.stream].append(i)
        self._axis(bottom, 8 if wide else 4)

    def of(self, rank: int, stream: str) -> list[Interval]:
        return self.by.get((rank, stream), [])

    def x(self, seconds: float) -> float:
        return self.left + (min(max(seconds, self.begin), self.end) - self.begin) * self.scale

    def y(self, rank: int) -> float:
        return self.ranks.index(rank) * self.pitch

    def _axis(self, bottom: float, about: int) -> None:
        unit, scale = ("ms", 1e3) if self.end < 1.0 else ("s", 1.0)
        for at in ticks((self.end - self.begin) * scale, about):
            x = self.x(self.begin + at / scale)
            self.pen.line([(x, 0), (x, bottom)], "grid")
            self.pen.text(x, bottom + 16, f"{at:g}", "middle")
        self.pen.text((self.left + self.right) / 2, bottom + 36, f"{unit} since the start of the step", "middle")
        for rank in self.ranks:
            self.pen.text(self.left - 8, self.y(rank) + self.high / 2 + 4, f"rank\u00a0{rank}", "end")

    def _box(self, rank: int, begin: float, end: float, below: bool = False) -> tuple[float, float, float, float]:
        y = self.y(rank) + (self.high + 1 if below else 0)
        return self.x(begin), y, self.x(end) - self.x(begin), self.low if below else self.high

    def passes(self, rank: int, numbers: bool = False) -> None:
        """Every pass a rectangle, on a ground that is seen where the rank waits."""
        self.pen.rects([self._box(rank, self.begin, min(self.end, self.laid.pipeline_s))], "wait")
        boxes: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
        for i in self.of(rank, "compute"):
            x, y, width, height = self._box(rank, i.start, i.end)
            hair = 0.6 if width > 4 else 0.0
            boxes[ROLES[i.kind]].append((x, y, width - hair, height))
        for role, found in boxes.items():
            self.pen.rects(found, role)
        for i in self.of(rank, "compute") if numbers else ():
            x, y, width, height = self._box(rank, i.start, i.end)
            if width >= 7 + 6 * len(str(i.micro_batch)):
                self.pen.text(x + width / 2, y + height / 2 + 4, str(i.micro_batch), "middle", "surface", 11)

    def shares(self, rank: int, streams: tuple[str, ...], bins: int, colors: Mapping[str, str]) -> None:
        """What share of each slice of time each kind of work takes, one colour on the other."""
        end = min(self.end, self.laid.pipeline_s)
        size = (end - self.begin) / bins
        found = {color: [0.0] * bins for color in dict.fromkeys(colors.values())}
        for i in (i for stream in streams for i in self.of(rank, stream)):
            for b in range(int((i.start - self.begin) / size), min(bins - 1, int((i.end - self.begin) / size)) + 1):
                low, high = self.begin + b * size, self.begin + (b + 1) * size
                found[colors[i.kind]][b] += max(0.0, min(i.end, high) - max(i.start, low))
        x, y, width, height = self._box(rank, self.begin, end, below="compute" not in streams)
        if "compute" in streams:
            self.pen.rects([(x, y, width, height)], "wait")
        stacked, layers = [0.0] * bins, []
        for color, seconds in found.items():
            stacked = [min(1.0, a + s / size) for a, s in zip(stacked, seconds, strict=True)]
            layers.append((color, [height * share for share in stacked]))
        for color, heights in reversed(layers):
            if max(heights) >= 0.2:
                self.pen.stairs(x, width / bins, y + height, heights, color)

    def messages(self, rank: int) -> None:
        """Pipeline messages and data-parallel communication, below computing."""
        for color in dict.fromkeys(STREAMS.values()):
            own = [i for stream in ("data", "send") for i in self.of(rank, stream) if STREAMS[i.kind] == color]
            boxes = [self._box(rank, i.start, i.end, below=True) for i in own]
            self.pen.rects([(x, y, max(w, LEAST), h) for x, y, w, h in boxes], color)

    def tails(self, rank: int) -> None:
        """What comes behind the pipeline."""
        for tail in self.laid.tails:
            if tail.start < self.end:
                self.pen.rects([self._box(rank, tail.start, tail.end, below=tail.part == "dp")], f"part-{tail.part}")

    def finish(self) -> str:
        return self.pen.svg()


def layer(answered: Answered, wide: bool, title: str) -> str:
    """One block's forward and backward pass, kernel by kernel, computing above and communication below."""
    price = timeline.pricing(answered)
    kernels = timeline.faster(answered, "block", price).kernels
    left, right = (78, WIDE - 12) if wide else (12, NARROW - 12)
    rows = [(34, 12), (34, 12)]
    seconds = [
        price.pass_s(price.totals([k for k in kernels if (k.phase == "forward") == forward])).total
        for forward in (True, False)
    ]
    longest = max(seconds) or 1.0
    unit, scale = ("\u00b5s", 1e6) if longest < 1e-3 else ("ms", 1e3)
    top = 0 if wide else 18
    pitch = 66 + top
    bottom = 2 * pitch - 8
    pen = Drawing(WIDE if wide else NARROW, bottom + 42, title)
    for at in ticks(longest * scale, 8 if wide else 4):
        x = left + (right - left) * at / scale / longest
        pen.line([(x, 0), (x, bottom)], "grid")
        pen.text(x, bottom + 16, f"{at:g}", "middle")
    pen.text((left + right) / 2, bottom + 36, f"{unit} since the start of the pass", "middle")
    for row, (kind, name) in enumerate((("F", "forward"), ("B", "backward"))):
        y, (high, low) = row * pitch + top, rows[row]
        if wide:
            pen.text(left - 8, y + high / 2 + 4, name, "end")
        else:
            pen.text(left, y - 5, name)
        width = (right - left) * seconds[row] / longest
        for piece in timeline.passes(answered, ["block"], kind, price):
            x, length = left + piece.start * width, (piece.end - piece.start) * width
            at, height = (y, high) if piece.stream == "compute" else (y + high + 2, low)
            took = text.duration((piece.end - piece.start) * seconds[row])
            words = f"{timeline.label(piece.kernel)}: {took}"
            pen.rect(x, at, max(length - (0.5 if length > 3 else 0), 0.3), height, f"part-{piece.kernel.part}", words)
    return pen.svg()


def scaling(answered: Answered, wide: bool, title: str) -> str:
    """Step time over accelerators, both logarithmic, with published runs."""
    left, right, top, bottom = (58, WIDE - 24, 12, 268) if wide else (48, NARROW - 16, 12, 228)
    pen = Drawing(WIDE if wide else NARROW, bottom + 44, title)
    curve = sorted(answered.scaling)
    p = answered.prediction
    here = (p.request.plan.world_size, p.step.seconds)
    seen: Sequence[tuple[int, float]] = [
        here, *((s.gpus, s.step_s) for s in curve), *((d.gpus, d.step_s) for d in answered.published)
    ]  # fmt: skip
    low_x, high_x = math.log2(min(g for g, _ in seen)) - 0.25, math.log2(max(g for g, _ in seen)) + 0.25
    low_y, high_y = min(s for _, s in seen) / 1.25, max(s for _, s in seen) * 1.25

    def at(gpus: float, seconds: float) -> tuple[float, float]:
        x = left + (math.log2(gpus) - low_x) / (high_x - low_x) * (right - left)
        y = bottom - math.log(seconds / low_y) / math.log(high_y / low_y) * (bottom - top)
        return x, y

    for value in log_ticks(low_y, high_y, 7):
        _, y = at(here[0], value)
        pen.line([(left, y), (right, y)], "grid")
        pen.text(left - 8, y + 4, f"{value:.3g}", "end")
    powers = range(math.ceil(low_x), math.floor(high_x) + 1)
    every = math.ceil(len(powers) / (10 if wide else 5)) or 1
    for power in list(powers)[::every]:
        x, _ = at(2**power, here[1])
        pen.line([(x, bottom), (x, bottom + 4)], "muted")
        pen.text(x, bottom + 18, f"{2**power:,}", "middle")
    pen.text((left + right) / 2, bottom + 38, "cores" if answered.device == "core" else "accelerators", "middle")
    if same_batch(answered) and len(curve) > 1:
        first, last = curve[0], curve[-1]
        pen.line(
            [at(first.gpus, first.step_s), at(last.gpus, first.step_s * first.gpus / last.gpus)], "muted", 1.2, True
        )
    if len(curve) > 1:
        pen.line([at(s.gpus, s.step_s) for s in curve], "loss", 2)
    for s in curve:
        pen.dot(*at(s.gpus, s.step_s), 3.5, "loss", f"{s.gpus:,}: {text.duration(s.step_s)}")
    pen.dot(*at(*here), 6, "loss", f"this plan, {here[0]:,}: {text.duration(here[1])}", hollow=True)
    for d in sorted(answered.published, key=lambda d: d.alike):
        words = f"{d.label}, {d.gpus:,}: {text.duration(d.step_s)}{', ' if d.mapping else ''}{d.mapping}"
        pen.dot(*at(d.gpus, d.step_s), 5 if d.alike else 4, "evaluation", words, faint=not d.alike)
    return pen.svg()


def same_batch(answered: Answered) -> bool:
    """Whether all points of the curve run the same tokens a step, so that perfect scaling halves the step time."""
    tokens = [s.gpus * s.step_s * s.tokens_per_s_per_gpu for s in answered.scaling]
    return bool(tokens) and max(tokens) <= 1.001 * min(tokens)
