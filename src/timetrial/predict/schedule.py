"""Lay a pipeline's action table on streams: when each rank computes, sends, waits; how long a step takes.

Each rank has a compute stream, which works off its table in order; a send stream, on which messages to its
neighbours queue; and a data stream for parameter all-gathers and gradient reduce-scatters. A forward pass needs
the output of the stage before, a backward pass (or its input half) the gradient from the stage behind; both have
arrived when the link has carried them and its latency has passed. A message between stages of one rank costs nothing.
Where parameters or gradients go out for each micro batch, a pass is longer by what of that nothing hides.

Idle time of the compute stream is a bubble as long as the rank that it waits for has not finished, and exposed
communication from then on; so busy + bubble + exposed is the step time on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from timetrial.predict.actions import Action


@dataclass(frozen=True)
class Durations:
    """Seconds of the work of one micro batch on each stage, and of what lies between stages. Tuples are by stage."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Of a whole backward pass, recomputation counted in."""
    backward_input_s: tuple[float, ...] = ()
    """Of the half for the input, where the schedule splits it."""
    backward_weight_s: tuple[float, ...] = ()
    """Of the half for the weights."""
    link_s: tuple[float, ...] = ()
    """By boundary (s, s + 1): that one message fills the link, forward as backward. Empty: nothing."""
    latency_s: tuple[float, ...] = ()
    """By boundary: from the last byte sent to the start of work on it. Empty: nothing."""
    gather_s: tuple[float, ...] = ()
    """Parameter all-gather of a stage before its first forward pass. Empty: nothing."""
    reduce_s: tuple[float, ...] = ()
    """Gradient reduce-scatter of a stage after its last backward pass. Empty: nothing."""
    overlap_sends: bool = True
    """Whether a rank computes while it sends; otherwise its compute stream waits for each message to be off."""
    overlap_data: bool = True
    """Whether all-gathers and reduce-scatters run beside compute; otherwise all before and all after it."""
    forward_data_s: tuple[float, ...] = ()
    """What every forward pass of a stage waits for over data-parallel ranks: sharded parameters, as far as nothing
    hides them. It stands before the pass. Empty: nothing."""
    backward_data_s: tuple[float, ...] = ()
    """The same of every backward pass (or its input half), with gradients that leave for each micro batch. It stands
    behind the pass. Empty: nothing."""

    @classmethod
    def uniform(cls, stages: int, forward_s: float, backward_s: float, link_s: float = 0.0) -> Durations:
        """Equal stages; the backward pass splits into equal halves."""
        half, links = (backward_s / 2,) * stages, (link_s,) * (stages - 1)
        return cls((forward_s,) * stages, (backward_s,) * stages, half, half, links)


class Interval(NamedTuple):
    """What one stream does for a while."""

    rank: int
    """Pipeline rank."""
    stream: str
    """compute, send or data."""
    kind: str
    """F, B, I, W; send; gather or reduce."""
    stage: int
    """For a send: the stage that it comes from."""
    micro_batch: int
    """-1 where it is for all of them. Of a gather or reduction inside of a pass: what is exposed of it."""
    start: float
    """Seconds from the start of the step."""
    end: float


@dataclass(frozen=True)
class RankTime:
    """Where one pipeline rank's time goes, seconds. busy + bubble + sends + data is the step time."""

    busy_s: float
    """Forward and backward work."""
    bubble_s: float
    """Waiting for others' work, and for the last rank at the end."""
    exposed_sends_s: float
    """Waiting for messages on their way, or to be off."""
    exposed_data_s: float
    """Waiting for parameter all-gathers, in passes too, and for gradient reduce-scatters at the end."""
    tail_s: float
    """The part of `exposed_data_s` at the end: the data-parallel tail."""


@dataclass(frozen=True)
class Timeline:
    """One step's forward and backward passes."""

    seconds: float
    """From the first action to the last, reduce-scatters counted in."""
    ranks: tuple[RankTime, ...]
    rows: tuple[tuple[int, str, str, int, int, float, float], ...]
    """The fields of `intervals`; empty unless asked for. Plain tuples are several times faster to make."""

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """What every stream does; in no order over streams, on one stream of one rank in order."""
        return tuple(map(Interval._make, self.rows))

    @property
    def bubble_fraction(self) -> float:
        """Bubble over busy time, mean of the ranks."""
        return sum(r.bubble_s for r in self.ranks) / sum(r.busy_s for r in self.ranks)


