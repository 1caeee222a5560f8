"""The step time of a pipeline by formula, for searches over many plans; `schedule.lay` says it exactly.

The step ends when its longest chain of work does. Chains that can be longest, in a pipeline of pp ranks with vp
stages each and m micro batches, messages of x seconds and h forwards a hop that a rank runs ahead (1; 2 when
interleaved):

- all work of rank r; the first micro batch on its way there and the last on its way back, sum of (f + b + 2 x) over
  the stages before it; and waiting, until the first backward pass is back from the stages behind (D, the same sum over
  them, less the h (pp - 1 - r) forwards that it has to do meanwhile) and at the end in the same way. Equal stages and
  x = 0 give (pp - 1) (f + b), the bubble of Narayanan et al. 2021; with backward passes split (f, i, w) the bubble of
  ZB1P, (pp - 1) (f + i - w) (Qi et al. 2023, section 3);
- the way to the last rank and back again and again: rank r may be no more than h (pp - 1 - r) + 1 micro batches ahead,
  so in that many a step takes at least D + (f + b) of r, messages counted in;
- between two stages of one rank a micro batch goes round all ranks, pp (f + x), in which the rank has the m of one
  round to do: what is missing is waited for in the first round, and going backwards in the last.

Unequal stages mix these chains, and the V-shaped schedule has others: there a few rounds are laid out, and continued.
"""

from __future__ import annotations

from itertools import accumulate

from timetrial.config import Plan, replace
from timetrial.parallel.plan import stage_rank
from timetrial.predict.actions import rounds_of, table
from timetrial.predict.schedule import Durations, lay

EQUAL = 0.02
"""Relative spread up to which stages count as equal."""


def quick_s(plan: Plan, durations: Durations) -> float:
    """Seconds of the forward and backward passes of one step: `lay(table(plan), durations).seconds`, within 3 %.

    By `formula_s` on equal stages (0.1 ms for pp = vp = 8), else by a few rounds laid out and continued (some 5 ms).
    Raises UserError on counts that the schedule does not fit.
    """
    if plan.schedule != "zbv" and _even(durations):
        return formula_s(plan, durations)
    return continued_s(plan, durations)


def formula_s(plan: Plan, durations: Durations) -> float:
    """The longest of the chains above; unequal stages are up to a tenth off. Raises ValueError for zbv: it has none."""
    if plan.schedule == "zbv":
        raise ValueError("the V-shaped schedule has no formula; use continued_s")
    chain = _Chains(plan, durations)
    return max(*map(chain.work, range(plan.pp)), chain.early(), chain.rounds()) + chain.data()


def continued_s(plan: Plan, durations: Durations) -> float:
    """The layout of a step short enough to be cheap, continued at the pace that it has reached."""
    micro_batches, pp = plan.grad_accumulation_steps, plan.pp
    in_rounds = plan.vp > 1 and plan.schedule != "zbv"
    steady = 2 * pp + micro_batches % pp
    more = micro_batches - steady - pp
    if more <= 0 or (in_rounds and micro_batches % pp):  # odd rounds differ with the count of micro batches
        return _laid(plan, durations, micro_batches)
    short, longer = _laid(plan, durations, steady), _laid(plan, durations, steady + pp)
    pace = max((longer - short) / pp, *_work(plan, durations))  # in the end, the slowest rank sets it
    return longer + more * pace


def _laid(plan: Plan, durations: Durations, micro_batches: int) -> float:
    return lay(table(replace(plan, gbs=micro_batches * plan.mbs * plan.dp)), durations, trace=False).seconds


def _work(plan: Plan, d: Durations) -> list[float]:
    """Compute seconds of each pipeline rank for one micro batch."""
    work = [0.0] * plan.pp
    for stage, forward in enumerate(d.forward_s):
        split = plan.schedule != "1f1b"
        backward = d.backward_input_s[stage] + d.backward_weight_s[stage] if split else d.backward_s[stage]
        extra = sum(waits[stage] for waits in (d.forward_data_s, d.backward_data_s) if waits)
        work[stage_rank(stage, plan)] += forward + backward + extra
    return work


def _even(d: Durations) -> bool:
    """Whether all stages take the same time, with what their passes wait for."""
    zeros = (0.0,) * len(d.forward_s)
    waits = (d.forward_data_s or zeros, d.backward_data_s or zeros)
    pairs = zip((d.forward_s, d.backward_s), waits, strict=True)
    return all(_equal(tuple(map(sum, zip(*pair, strict=True)))) for pair in pairs)


def _equal(seconds: tuple[float, ...]) -> bool:
    return max(seconds) <= (1 + EQUAL) * min(seconds)


