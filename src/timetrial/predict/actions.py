"""The pipeline's action table without torch: what each pipeline rank computes, in order.

`parallel/pipeline.action_table` takes the tables from the schedule classes of torch.distributed.pipelining, which the
trainer executes; a test holds these equal to them. The sources are the papers: 1F1B, Narayanan et al. 2019
(PipeDream-Flush); interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473; ZB1P and ZB-V, Qi et al. 2023,
arXiv:2401.10241, sections 3 and 6.

Megatron-Core's tables are the same where micro batches divide by pp: warm-up of (pp - rank - 1) forwards, or
(pp - rank - 1) x 2 + (vp - 1) x pp with interleaving, micro batches in groups of pp, then one forward and one
backward in turn (core/pipeline_parallel/schedules.py). Torch also takes counts that do not divide by pp, in equal
rounds; Megatron has its own group size for that (microbatch_group_size_per_vp_stage).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from timetrial.config import Plan
from timetrial.errors import UserError


class Action(NamedTuple):
    """One piece of work of a pipeline rank."""

    stage: int
    kind: str
    """F forward, B backward; zero-bubble schedules split B into I (for the input) and W (for the weights)."""
    micro_batch: int


def table(plan: Plan) -> list[list[Action]]:
    """What each pipeline rank computes, in order. Raises UserError on counts that the schedule does not fit."""
    rounds, micro_batches = rounds_of(plan), plan.grad_accumulation_steps
    if plan.schedule == "zbv":
        return [list(_v_shaped(rank, plan.pp, micro_batches)) for rank in range(plan.pp)]
    split = plan.schedule == "zb"
    per_hop = 2 if plan.vp > 1 and not split else 1
    in_round = micro_batches // rounds
    tables = []
    for rank in range(plan.pp):
        ahead = (plan.vp - 1) * in_round + per_hop * (plan.pp - 1 - rank)
        tables.append(list(_interleaved(rank, plan.pp, plan.vp, in_round, rounds, ahead, split)))
    return tables


def rounds_of(plan: Plan) -> int:
    """Rounds in which the micro batches of a step go through a rank's stages.

    Raises UserError on an unknown schedule and on counts that it does not fit.
    """
    micro_batches = plan.grad_accumulation_steps
    if micro_batches < 1:
        raise UserError(f"gbs={plan.gbs} is less than mbs={plan.mbs} x dp={plan.dp}; raise gbs")
    if plan.schedule not in ("1f1b", "zb", "zbv"):
        raise UserError(f"schedule={plan.schedule} is unknown; use 1f1b, zb or zbv")
    if plan.schedule == "zbv":
        if plan.vp != 2:
            raise UserError(f"schedule=zbv runs two stages a rank, not vp={plan.vp}; set vp=2, or schedule=zb")
        return 1
    if plan.schedule == "1f1b" and plan.vp == 1:
        return 1
    rounds = max(1, micro_batches // plan.pp)
    if micro_batches % rounds:
        raise UserError(
            f"{micro_batches} micro batches do not divide into {rounds} equal rounds over pp={plan.pp}; change gbs"
        )
    return rounds


def _interleaved(rank: int, pp: int, vp: int, in_round: int, rounds: int, ahead: int, split: bool) -> Iterator[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left.

    Work goes through the rank's stages in rounds of `in_round` micro batches, backwards in reverse. With `split`,
    rank r works r backwards ahead of its weight gradients, so that ranks behind it get their inputs sooner.
    """

    def place(step: int) -> tuple[int, int]:
        turn, i = divmod(step, in_round)
        turn_of_stage, chunk = divmod(turn, vp)
        return chunk, turn_of_stage * in_round + i

    total = rounds * in_round * vp
    ahead = min(ahead, total)
    backwards = [(vp - 1 - chunk, i) for chunk, i in map(place, range(total))]
    for step in range(ahead):
        chunk, i = place(step)
        yield Action(chunk * pp + rank, "F", i)
    for step, (back, j) in enumerate(backwards):
        if ahead + step < total:
            chunk, i = place(ahead + step)
            yield Action(chunk * pp + rank, "F", i)
        yield Action(back * pp + rank, "I" if split else "B", j)
        if split and step >= rank:
            weight, j = backwards[step - rank]
            yield Action(weight * pp + rank, "W", j)
    if split:
        for weight, j in backwards[max(0, total - rank) :]:
            yield Action(weight * pp + rank, "W", j)


def _v_shaped(rank: int, pp: int, micro_batches: int) -> Iterator[Action]:
    """ZB-V: a rank's first stage on the way down, its second on the way up.

    The table is that of at least 2 pp - 1 micro batches, without those that there are not.
    """
    down, up = rank, 2 * pp - 1 - rank
    for stage, kind, i in _v_steps(rank, pp, max(2 * pp - 1, micro_batches)):
        if i < micro_batches:
            yield Action(up if stage else down, kind, i)


def _v_steps(rank: int, pp: int, micro_batches: int) -> Iterator[tuple[int, str, int]]:
    """(0 down or 1 up, kind, micro batch)."""
    done = dict.fromkeys([(stage, kind) for stage in (0, 1) for kind in "FIW"], 0)

    def do(stage: int, kinds: str) -> Iterator[tuple[int, str, int]]:
        for kind in kinds:
            yield stage, kind, done[stage, kind]
            done[stage, kind] += 1

    for _ in range(2 * (pp - rank) - 1):
        yield from do(0, "F")
    for _ in range(rank):
        yield from do(1, "F")
        yield from do(0, "F")
    for _ in range(pp - rank):
        yield from do(1, "FIW")
    while done[0, "F"] < micro_batches or done[1, "F"] < done[0, "F"]:
        if done[0, "F"] < micro_batches:
            yield from do(0, "F")
        yield from do(0, "IW")
        yield from do(1, "FIW")
    for _ in range(rank):
        yield from do(0, "I")
        yield from do(1, "I")
    for _ in range(pp - rank):
        yield from do(0, "IW")
    for stage in (1, 0):
        while done[stage, "W"] < done[stage, "I"]:
            yield from do(stage, "W")
