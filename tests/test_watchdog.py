"""Who is to blame, from beats alone; what a job that is started again finds; how a launcher sums up."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from timetrial.config import dumps
from timetrial.errors import UserError
from timetrial.train import launch, takeup
from timetrial.train.launch import Ended
from timetrial.train.pulse import Beat, Collective, ranks_text
from timetrial.train.rundir import RunDir
from timetrial.train.watchdog import gone, judge, last_of
from timetrial.workloads.workload import resolve

ALL = (0, 1, 2, 3)


def reduced(number: int, ranks: tuple[int, ...] = ALL, at: float = 0.0) -> Collective:
    return Collective("all_reduce", "0", ranks, number, at or float(number))


def waiting(count: int, number: int, ranks: tuple[int, ...] = ALL) -> Beat:
    now, before = reduced(number, ranks), reduced(number - 1, ranks)
    return Beat(count, step=7, last=now, done=before, waiting=now)


def verdict(before: dict[int, Beat | None], after: dict[int, Beat | None], rank: int = 0) -> str:
    mine = after[rank]
    assert mine is not None
    return judge(rank, mine, 30.0, 30.0, before, after)


def test_a_beat_survives_the_store():
    beat = dataclasses.replace(waiting(3, 9), place="train/loop.py:1 (_steps)", state="lost")
    assert Beat.loads(beat.dumps()) == beat


def test_ranks_in_words():
    assert ranks_text([1]) == "rank 1"
    assert ranks_text([3, 0, 1, 2, 7]) == "ranks 0-3, 7"


def test_a_rank_whose_beat_stands_still_is_to_blame_before_all_others():
    before = {r: waiting(10, 5) for r in ALL} | {2: Beat(4, 7, reduced(3)), 3: Beat(10, 7, reduced(4))}
    after = {r: waiting(20, 5) for r in ALL} | {2: Beat(4, 7, reduced(3)), 3: Beat(20, 7, reduced(4))}
    said = verdict(before, after)
    # its last beat was at #3; #4 is over for others, so it was in that, too
    assert said.startswith("rank 2 hangs: no sign of life for 30 s, last in all_reduce #4 of ranks 0-3 (step 7); ended")
    assert "--timeout 30 s" in said


def test_a_rank_that_waits_for_none_is_to_blame_when_all_are_alive():
    stuck = Beat(20, 7, reduced(4), reduced(4), place="data/loader.py:88 (next)")
    after = {r: waiting(20, 5) for r in ALL} | {1: stuck}
    before = {r: waiting(10, 5) for r in ALL} | {1: dataclasses.replace(stuck, count=10)}
    assert verdict(before, after).startswith(
        "rank 1 hangs in data/loader.py:88 (next) for 30 s, last in all_reduce #4 of ranks 0-3 (step 7) "
        "while ranks 0, 2-3 wait in all_reduce #5 of ranks 0-3; ended"
    )


def test_a_rank_that_waits_for_a_message_is_not_to_blame():
    stuck, other = Beat(20, 7, reduced(4)), Beat(20, 7, reduced(4), blocked=True, place="parallel/pipeline.py:1 (step)")
    after = {0: other, 1: stuck}
    before = {r: dataclasses.replace(beat, count=10) for r, beat in after.items()}
    said = verdict(before, after)
    assert said.startswith("rank 1 hangs for 30 s")
    assert "while rank 0 waits for a message at parallel/pipeline.py:1 (step)" in said


def test_ranks_that_never_came_and_ranks_that_ended_are_named():
    here = waiting(20, 5)
    assert "ranks 1-2 did not come" in verdict({0: here, 1: None, 2: None}, {0: here, 1: None, 2: None})
    over = Beat(9, 7, reduced(4), state="ended")
    assert verdict({0: waiting(10, 5), 1: over}, {0: here, 1: over}).startswith("rank 1 ended, last in all_reduce #4")


def test_all_waiting_is_a_knot():
    after = {0: waiting(20, 5, (0, 1)), 1: waiting(20, 9, (1, 2)), 2: waiting(20, 3, (0, 2))}
    before = {r: dataclasses.replace(beat, count=10) for r, beat in after.items()}
    assert verdict(before, after).startswith(
        "the ranks wait for one another for 30 s: rank 0 in all_reduce #5 of ranks 0-1, "
        "rank 1 in all_reduce #9 of ranks 1-2, rank 2 in all_reduce #3 of ranks 0, 2; ended"
    )


def test_the_collective_that_failed_for_others_is_the_last_of_a_dead_rank():
    lost = Beat(12, 8, reduced(6, (0, 1)), reduced(5, (0, 1)), state="lost")
    elsewhere = Beat(12, 8, reduced(9, (2, 3)), reduced(8, (2, 3)), state="lost")
    dead = Beat(11, 7, reduced(3, (0, 1)))
    assert last_of(1, {0: lost, 1: dead, 2: elsewhere}) == "last in all_reduce #6 of ranks 0-1 (step 8)"
    assert last_of(1, {1: None}) == "before its first collective"
    said = gone(0, lost, {0: lost, 1: dead}, {0: lost, 1: dead})
    assert said.startswith("rank 1 is gone, last in all_reduce #6 of ranks 0-1 (step 8)")


# ---- the launcher's summary ----------------------------------------------------------------------


def outcome(tmp_path: Path, ended: list[Ended], beats: dict[int, Beat | None], verdict: str | None = None):
    said = [tmp_path / f"rank-{rank}" for rank in range(len(ended))]
    for path in said:
        path.write_text(f"error: words of {path.name}\n")
    return launch._outcome(ended, said, verdict, beats)


def test_the_launcher_names_the_rank_that_a_signal_killed_not_those_it_killed_itself(tmp_path):
    ended = [Ended(-9, by_us=True), Ended(-9, by_us=False), Ended(1, by_us=False)]
    beats = {0: Beat(3), 1: Beat(3), 2: Beat(3, state="lost")}
    code, message, again = outcome(tmp_path, ended, beats)
    assert (code, again) == (1, True)
    assert message is not None
    assert message.startswith("rank 1 was killed by signal 9, before its first collective; --resume")


def test_the_launcher_is_silent_where_rank_0_spoke_and_does_not_start_again(tmp_path):
    beats = {0: Beat(3, state="failed"), 1: Beat(3, state="lost")}
    assert outcome(tmp_path, [Ended(2, False), Ended(1, False)], beats) == (2, None, False)


def test_the_launcher_passes_on_what_another_rank_said(tmp_path):
    beats = {0: Beat(3, state="lost"), 1: Beat(3, state="failed")}
    code, message, again = outcome(tmp_path, [Ended(1, False), Ended(1, False)], beats)
    assert (code, again) == (1, False)
    assert message is not None
    assert message.startswith("rank 1 ended with exit code 1: words of rank-1; --resume")


def test_a_verdict_comes_first_and_all_well_says_nothing(tmp_path):
    assert outcome(tmp_path, [Ended(-9, True), Ended(1, False)], {0: Beat(1), 1: Beat(1)}, "rank 0 hangs") == (
        1, "rank 0 hangs", True,
    )  # fmt: skip
    assert outcome(tmp_path, [Ended(0, False)] * 2, {0: Beat(1, state="ended"), 1: None}) == (0, None, False)


# ---- starting again ------------------------------------------------------------------------------


def test_a_job_that_starts_again_keeps_threads_and_may_have_other_ranks(tmp_path):
    config = dataclasses.replace(resolve("llama31_8b", "mini"), max_steps=10)
    run = RunDir(tmp_path)
    assert takeup.find(config, tmp_path) == takeup.Start(config, resume=False)
    run.config.write_text(dumps(dataclasses.replace(config, threads=3)))
    assert takeup.find(config, tmp_path) == takeup.Start(dataclasses.replace(config, threads=3), resume=True)
    more = dataclasses.replace(config, plan=dataclasses.replace(config.plan, dp=2))
    assert takeup.find(more, tmp_path) == takeup.Start(more, resume=True)
    for other in (
        dataclasses.replace(config, seed=5),
        dataclasses.replace(config, plan=dataclasses.replace(config.plan, gbs=2 * config.plan.gbs)),
        dataclasses.replace(config, optim=dataclasses.replace(config.optim, base_lr=0.5)),
    ):
        with pytest.raises(UserError, match="another --out"):
            takeup.find(other, tmp_path)


@pytest.mark.parametrize(
    ("status", "steps", "over"),
    [("success", 3, True), ("aborted", 3, True), ("stopped", 3, False), ("stopped", 10, True), ("torn", 3, False)],
)
def test_only_a_run_with_nothing_left_to_do_is_over(status, steps, over, tmp_path):
    config = dataclasses.replace(resolve("llama31_8b", "mini"), max_steps=10)
    run = RunDir(tmp_path)
    run.config.write_text(dumps(config))
    text = json.dumps({"status": status, "steps": steps})
    run.result.write_text(text[:-5] if status == "torn" else text)
    assert (takeup.find(config, tmp_path).result is not None) == over


def test_nobody_waits_without_a_process_group():
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