class _Chains:
    """Sums over stages of one plan."""

    def __init__(self, plan: Plan, d: Durations) -> None:
        self.d, self.pp, self.vp, self.m = d, plan.pp, plan.vp, plan.grad_accumulation_steps
        self.split = plan.schedule == "zb"
        self.stages = self.pp * self.vp
        self.in_round = self.m // rounds_of(plan)
        self.per_hop = 2 if self.vp > 1 and not self.split else 1
        link = d.link_s or (0.0,) * (self.stages - 1)
        latency = d.latency_s or (0.0,) * (self.stages - 1)
        self.f = list(d.forward_s)
        self.b = list(d.backward_input_s if self.split else d.backward_s)
        self.w = list(d.backward_weight_s) if self.split else [0.0] * self.stages
        if d.forward_data_s:  # waiting inside of a pass makes it longer
            self.f = [a + b for a, b in zip(self.f, d.forward_data_s, strict=True)]
        if d.backward_data_s:
            self.b = [a + b for a, b in zip(self.b, d.backward_data_s, strict=True)]
        if d.overlap_sends:
            self.x = [a + b for a, b in zip(link, latency, strict=True)] + [0.0]
        else:  # sending is work of the sender's
            self.x = [*latency, 0.0]
            self.f = [a + b for a, b in zip(self.f, [*link, 0.0], strict=True)]
            self.b = [a + b for a, b in zip(self.b, [0.0, *link], strict=True)]
        self.down = [0.0, *accumulate(a + b for a, b in zip(self.f, self.x, strict=True))]
        self.up = [0.0, *accumulate(a + b for a, b in zip(self.b, self.x, strict=True))]
        ranks = range(self.pp)
        self.total = [sum(self.f[s] + self.b[s] + self.w[s] for s in range(r, self.stages, self.pp)) for r in ranks]

    def way(self, low: int, high: int) -> float:
        """There and back over stages low to high - 1, with the messages behind each."""
        return self.down[high] - self.down[low] + self.up[high] - self.up[low]

    def work(self, rank: int) -> float:
        """The chain through all work of one rank."""
        last = self.stages - self.pp + rank
        hops = self.pp - 1 - rank
        behind = self.way(last, self.stages) - self.f[last] - self.b[last]
        ahead = self.per_hop * hops
        start = max(0.0, behind - ahead * self.f[last])
        end = max(0.0, behind - ahead * (self.b[last] + self.w[last]))
        waits = start + end if self.m > ahead + 1 else max(start, end)  # with so few, it is one and the same wait
        before = self.down[rank] + self.up[rank]
        if self.split:  # weight gradients put off fill the wait while the last gradient is on its way back
            before -= min(self.up[rank], rank * self.w[rank])
        return before + self.m * self.total[rank] + waits + self.turns(rank)

    def early(self) -> float:
        """With split backward passes: the last rank puts off its first weight gradients, so nothing hides messages."""
        n, first = min(self.m * self.vp, self.pp + 1), self.stages - self.pp
        if not self.split or self.pp == 1:
            return 0.0
        message = sum(self.x[first:-1]) / (self.pp - 1)
        return self.work(self.pp - 1) + 2 * message * (n - 1 + (1 - n) // self.pp)

    def turns(self, rank: int) -> float:
        """Waiting between two stages of a rank, in the first round and the last."""
        waits = 0.0
        for stage in range(rank, self.stages - self.pp, self.pp):
            after = stage + self.pp
            waits += max(0.0, self.down[after] - self.down[stage] - self.in_round * self.f[stage])
            if not self.split:
                waits += max(0.0, self.up[after] - self.up[stage] - self.in_round * self.b[after])
        return waits

    def rounds(self) -> float:
        """The chain that goes to the last rank and back again and again."""
        first, n = self.stages - self.pp, self.m * self.vp
        slot = max(self.total) / self.vp
        worst = 0.0
        for rank in range(self.pp - 1):
            window = self.per_hop * (self.pp - 1 - rank) + 1
            loop = self.way(first + rank, self.stages) + self.w[first + rank]
            passes = n - 1 - -(-(n - 1) // window)
            worst = max(worst, passes * (loop / window - slot) * window / (window - 1))
        if not worst:
            return 0.0
        ends = self.down[self.pp - 1] + self.up[self.pp - 1]
        return ends + n * slot + worst + self.turns(self.pp - 1)

    def data(self) -> float:
        """What all-gathers and reduce-scatters add: at the start of the first rank, and at its end."""
        late, tail = 0.0, 0.0
        gather = self.d.gather_s or (0.0,) * self.stages
        reduce = self.d.reduce_s or (0.0,) * self.stages
        if not self.d.overlap_data:
            ranks = range(self.pp)
            return max(sum(gather[r :: self.pp]) for r in ranks) + max(sum(reduce[r :: self.pp]) for r in ranks)
        for rank in range(self.pp):
            stages = range(rank, self.stages, self.pp)
            here = -self.down[rank]
            for stage in stages:
                here += gather[stage]
                late = max(late, here)
                round_s = self.in_round * self.f[stage]
                here -= max(round_s, self.down[stage + self.pp] - self.down[stage]) if stage < stages[-1] else 0.0
            free = done = 0.0  # the last backward passes go from the last stage to the first
            for stage in reversed(stages):
                free = max(free, done) + reduce[stage]
                if stage >= self.pp:
                    after = stage - self.pp
                    round_s = self.in_round * (self.b[after] + self.w[after])
                    done += max(round_s, self.up[stage] - self.up[after])
            tail = max(tail, free - done - self.up[rank])
        return late + tail
