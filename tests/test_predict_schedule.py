"""Action tables without torch, their layout on streams, and the step time by formula."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time

import pytest

from timetrial.config import Plan
from timetrial.errors import UserError
from timetrial.predict.actions import Action, table
from timetrial.predict.quick import continued_s, formula_s, quick_s
from timetrial.predict.schedule import Durations, Interval, Timeline, lay

PLANS = [
    Plan(pp=2, gbs=4),
    Plan(pp=4, gbs=11),
    Plan(pp=4, vp=3, gbs=8),
    Plan(pp=4, vp=2, gbs=10),
    Plan(pp=4, vp=2, gbs=2),
    Plan(pp=4, gbs=8, schedule="zb"),
    Plan(pp=4, vp=2, gbs=8, schedule="zb"),
    Plan(pp=4, vp=2, gbs=12, schedule="zbv"),
    Plan(pp=4, vp=2, gbs=3, schedule="zbv"),
]


def name(plan: Plan) -> str:
    return f"{plan.schedule}-pp{plan.pp}-vp{plan.vp}-m{plan.gbs}"


def ones(plan: Plan, forward_s: float = 1.0, backward_s: float = 2.0, **changes: object) -> Durations:
    uniform = Durations.uniform(plan.pp * plan.vp, forward_s, backward_s)
    return dataclasses.replace(uniform, **changes)  # type: ignore[arg-type]


def spans(timeline: Timeline, rank: int, stream: str = "compute") -> dict[str, tuple[float, float]]:
    """ "F0" -> start and end, of a rank with one stage."""
    found = [i for i in timeline.intervals if (i.rank, i.stream) == (rank, stream)]
    return {f"{i.kind}{i.micro_batch}": (i.start, i.end) for i in found}


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb", "zbv"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_tables_are_those_that_the_trainer_executes(schedule: str, pp: int) -> None:
    from timetrial.parallel.pipeline import action_table

    compared = 0
    for vp, micro_batches in itertools.product((2,) if schedule == "zbv" else (1, 2, 4), range(2, 33)):
        plan = Plan(pp=pp, vp=vp, gbs=micro_batches, schedule=schedule)
        try:
            ours = table(plan)
        except UserError:
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                action_table(plan)
            continue
        assert ours == action_table(plan), name(plan)
        compared += 1
    assert compared >= 31


def test_megatrons_warm_up() -> None:
    """Forwards before the first backward, less the one that is in turn with it: Megatron-Core, schedules.py."""
    for pp, vp, rounds in ((4, 1, 3), (4, 2, 3), (8, 4, 2)):
        for rank, actions in enumerate(table(Plan(pp=pp, vp=vp, gbs=rounds * pp))):
            warm_up = (pp - rank - 1) * 2 + (vp - 1) * pp if vp > 1 else pp - rank - 1
            assert [a.kind for a in actions].index("B") == warm_up + 1


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(pp=4, vp=2, gbs=9), "9 micro batches do not divide into 2 equal rounds"),
        (Plan(pp=4, vp=3, gbs=8, schedule="zbv"), "set vp=2"),
        (Plan(pp=4, gbs=8, schedule="gpipe"), "schedule=gpipe is unknown"),
        (Plan(pp=4, gbs=1, dp=2), "raise gbs"),
    ],
)
def test_plans_without_a_table(plan: Plan, words: str) -> None:
    with pytest.raises(UserError, match=words):
        table(plan)
    with pytest.raises(UserError, match=words):
        quick_s(plan, ones(plan))


# ---- layout: by hand -----------------------------------------------------------------------------


def test_1f1b_by_hand() -> None:
    plan = Plan(pp=2, gbs=2)
    timeline = lay(table(plan), ones(plan))
    assert timeline.seconds == 9
    assert spans(timeline, 0) == {"F0": (0, 1), "F1": (1, 2), "B0": (4, 6), "B1": (7, 9)}
    assert spans(timeline, 1) == {"F0": (1, 2), "B0": (2, 4), "F1": (4, 5), "B1": (5, 7)}
    assert [r.bubble_s for r in timeline.ranks] == [3, 3]


def test_messages_by_hand() -> None:
    plan = Plan(pp=2, gbs=2)
    timeline = lay(table(plan), ones(plan, link_s=(0.5,), latency_s=(0.25,)))
    assert spans(timeline, 0) == {"F0": (0, 1), "F1": (1, 2), "B0": (5.5, 7.5), "B1": (8.5, 10.5)}
    assert spans(timeline, 1) == {"F0": (1.75, 2.75), "B0": (2.75, 4.75), "F1": (4.75, 5.75), "B1": (5.75, 7.75)}
    assert spans(timeline, 0, "send") == {"send0": (1, 1.5), "send1": (2, 2.5)}
    first = timeline.ranks[0]
    assert (first.busy_s, first.bubble_s, first.exposed_sends_s) == (6, 3, 1.5)


def test_without_overlap_a_rank_waits_until_its_message_is_off() -> None:
    plan = Plan(pp=2, gbs=2)
    timeline = lay(table(plan), ones(plan, link_s=(0.5,), latency_s=(0.25,), overlap_sends=False))
    assert spans(timeline, 0) == {"F0": (0, 1), "F1": (1.5, 2.5), "B0": (5.5, 7.5), "B1": (9, 11)}
    assert spans(timeline, 1) == {"F0": (1.75, 2.75), "B0": (2.75, 4.75), "F1": (5.25, 6.25), "B1": (6.25, 8.25)}


def test_messages_queue_on_a_slow_link() -> None:
    plan = Plan(pp=2, gbs=2)
    timeline = lay(table(plan), ones(plan, link_s=(5.0,)))
    assert spans(timeline, 0, "send") == {"send0": (1, 6), "send1": (6, 11)}
    assert spans(timeline, 1)["F1"] == (11, 12)


def test_zero_bubble_by_hand() -> None:
    plan = Plan(pp=2, gbs=2, schedule="zb")
    timeline = lay(table(plan), ones(plan))
    assert timeline.seconds == 7
    assert spans(timeline, 0) == {"F0": (0, 1), "F1": (1, 2), "I0": (3, 4), "W0": (4, 5), "I1": (5, 6), "W1": (6, 7)}
    assert spans(timeline, 1) == {"F0": (1, 2), "I0": (2, 3), "F1": (3, 4), "I1": (4, 5), "W0": (5, 6), "W1": (6, 7)}


def test_v_shape_by_hand() -> None:
    """Two micro batches go down ranks 0, 1 and up 1, 0; the turn on rank 1 needs no message."""
    plan = Plan(pp=2, vp=2, gbs=1, schedule="zbv")
    timeline = lay(table(plan), ones(plan, link_s=(0.5, 100.0, 0.5)))
    work = [(i.stage, i.kind, i.start) for i in timeline.intervals if i.stream == "compute"]
    forwards = [(0, "F", 0.0), (1, "F", 1.5), (2, "F", 2.5), (3, "F", 4.0)]
    upper = [(3, "I", 5.0), (3, "W", 6.0), (2, "I", 6.5), (2, "W", 7.5)]
    lower = [(1, "I", 8.5), (1, "W", 9.5), (0, "I", 10.0), (0, "W", 11.0)]
    assert sorted(work) == sorted(forwards + upper + lower)
    assert [i.stage for i in timeline.intervals if i.stream == "send"] == [0, 2, 3, 1]
    assert timeline.seconds == 12


# ---- layout: what must hold ----------------------------------------------------------------------


def random_durations(plan: Plan, rng: random.Random) -> Durations:
    n = plan.pp * plan.vp

    def some(count: int, scale: float) -> tuple[float, ...]:
        return tuple(scale * rng.uniform(0.5, 1.5) for _ in range(count))

    flags = rng.random() < 0.5, rng.random() < 0.5
    return Durations(
        some(n, 1),
        some(n, 2),
        some(n, 1),
        some(n, 1),
        some(n - 1, 0.3),
        some(n - 1, 0.1),
        some(n, 1),
        some(n, 1),
        *flags,
    )


@pytest.mark.parametrize("plan", PLANS, ids=name)
@pytest.mark.parametrize("seed", range(3))
def test_streams_do_one_thing_at_a_time_and_wait_for_what_they_need(plan: Plan, seed: int) -> None:
    d = random_durations(plan, random.Random(seed))
    tables = table(plan)
    timeline = lay(tables, d)
    by_stream: dict[tuple[int, str], list[Interval]] = {}
    for interval in timeline.intervals:
        by_stream.setdefault((interval.rank, interval.stream), []).append(interval)
    for (rank, stream), done in by_stream.items():
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(done)), stream
        if stream == "compute":
            assert [Action(i.stage, i.kind, i.micro_batch) for i in done] == tables[rank]
    work = {
        (i.stage, "B" if i.kind == "I" else i.kind, i.micro_batch): i
        for i in timeline.intervals
        if i.stream == "compute"
    }
    rank_of = {stage: i.rank for (stage, _, _), i in work.items()}
    gathered = {i.stage: i.end for i in timeline.intervals if i.kind == "gather"}
    last = plan.pp * plan.vp - 1
    for (stage, kind, i), interval in work.items():
        before = {"F": stage - 1, "B": stage + 1, "W": stage}[kind]
        if kind == "F":
            assert interval.start >= gathered[stage] - 1e-9
        if kind == "W":
            assert interval.start >= work[stage, "B", i].end - 1e-9
        elif 0 <= before <= last:
            boundary = min(stage, before)
            message = d.link_s[boundary] + d.latency_s[boundary] if rank_of[before] != rank_of[stage] else 0.0
            assert interval.start >= work[before, kind, i].end + message - 1e-9
    for reduce in (i for i in timeline.intervals if i.kind == "reduce"):
        assert reduce.start >= max(i.end for (stage, _, _), i in work.items() if stage == reduce.stage) - 1e-9
    assert timeline.seconds == pytest.approx(max(i.end for i in timeline.intervals))


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_each_rank_accounts_for_the_whole_step(plan: Plan) -> None:
    timeline = lay(table(plan), random_durations(plan, random.Random(7)), trace=False)
    assert timeline.intervals == ()
    for rank in timeline.ranks:
        parts = (rank.busy_s, rank.bubble_s, rank.exposed_sends_s, rank.exposed_data_s)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(timeline.seconds)
        assert 0 <= rank.tail_s <= rank.exposed_data_s


@pytest.mark.parametrize(("pp", "vp", "rounds"), [(2, 2, 2), (4, 2, 1), (4, 3, 3), (8, 4, 2), (8, 1, 3)])
def test_the_bubble_is_that_of_the_paper(pp: int, vp: int, rounds: int) -> None:
    """(pp - 1) / (vp m) of the work: Narayanan et al. 2021, section 2.2.2."""
    plan = Plan(pp=pp, vp=vp, gbs=rounds * pp)
    timeline = lay(table(plan), ones(plan), trace=False)
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (vp * plan.gbs))


def test_gathers_hide_behind_forwards_and_reductions_behind_backwards() -> None:
    plan = Plan(pp=2, vp=2, gbs=2)
    plain = lay(table(plan), ones(plan)).seconds
    data = {"gather_s": (1.0,) * 4, "reduce_s": (3.0,) * 4}
    hidden = lay(table(plan), ones(plan, **data))
    assert hidden.seconds == plain + 1 + 3  # the first all-gather, the last reduce-scatter
    assert hidden.ranks[0].tail_s == 3
    exposed = lay(table(plan), ones(plan, **data, overlap_data=False))
    assert exposed.seconds == plain + 2 + 6
    assert exposed.ranks[0].exposed_data_s == 8


def test_one_rank_without_a_pipeline() -> None:
    timeline = lay(table(Plan(gbs=3)), Durations((1.0,), (2.0,), reduce_s=(0.5,)))
    assert (timeline.seconds, timeline.ranks[0].busy_s, timeline.ranks[0].tail_s) == (9.5, 9, 0.5)


def test_bad_tables_and_durations() -> None:
    plan = Plan(pp=2, gbs=2)
    circle = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(ValueError, match="circle"):
        lay(circle, ones(plan))
    with pytest.raises(ValueError, match="link_s has 2 values, not 1"):
        lay(table(plan), ones(plan, link_s=(1.0, 1.0)))
    with pytest.raises(ValueError, match="durations of I for 0 stages"):
        lay(table(Plan(pp=2, gbs=2, schedule="zb")), Durations((1.0, 1.0), (2.0, 2.0)))


def test_the_405b_pipeline_is_laid_in_a_blink() -> None:
    plan = Plan(pp=8, vp=8, gbs=144)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        timeline = lay(table(plan), ones(plan, link_s=(0.01,) * 63))
        best = min(best, time.perf_counter() - start)
    assert len(timeline.rows) == 18432 * 2 - 2 * 144
    assert best < 0.15


# ---- formula -------------------------------------------------------------------------------------


def random_case(rng: random.Random, spread: float) -> tuple[Plan, Durations]:
    schedule = rng.choice(("1f1b", "1f1b", "zb", "zbv"))
    pp, vp = rng.choice((2, 3, 4, 6, 8)), 2 if schedule == "zbv" else rng.choice((1, 2, 3, 4, 8))
    micro_batches = pp * rng.randint(1, 8) if rng.random() < 0.7 else rng.randint(pp, 2 * pp - 1)
    n, backward, share, message = pp * vp, rng.uniform(1, 3), rng.uniform(0.35, 0.65), rng.uniform(0, 0.33)
    layers = [rng.uniform(1, 1 + spread) for _ in range(n)]
    halves = [tuple(backward * part * k for k in layers) for part in (share, 1 - share)]
    d = Durations(
        tuple(layers),
        tuple(a + b for a, b in zip(*halves, strict=True)),
        *halves,
        link_s=(message * 0.8,) * (n - 1),
        latency_s=(message * 0.2,) * (n - 1),
        overlap_sends=rng.random() < 0.6,
    )
    return Plan(pp=pp, vp=vp, gbs=micro_batches, schedule=schedule), d


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_the_formula_is_within_3_percent_of_the_layout(spread: float) -> None:
    rng = random.Random(11)
    for _ in range(150):
        plan, d = random_case(rng, spread)
        assert quick_s(plan, d) == pytest.approx(lay(table(plan), d, trace=False).seconds, rel=0.03), (plan, d)


def test_the_formula_counts_data_parallel_communication() -> None:
    rng = random.Random(12)
    for _ in range(100):
        plan, d = random_case(rng, 0.0)
        n = plan.pp * plan.vp
        gather, reduce, overlap = rng.uniform(0, 4), rng.uniform(0, 4), rng.random() < 0.7
        d = dataclasses.replace(d, gather_s=(gather,) * n, reduce_s=(reduce,) * n, overlap_data=overlap)
        assert quick_s(plan, d) == pytest.approx(lay(table(plan), d, trace=False).seconds, rel=0.03), (plan, d)


def test_the_formula_without_a_pipeline() -> None:
    assert quick_s(Plan(gbs=3), Durations((1.0,), (2.0,), gather_s=(0.25,), reduce_s=(0.5,))) == 9.75


def test_formulas_of_the_papers() -> None:
    plain = Plan(pp=8, gbs=32)
    assert quick_s(plain, ones(plain)) == pytest.approx((32 + 7) * 3)
    zb = Plan(pp=8, gbs=32, schedule="zb")
    d = ones(zb, backward_input_s=(1.2,) * 8, backward_weight_s=(0.8,) * 8)
    assert quick_s(zb, d) == pytest.approx(32 * 3 + 7 * (1 + 1.2 - 0.8))
    with pytest.raises(ValueError, match="no formula"):
        formula_s(Plan(pp=2, vp=2, gbs=4, schedule="zbv"), ones(Plan(pp=2, vp=2)))


def test_continuing_and_the_formula_agree() -> None:
    plan = Plan(pp=8, vp=8, gbs=144)
    d = ones(plan, link_s=(0.05,) * 63)
    assert continued_s(plan, d) == pytest.approx(formula_s(plan, d), rel=0.001)
