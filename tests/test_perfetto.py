"""A predicted step as a trace: whole, in order, and small enough to open."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from prediction_cases import PIPELINED, answer, answered
from timetrial.errors import UserError
from timetrial.report import perfetto

BOTH = pytest.mark.parametrize("name", ["pipelined", "adapted"])


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """(process, thread) -> its slices by start, the longer one first."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return {key: sorted(own, key=lambda e: (e["ts"], -e["dur"])) for key, own in found.items()}


def ns(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


@BOTH
def test_slices_of_one_thread_never_overlap_and_kernels_lie_within_their_pass(name: str) -> None:
    kernels = 0
    for own in slices(perfetto.trace(answered(name))["traceEvents"]).values():
        above: list[tuple[int, int]] = []
        for event in own:
            start, end = ns(event)
            while above and above[-1][1] <= start:
                above.pop()
            assert not above or end <= above[-1][1], event
            if above:
                assert "layer" in event["args"], "only kernels lie within another slice"
                kernels += 1
            assert len(above) <= 1
            above.append((start, end))
    assert kernels > 100


@BOTH
def test_the_trace_ends_where_the_step_does(name: str) -> None:
    a = answered(name)
    step = a.prediction.step
    events = [e for own in slices(perfetto.trace(a)["traceEvents"]).values() for e in own]
    ends = [ns(e)[1] for e in events if e["cat"] != "after the pipeline"]
    pipeline_s = step.timeline.seconds if step.timeline else step.seconds - sum(
        step.parts[part] for part in ("dp", "optimizer", "skew", "fixed")
    )  # fmt: skip
    assert max(ends) == pytest.approx(pipeline_s * 1e9, abs=2)
    assert max(ns(e)[1] for e in events) == pytest.approx(step.seconds * 1e9, abs=2)
    assert min(ns(e)[0] for e in events) == 0  # gathers, or the first forward pass


@BOTH
def test_every_pass_is_there_with_its_stage_and_micro_batch(name: str) -> None:
    a = answered(name)
    step = a.prediction.step
    seen = set()
    for event in perfetto.trace(a)["traceEvents"]:
        if event.get("cat") in ("forward", "backward"):
            about = event["args"]
            assert step.stages[about["stage"]].rank == event["pid"]
            assert event["dur"] == pytest.approx(
                getattr(step.stages[about["stage"]].seconds, event["cat"]).total * 1e6, abs=0.002
            )
            seen.add((event["cat"], about["stage"], about["micro batch"]))
    assert len(seen) == 2 * len(step.stages) * step.micro_batches


@BOTH
def test_processes_and_threads_have_names(name: str) -> None:
    events = perfetto.trace(answered(name))["traceEvents"]
    ranks = answered(name).prediction.request.plan.pp
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {rank: f"pipeline rank {rank}" for rank in range(ranks)}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads) == set(slices(events))
    assert {"compute", "communication", "data parallel"} <= set(threads.values()) <= set(perfetto.THREADS)


@BOTH
def test_products_and_collectives_stand_side_by_side(name: str) -> None:
    """In the first micro batch, every kernel of the stages' layers is drawn where its pass is."""
    a = answered(name)
    events = perfetto.trace(a)["traceEvents"]
    shown = [e for e in events if e["ph"] == "X" and "layer" in e.get("args", {})]
    products = [e for e in shown if e["cat"] == "matrix products"]
    collectives = [e for e in shown if e["cat"].endswith("exposed")]
    assert products
    assert {perfetto.THREADS[e["tid"] - 1] for e in products} == {"compute"}
    assert {perfetto.THREADS[e["tid"] - 1] for e in collectives} == {"communication"}
    computing = sorted(ns(e) for e in products if e["pid"] == 0)
    beside = sum(
        any(start < end2 and start2 < end for start2, end2 in computing)
        for start, end in (ns(e) for e in collectives if e["pid"] == 0)
    )
    assert beside > 10
    assert {"m", "n", "k", "format"} <= set(products[0]["args"])


def test_a_large_pipeline_is_below_twenty_megabytes(tmp_path: Path) -> None:
    large = answer({**PIPELINED, "gbs": str(144 * 8)})
    assert large.prediction.step.micro_batches == 144
    path = perfetto.write(large, tmp_path / "step.json")
    assert path.stat().st_size < 20e6
    packed = perfetto.write(large, tmp_path / "step.json.gz")
    assert packed.stat().st_size < path.stat().st_size / 5
    assert json.loads(gzip.decompress(packed.read_bytes())) == json.loads(path.read_bytes())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step.json", "step.json.gz"]


def test_zero_bubble_schedules_show_both_halves() -> None:
    a = answered("pipelined")
    asked = a.prediction.request
    plan = dataclasses.replace(asked.plan, schedule="zb")
    config = dataclasses.replace(asked.config, plan=plan)
    split = dataclasses.replace(
        a, prediction=dataclasses.replace(a.prediction, request=dataclasses.replace(asked, config=config))
    )
    kinds = {e.get("cat") for e in perfetto.trace(split)["traceEvents"]}
    assert {"forward", "backward, inputs", "backward, weights"} <= kinds
    assert "backward" not in kinds


def test_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\.json or \.json\.gz"):
        perfetto.write(answered("adapted"), tmp_path / "step.txt")
    with pytest.raises(UserError, match="cannot be written"):
        perfetto.write(answered("adapted"), tmp_path / "no" / "step.json")
    assert list(tmp_path.iterdir()) == []
