"""What each axis alone sends: the recorded collectives of one step against the formula of the axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from layouts import GBS, MODEL, SEQ_LEN, config_of, model_of, samples, share
from world import run_world

from timetrial.config import Plan
from timetrial.parallel.parallelize import build
from timetrial.parallel.record import Collective, Recorder

FLOAT = 4
"""bytes"""
LAYERS, DIM, VOCAB = MODEL.n_layers, MODEL.dim, MODEL.vocab_size
BLOCK = MODEL.layer_params() * FLOAT
ENDS = (2 * VOCAB * DIM + DIM) * FLOAT
"""Embedding, last norm and head: FSDP's root unit."""
BOTH = (0, 1)

PLANS = {
    "dp": Plan(dp=2, mbs=2, precision="fp32"),
    "tp": Plan(tp=2, mbs=GBS, precision="fp32"),
    "cp": Plan(cp=2, mbs=GBS, precision="fp32"),
    "pp": Plan(pp=2, mbs=2, precision="fp32"),
    "pp interleaved": Plan(pp=2, vp=2, mbs=2, precision="fp32"),
}


def record(plans: dict[str, Plan]) -> dict[str, list[Collective]]:
    """The calls of one warm step of each plan."""
    calls = {}
    for name, plan in plans.items():
        plan = replace(plan, gbs=GBS)
        config = config_of(plan)
        engine = build(config, lambda config=config: model_of(config))
        micro_batches = share(samples(0), engine, plan)
        engine.train_step(micro_batches, 100)  # the first step also makes connections
        engine.model.zero_grad()
        with Recorder() as recorder:
            engine.train_step(micro_batches, 100)
        calls[name] = recorder.calls
    return calls


@pytest.fixture(scope="module")
def calls() -> list[dict[str, list[Collective]]]:
    """Per rank: the calls of each plan."""
    return run_world(record, 2, PLANS)


def of(kind: str, size: int, times: int) -> dict[Collective, int]:
    return {Collective(kind, BOTH, size): times}


def test_every_rank_makes_the_same_collectives_in_the_same_order(calls: list[dict[str, list[Collective]]]) -> None:
    for name in PLANS:
        one, other = ([c for c in rank[name] if c.kind not in ("send", "receive")] for rank in calls)
        assert one == other


def test_dp_reduces_once_a_step(calls: list[dict[str, list[Collective]]]) -> None:
    """Parameters are gathered per block, both ways, for each micro batch; gradients are reduced after the last."""
    micro_batches = GBS // 2 // 2
    found = Counter(calls[0]["dp"])
    reduced = of("reduce_scatter", BLOCK, LAYERS) | of("reduce_scatter", ENDS, 1)
    assert {c: n for c, n in found.items() if c.kind == "reduce_scatter"} == reduced
    gathered = of("all_gather", BLOCK, micro_batches * 2 * LAYERS) | of("all_gather", ENDS, micro_batches)
    assert {c: n for c, n in found.items() if c.kind == "all_gather"} == gathered
    assert set(found) == set(reduced) | set(gathered)
    order = [c.kind for c in calls[0]["dp"]]
    before_the_last_backward = (micro_batches - 1) * (2 * LAYERS + 1) + LAYERS + 1
    assert set(order[:before_the_last_backward]) == {"all_gather"}


def test_tp_gathers_and_scatters_tokens_twice_a_block(calls: list[dict[str, list[Collective]]]) -> None:
    """Korthikanti et al. 2022, section 4.2.2: an all-gather and a reduce-scatter per half block, both ways."""
    tokens = GBS * SEQ_LEN
    activations = tokens * DIM * FLOAT
    norms = (2 * LAYERS + 1) * DIM * FLOAT
    expected = (
        # each half block, forward and backward; embedding one way forward, head the other
        of("all_gather", activations, 2 * 2 * LAYERS + 2)
        | of("reduce_scatter", activations, 2 * 2 * LAYERS + 2)
        | of("all_reduce", tokens * FLOAT, 1)  # the rows' maxima
        | of("all_reduce", 2 * tokens * FLOAT, 1)  # their sums and the labels' logits
        | of("all_reduce", norms, 1)  # gradients of what every rank holds
    )
    assert Counter(calls[0]["tp"]) == expected


def test_cp_passes_keys_and_values_round(calls: list[dict[str, list[Collective]]]) -> None:
    """Per layer cp - 1 turns forward; backward these again, and cp turns of their gradients."""
    cp = 2
    both = 2 * GBS * MODEL.n_kv_heads * (SEQ_LEN // cp) * MODEL.head_dim * FLOAT
    turns = LAYERS * ((cp - 1) + (cp - 1) + cp)
    found = Counter(calls[0]["cp"])
    assert found[Collective("send", BOTH, both)] == turns
    assert found[Collective("receive", BOTH, both)] == turns
    assert found[Collective("reduce_scatter", BOTH, BLOCK)] == LAYERS
    assert found[Collective("all_reduce", BOTH, FLOAT)] == 1  # the loss
    assert sum(c.kind in ("send", "receive") for c in found.elements()) == 2 * turns


@pytest.mark.parametrize(("name", "borders"), [("pp", 1), ("pp interleaved", 3)])
def test_pp_sends_activations_over_each_border(
    name: str, borders: int, calls: list[dict[str, list[Collective]]]
) -> None:
    """Per micro batch and border between stages one message there and one of its gradient back."""
    micro_batches = GBS // 2
    message = 2 * SEQ_LEN * DIM * FLOAT
    sent = sum((Counter(rank[name]) for rank in calls), Counter())
    assert sent[Collective("send", BOTH, message)] == 2 * borders * micro_batches
    assert sent[Collective("receive", BOTH, message)] == 2 * borders * micro_batches
    assert sent[Collective("all_reduce", BOTH, FLOAT)] == 2  # the loss, on both ranks
    assert len(sent) == 3
