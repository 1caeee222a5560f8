"""What `--dry-run` says a rank holds."""

from __future__ import annotations

import pytest

from timetrial.config import Data, Evaluation, Lora, Optim, Plan, RunConfig
from timetrial.models.llama.config import LlamaConfig
from timetrial.train.build import empty_model
from timetrial.train.dryrun import Bytes, bytes_per_rank, mapping

MODEL = LlamaConfig(vocab_size=96, dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=96)
TOTAL = MODEL.n_params()
BLOCK = MODEL.layer_params()
ENDS = TOTAL - 4 * BLOCK


def held(plan: Plan, lora: Lora | None = None) -> Bytes:
    config = RunConfig(
        "w", "mini", "v5.1", MODEL, Data("x", seq_len=32), Optim(), Evaluation("loss", 1.0, 1, 1), plan, lora=lora
    )
    return bytes_per_rank(config, empty_model(config))


def test_one_rank_holds_everything() -> None:
    assert held(Plan(precision="fp32")) == Bytes(4 * TOTAL, 4 * TOTAL, 8 * TOTAL, 0)
    assert held(Plan()) == Bytes(4 * TOTAL, 4 * TOTAL, 8 * TOTAL, 2 * TOTAL)


@pytest.mark.parametrize(
    ("settings", "shards"),
    [({"dp": 4}, 4), ({"dp": 4, "shard": 2}, 2), ({"dp": 4, "shard": 1}, 1), ({"dp": 2, "cp": 2}, 4)],
)
def test_a_shard_group_shares_one_copy(settings: dict[str, int], shards: int) -> None:
    """Two micro batches. ZeRO-3 has two blocks and the ends at once, ZeRO-1 all weights and all gradients."""
    gbs = 2 * settings["dp"]
    by_stage = {zero: held(Plan(gbs=gbs, zero=zero, precision="fp32", **settings)) for zero in (1, 2, 3)}
    for size in by_stage.values():
        assert size.weights == 4 * TOTAL / shards
        assert size.optimizer == 8 * TOTAL / shards
    assert [by_stage[zero].gradients for zero in (1, 2, 3)] == [4 * TOTAL, 4 * TOTAL / shards, 4 * TOTAL / shards]
    assert [by_stage[zero].in_use for zero in (1, 2, 3)] == [4 * TOTAL, 4 * TOTAL, 4 * (ENDS + 2 * BLOCK)]


def test_one_micro_batch_is_reduced_block_by_block() -> None:
    assert held(Plan(dp=2, gbs=2, zero=1)).gradients == 2 * TOTAL
    assert held(Plan(dp=2, pp=2, gbs=4)).gradients == 2 * TOTAL  # of a stage, until the step ends


def test_adapters_have_gradients_and_moments_alone() -> None:
    lora = Lora(rank=4, targets=("wq",))
    adapters = 4 * (4 * 64 * 2)
    size = held(Plan(tp=2, gbs=1, precision="fp32"), lora)
    assert size == Bytes(2 * (TOTAL + adapters), 2 * adapters, 4 * adapters, 0)


def test_the_mapping_says_how_it_is_sharded() -> None:
    config = RunConfig(
        "w", "mini", "v5.1", MODEL, Data("x"), Optim(), Evaluation("loss", 1.0, 1, 1), Plan(dp=4, shard=2, gbs=4)
    )
    assert mapping(config) == "TP1 x CP1 x PP1 x DP4, order tp-cp-dp-pp, sharded over 2, ZeRO-3"
