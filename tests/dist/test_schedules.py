"""Pipeline schedules by their action tables: right order of work, and the bubbles that theory gives."""

from __future__ import annotations

import pytest

from timetrial.config import Plan
from timetrial.parallel.pipeline import Action, action_table
from timetrial.parallel.plan import stage_rank

PLANS = [
    Plan(pp=2, gbs=4),
    Plan(pp=4, gbs=4),
    Plan(pp=4, gbs=11),
    Plan(pp=2, vp=2, gbs=4),
    Plan(pp=4, vp=3, gbs=8),
    Plan(pp=4, vp=2, gbs=2),
    Plan(pp=2, gbs=6, schedule="zb"),
    Plan(pp=4, vp=2, gbs=8, schedule="zb"),
    Plan(pp=2, vp=2, gbs=4, schedule="zbv"),
    Plan(pp=4, vp=2, gbs=12, schedule="zbv"),
]
COST = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time of a stage's work, in forward passes: each half of a backward pass costs one matrix product more."""


def name(plan: Plan) -> str:
    return f"{plan.schedule}-pp{plan.pp}-vp{plan.vp}-m{plan.gbs}"


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_every_micro_batch_passes_every_stage_once_both_ways(plan: Plan) -> None:
    table = action_table(plan)
    split = plan.schedule != "1f1b"
    for rank, actions in enumerate(table):
        assert all(stage_rank(a.stage, plan) == rank for a in actions)
        assert len(set(actions)) == len(actions)
    done = [a for actions in table for a in actions]
    for stage in range(plan.pp * plan.vp):
        for i in range(plan.gbs):
            forward, full = Action(stage, "F", i) in done, Action(stage, "B", i) in done
            halves = Action(stage, "I", i) in done, Action(stage, "W", i) in done
            # a zero-bubble table may keep a backward pass whole where splitting it gains nothing
            assert forward
            assert full != all(halves)
            assert split or full


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_no_rank_waits_for_what_never_comes(plan: Plan) -> None:
    """Running the tables by their dependencies ends, and each rank works for as long as its work takes."""
    ends = finish(plan)
    work = max(sum(COST[a.kind] for a in actions) for actions in action_table(plan))
    assert max(ends.values()) >= work


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 4), (4, 11), (8, 64)])
def test_1f1b_bubble_is_that_of_the_paper(pp: int, micro_batches: int) -> None:
    """(pp - 1) (F + B) beside the work: Narayanan et al. 2021, section 2.2.1."""
    assert max(finish(Plan(pp=pp, gbs=micro_batches)).values()) == 3 * (micro_batches + pp - 1)


@pytest.mark.parametrize(("pp", "vp", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 8)])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(pp: int, vp: int, micro_batches: int) -> None:
    """A stage is 1 / vp of a rank's layers, so the same count of stage times is 1 / vp of the bubble."""
    ends = finish(Plan(pp=pp, vp=vp, gbs=micro_batches))
    assert max(ends.values()) == 3 * micro_batches * vp + 3 * (pp - 1)


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_zero_bubble_schedules_wait_less(pp: int, micro_batches: int) -> None:
    """ZB1P's bubble is (pp - 1) (F + I - W), a third of 1F1B's here; ZB-V's is smaller still per stage."""
    work = 3 * micro_batches
    plain = max(finish(Plan(pp=pp, gbs=micro_batches)).values()) - work
    zb = max(finish(Plan(pp=pp, gbs=micro_batches, schedule="zb")).values()) - work
    zbv = max(finish(Plan(pp=pp, vp=2, gbs=micro_batches, schedule="zbv")).values()) / 2 - work
    assert plain == 3 * (pp - 1)
    assert zb == pp - 1
    assert zbv < zb


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_1f1b_holds_no_more_activations_than_stages_ahead(pp: int) -> None:
    for rank, actions in enumerate(action_table(Plan(pp=pp, gbs=3 * pp))):
        held = peak = 0
        for a in actions:
            held += 1 if a.kind == "F" else -1
            peak = max(peak, held)
        assert peak == pp - rank


def finish(plan: Plan) -> dict[Action, int]:
    """When each action ends if every rank works off its table and messages take no time.

    A backward pass needs the next stage's, whole or its input half; AssertionError when ranks wait in a circle.
    """
    table = action_table(plan)
    last = plan.pp * plan.vp - 1
    ends: dict[Action, int] = {}
    free, position = [0] * plan.pp, [0] * plan.pp

    def ready(a: Action) -> int | None:
        """When what `a` needs is there; None if it is not known yet."""
        if a.kind == "F":
            return ends.get(Action(a.stage - 1, "F", a.micro_batch)) if a.stage else 0
        if a.kind == "W":
            return ends.get(Action(a.stage, "I", a.micro_batch))
        if a.stage == last:
            return ends.get(Action(last, "F", a.micro_batch))
        after = (ends.get(Action(a.stage + 1, kind, a.micro_batch)) for kind in "BI")
        return next((end for end in after if end is not None), None)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                start = ready(action)
                if start is None:
                    break
                free[rank] = max(free[rank], start) + COST[action.kind]
                ends[action] = free[rank]
                position[rank] += 1
                moved = True
    assert position == [len(actions) for actions in table], "ranks wait for each other in a circle"
    return ends