def lay(table: Sequence[Sequence[Action]], durations: Durations, trace: bool = True) -> Timeline:
    """When everything of `table` (by pipeline rank) happens. Without `trace` no intervals are kept.

    Raises ValueError where ranks wait for each other in a circle, or durations are not given by stage.
    """
    return _Layout(table, durations, trace).run()


class _Layout:
    """The state of one `lay`."""

    def __init__(self, table: Sequence[Sequence[Action]], durations: Durations, trace: bool) -> None:
        self.table, self.d, self.trace = table, durations, trace
        self.stages = 1 + max(stage for actions in table for stage, _, _ in actions)
        self.micro_batches = 1 + max(i for actions in table for _, _, i in actions)
        self.rank_of = [0] * self.stages
        for rank, actions in enumerate(table):
            for stage, _, _ in actions:
                self.rank_of[stage] = rank
        self.cost = self._costs()
        self.extra = {
            "F": self._by_stage(durations.forward_data_s, self.stages, "forward_data_s"),
            "B": self._by_stage(durations.backward_data_s, self.stages, "backward_data_s"),
        }
        self.extra |= {"I": self.extra["B"], "W": (0.0,) * self.stages}
        self.link = self._by_stage(durations.link_s, self.stages - 1, "link_s")
        self.latency = self._by_stage(durations.latency_s, self.stages - 1, "latency_s")
        self.gather = self._by_stage(durations.gather_s, self.stages, "gather_s")
        self.reduce = self._by_stage(durations.reduce_s, self.stages, "reduce_s")
        self.rows: list[tuple[int, str, str, int, int, float, float]] = []

    def _by_stage(self, values: tuple[float, ...], count: int, name: str) -> tuple[float, ...]:
        if values and len(values) != count:
            raise ValueError(f"{name} has {len(values)} values, not {count}")
        return values or (0.0,) * count

    def _costs(self) -> dict[str, tuple[float, ...]]:
        kinds = {kind for actions in self.table for _, kind, _ in actions}
        given = {
            "F": self.d.forward_s,
            "B": self.d.backward_s,
            "I": self.d.backward_input_s,
            "W": self.d.backward_weight_s,
        }
        for kind in sorted(kinds):
            if len(given[kind]) != self.stages:
                raise ValueError(f"durations of {kind} for {len(given[kind])} stages, but the table has {self.stages}")
        return {kind: given[kind] for kind in kinds}

    def run(self) -> Timeline:
        """Work off the ranks' tables as far as messages allow, and wake ranks by the messages that they wait for."""
        ranks, n = len(self.table), self.micro_batches
        half = self.stages * n
        # by (direction, stage that needs it, micro batch): arrival, and when the work behind it was finished
        arrival, finished = [-1.0] * (2 * half), [0.0] * (2 * half)
        for i in range(n):
            arrival[i] = arrival[half + (self.stages - 1) * n + i] = 0.0
        position, free, sending = [0] * ranks, [0.0] * ranks, [0.0] * ranks
        busy, bubble, sends = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        data, ready = self._gathers()
        waits_for, awake = [-1] * ranks, list(range(ranks))
        reduce_after = self._last_backwards()
        data_free, exposed_data = [d[0] for d in data], [d[1] for d in data]
        for rank in range(ranks):
            free[rank] = exposed_data[rank]
        link, latency, rank_of = self.link, self.latency, self.rank_of
        cost = {kind: _sums(by_stage, self.extra[kind]) for kind, by_stage in self.cost.items()}
        blocking, trace, last = not self.d.overlap_sends, self.trace, self.stages - 1
        while awake:
            rank = awake.pop()
            actions, now = self.table[rank], free[rank]
            for index in range(position[rank], len(actions)):
                stage, kind, i = actions[index]
                if kind != "W":
                    key = stage * n + i if kind == "F" else half + stage * n + i
                    there = arrival[key]
                    if there < 0:
                        waits_for[rank], position[rank], free[rank] = key, index, now
                        break
                    if there > now:
                        from_work = finished[key]
                        if from_work > now:
                            bubble[rank] += from_work - now
                            now = from_work
                        sends[rank] += there - now
                        now = there
                    if kind == "F" and ready[stage] > now:
                        exposed_data[rank] += ready[stage] - now
                        now = ready[stage]
                seconds = cost[kind][stage]
                end = now + seconds
                busy[rank] += seconds
                if trace:
                    self._pass(rank, kind, stage, i, now, end)
                now = end
                if kind != "W":
                    forward = kind == "F"
                    if stage == (last if forward else 0):
                        to = -1
                    else:
                        to, boundary = (stage + 1, stage) if forward else (stage - 1, stage - 1)
                    if to >= 0:
                        key = to * n + i if forward else half + to * n + i
                        finished[key] = arrives = end
                        other = rank_of[to]
                        if other != rank:
                            took = link[boundary]
                            start = sending[rank]
                            if start < end:
                                start = end
                            if trace and took:
                                self.rows.append((rank, "send", "send", stage, i, start, start + took))
                            sending[rank] = arrives = start + took
                            arrives += latency[boundary]
                            if blocking:
                                sends[rank] += took
                                now = end + took
                        arrival[key] = arrives
                        if waits_for[other] == key:
                            waits_for[other] = -1
                            awake.append(other)
                if (index, rank) in reduce_after:
                    self._reduce(rank, stage, now, data_free)
            else:
                position[rank], free[rank] = len(actions), now
        if any(position[rank] < len(actions) for rank, actions in enumerate(self.table)):
            raise ValueError("the ranks of this table wait for each other in a circle")
        if any(any(by_stage) for by_stage in self.extra.values()):
            for rank, actions in enumerate(self.table):
                waited = sum(self.extra[kind][stage] for stage, kind, _ in actions)
                busy[rank] -= waited
                exposed_data[rank] += waited
        return self._result(free, busy, bubble, sends, exposed_data, data_free)

    def _pass(self, rank: int, kind: str, stage: int, i: int, start: float, end: float) -> None:
        """Note a pass, with what it waits for: parameters before a forward pass, gradients behind a backward one."""
        extra = self.extra[kind][stage]
        if not extra:
            self.rows.append((rank, "compute", kind, stage, i, start, end))
        elif kind == "F":
            self.rows.append((rank, "data", "gather", stage, i, start, start + extra))
            self.rows.append((rank, "compute", kind, stage, i, start + extra, end))
        else:
            self.rows.append((rank, "compute", kind, stage, i, start, end - extra))
            self.rows.append((rank, "data", "reduce", stage, i, end - extra, end))

    def _gathers(self) -> tuple[list[tuple[float, float]], list[float]]:
        """By rank: end of its all-gathers, and how long all compute waits. By stage: when it is there."""
        ready = [0.0] * self.stages
        streams = []
        for rank, actions in enumerate(self.table):
            now = 0.0
            for stage in dict.fromkeys(stage for stage, kind, _ in actions if kind == "F"):
                now = self._on_data(rank, "gather", stage, now, self.gather[stage])
                ready[stage] = now
            streams.append((now, 0.0 if self.d.overlap_data else now))
        return streams, ready

    def _last_backwards(self) -> set[tuple[int, int]]:
        """(index in its rank's table, rank) of the actions after which a stage's gradients are whole."""
        found = set()
        for rank, actions in enumerate(self.table):
            last = {stage: index for index, (stage, kind, _) in enumerate(actions) if kind in "BW"}
            found |= {(index, rank) for index in last.values()}
        return found

    def _reduce(self, rank: int, stage: int, now: float, data_free: list[float]) -> None:
        """Put a stage's reduce-scatter on the data stream; without overlap, behind all work: see `_result`."""
        if self.reduce[stage] and self.d.overlap_data:
            start = max(now, data_free[rank])
            data_free[rank] = self._on_data(rank, "reduce", stage, start, self.reduce[stage])

    def _on_data(self, rank: int, kind: str, stage: int, start: float, seconds: float) -> float:
        if seconds and self.trace:
            self.rows.append((rank, "data", kind, stage, -1, start, start + seconds))
        return start + seconds

    def _result(
        self,
        free: list[float],
        busy: list[float],
        bubble: list[float],
        sends: list[float],
        exposed_data: list[float],
        data_free: list[float],
    ) -> Timeline:
        tails = []
        for rank, end in enumerate(free):
            if not self.d.overlap_data:
                now = end
                for stage in (s for s, r in enumerate(self.rank_of) if r == rank):
                    now = self._on_data(rank, "reduce", stage, now, self.reduce[stage])
                data_free[rank] = now
            tails.append(max(0.0, data_free[rank] - end))
        seconds = max(end + tail for end, tail in zip(free, tails, strict=True))
        times = tuple(
            RankTime(
                busy[r],
                bubble[r] + seconds - free[r] - tails[r],
                sends[r],
                exposed_data[r] + tails[r],
                tails[r],
            )
            for r in range(len(free))
        )
        return Timeline(seconds, times, tuple(self.rows))


def _sums(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True)) if any(b) else a
