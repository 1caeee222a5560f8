"""What each axis alone sends: the recorded collectives of one step against the formula of the axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from layouts import GBS, MODEL, SEQ_LEN, config_of, engine_of, samples, share
from world import run_world

from timetrial.config import Plan
from timetrial.parallel.record import Collective, Recorder

FLOAT = 4
"""bytes"""
LAYERS, DIM, VOCAB = MODEL.n_layers, MODEL.dim, MODEL.vocab_size
BLOCK = MODEL.layer_params() * FLOAT
ENDS = (2 * VOCAB * DIM + DIM) * FLOAT
"""Embedding, last norm and head: FSDP's root unit."""
BOTH = (0, 1)

PLANS = {
    "dp, zero 3": Plan(dp=2, mbs=2, precision="fp32"),
    "dp, zero 2": Plan(dp=2, mbs=2, zero=2, precision="fp32"),
    "dp, zero 1": Plan(dp=2, mbs=2, zero=1, precision="fp32"),
    "tp": Plan(tp=2, mbs=GBS, precision="fp32"),
    "cp": Plan(cp=2, mbs=GBS, precision="fp32"),
    "pp": Plan(pp=2, mbs=2, precision="fp32"),
    "pp interleaved": Plan(pp=2, vp=2, mbs=2, precision="fp32"),
}
HYBRID = {f"zero {zero}": Plan(dp=4, shard=2, mbs=1, zero=zero, precision="fp32") for zero in (1, 2, 3)} | {
    "pp": Plan(pp=2, dp=2, mbs=1, precision="fp32"),
    "pp, zero 3": Plan(pp=2, dp=2, mbs=1, zero=3, precision="fp32"),
}


def record(plans: dict[str, Plan]) -> dict[str, list[Collective]]:
    """The calls of one warm step of each plan."""
    calls = {}
    for name, plan in plans.items():
        plan = replace(plan, gbs=GBS)
        config = config_of(plan)
        engine = engine_of(config)
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


@pytest.fixture(scope="module")
def hybrid() -> list[dict[str, list[Collective]]]:
    """Likewise on four ranks."""
    return run_world(record, 4, HYBRID)


def of(kind: str, size: int, times: int, ranks: tuple[int, ...] = BOTH) -> dict[Collective, int]:
    return {Collective(kind, ranks, size): times}


def test_every_rank_makes_the_same_collectives_in_the_same_order(calls: list[dict[str, list[Collective]]]) -> None:
    for name in PLANS:
        one, other = ([c for c in rank[name] if c.kind not in ("send", "receive")] for rank in calls)
        assert one == other


def sharding(zero: int, micro_batches: int, ranks: tuple[int, ...] = BOTH) -> dict[Collective, int]:
    """What FSDP sends in a step, by the table in `fsdp.py`; the unit outside the blocks is gathered once a use."""
    gathers = {1: (1, 1), 2: (1, 1), 3: (2 * micro_batches, micro_batches)}[zero]
    reductions = 1 if zero == 1 else micro_batches
    return (
        of("all_gather", BLOCK, LAYERS * gathers[0], ranks)
        | of("all_gather", ENDS, gathers[1], ranks)
        | of("reduce_scatter", BLOCK, LAYERS * reductions, ranks)
        | of("reduce_scatter", ENDS, reductions, ranks)
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_dp_gathers_and_reduces_as_its_stage_says(zero: int, calls: list[dict[str, list[Collective]]]) -> None:
    micro_batches = GBS // 2 // 2
    assert micro_batches > 1
    found = calls[0][f"dp, zero {zero}"]
    assert Counter(found) == sharding(zero, micro_batches)
    if zero == 1:  # nothing is sent between the first forward and the last backward
        assert [c.kind for c in found] == ["all_gather"] * (LAYERS + 1) + ["reduce_scatter"] * (LAYERS + 1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hsdp_sends_shards_alone_between_its_groups(zero: int, hybrid: list[dict[str, list[Collective]]]) -> None:
    """Gathers and reduce-scatters stay in the shard group; once a step a shard is all-reduced over its replicas."""
    micro_batches = GBS // 4
    for rank, shards, replicas in ((0, (0, 1), (0, 2)), (3, (2, 3), (1, 3))):
        between = of("all_reduce", BLOCK // 2, LAYERS, replicas) | of("all_reduce", ENDS // 2, 1, replicas)
        assert Counter(hybrid[rank][f"zero {zero}"]) == sharding(zero, micro_batches, shards) | between


def test_pp_keeps_blocks_gathered_unless_told_otherwise(hybrid: list[dict[str, list[Collective]]]) -> None:
    """Over two stages of two blocks and an end each: as without a pipeline, on half of the layers."""
    micro_batches = GBS // 2
    for rank in range(4):
        ranks = (0, 1) if rank < 2 else (2, 3)
        blocks = [
            {
                kind: Counter(hybrid[rank][name])[Collective(kind, ranks, BLOCK)]
                for kind in ("all_gather", "reduce_scatter")
            }
            for name in ("pp", "pp, zero 3")
        ]
        assert blocks[0] == {"all_gather": LAYERS // 2, "reduce_scatter": LAYERS // 2}
        assert blocks[1] == {"all_gather": LAYERS * micro_batches, "reduce_scatter": LAYERS // 2 * micro_batches}


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
