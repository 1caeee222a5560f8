"""Plans: what is read, what is refused and with which advice, and where ranks lie."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest

from timetrial.config import AXES, Data, Evaluation, Lora, Optim, Plan, RunConfig
from timetrial.errors import UserError
from timetrial.models.llama.config import LlamaConfig
from timetrial.parallel.mesh import CANONICAL, Mesh, describe
from timetrial.parallel.plan import parse_plan, split_layers, validate

MODEL = LlamaConfig(vocab_size=96, dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=96)


def run_config(model: LlamaConfig = MODEL, seq_len: int = 32) -> RunConfig:
    return RunConfig("w", "mini", "v5.1", model, Data("x", seq_len=seq_len), Optim(), Evaluation("loss", 1.0, 1, 1))


def test_dp_is_what_the_other_axes_leave() -> None:
    plan = parse_plan("tp=2, pp=2,gbs=32,order=tp-cp-pp-dp,compile=true", Plan(mbs=4, dp=9), nproc=16)
    assert plan == Plan(tp=2, pp=2, dp=4, gbs=32, mbs=4, order="tp-cp-pp-dp", compile=True)
    assert parse_plan("", Plan(gbs=8), nproc=8).dp == 8
    plan = parse_plan("shard=4,zero=1", Plan(gbs=8), nproc=8)
    assert (plan.shard_size, plan.zero_stage) == (4, 1)
    assert [Plan(dp=2, pp=pp).zero_stage for pp in (1, 2)] == [3, 1]
    assert parse_plan("zero=none,cp=2", plan, nproc=8).zero_stage == 3
    assert parse_plan("dp=3", Plan(), nproc=8).dp == 3  # as asked; validate then refuses it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpp=2", "no setting 'tpp', did you mean tp"),
        ("tp", "tp needs a value"),
        ("tp=two", "needs a whole number"),
        ("tp=2,tp=4", "tp is given twice"),
        ("tp=0", "tp=0 must be at least 1"),
        ("tp=3", "does not divide 8 ranks; set --nproc to a multiple of 3"),
    ],
)
def test_unreadable_plans(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse_plan(text, Plan(), nproc=8)
    assert "\n" not in str(caught.value)


WORKING = Plan(tp=2, cp=2, dp=2, pp=2, vp=2, mbs=2, gbs=16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 4}, "= 32 ranks, but the run has 16; set dp=2"),
        ({"cp": 3}, "= 24 ranks, but the run has 16; set --nproc to 24"),
        ({"dp": 1, "gbs": 15, "world": 8}, "gbs=15 is not a multiple of mbs=2 x dp=1 = 2; set gbs=14 or 16"),
        ({"gbs": 2}, "set gbs=4"),
        ({"tp": 8, "world": 64}, r"tp=8 does not divide the model's 4 key/value heads .* one of 1, 2, 4"),
        ({"tp": 16, "world": 128}, "attention heads"),
        ({"model": {"vocab_size": 97}}, "97 vocabulary entries"),
        ({"model": {"ffn_dim": 95}}, "95 feed-forward channels"),
        ({"seq_len": 34}, "data.seq_len=34 does not split into 2 x cp=4"),
        ({"cp": 1, "seq_len": 33, "world": 8}, "sequence parallelism"),
        ({"pp": 1, "world": 8}, "vp=2 needs pipeline stages; set pp above 1"),
        ({"pp": 1, "vp": 1, "schedule": "zb", "world": 8}, "schedule=zb needs pipeline stages"),
        ({"vp": 4}, "8 stages, but .* 4 layers with embedding and loss make 6; lower pp or vp"),
        ({"vp": 1, "gbs": 4}, "at least 2 micro batches, and gbs=4 gives 1; raise gbs to 8"),
        ({"gbs": 20}, "5 micro batches do not divide into 2 equal rounds .* set gbs=16 or gbs=24"),
        ({"schedule": "zbv", "vp": 1}, "set vp=2, or schedule=zb"),
        ({"schedule": "zb", "recompute": "selective"}, "set recompute=full"),
        ({"schedule": "zb", "compile": True}, "set compile=false"),
        ({"schedule": "2f2b"}, "schedule=2f2b is unknown, did you mean 1f1b"),
        ({"model": {"tied": True}}, "model.tied"),
        ({"order": "tp-cp-dp"}, "order=tp-cp-dp must name each"),
        ({"order": "tp-tp-dp-pp"}, "must name each"),
        ({"shard": 3}, "shard=3 does not divide dp=2 x cp=2 = 4 ranks; set shard to one of 1, 2, 4, or 0 for all"),
        ({"shard": -2}, "shard=-2 does not divide"),
        ({"zero": 0}, "zero=0 is unknown; use 1, 2 or 3"),
        ({"zero": 3}, "zero=3 drops a block .* vp=2 gathers whole stages .* set zero=1"),
        ({"vp": 1, "gbs": 16, "schedule": "zb", "zero": 2}, "zero=2 drops .* schedule=zb gathers .* set zero=1"),
        ({"ep": 2}, "mixture-of-experts"),
        ({"precision": "fp8"}, "precision=fp8 is unknown"),
        ({"recompute": "ful"}, "did you mean full"),
        ({"mbs": 0}, "mbs=0 must be at least 1"),
    ],
)
def test_impossible_plans_are_refused_with_advice(changes: dict, words: str) -> None:
    validate(WORKING, run_config(), 16)
    changes = dict(changes)
    model = dataclasses.replace(MODEL, **changes.pop("model", {}))
    config = run_config(model, changes.pop("seq_len", 32))
    world = changes.pop("world", 16)
    with pytest.raises(UserError, match=words) as caught:
        validate(dataclasses.replace(WORKING, **changes), config, world)
    assert "\n" not in str(caught.value)


def test_adapters_need_layers_on_every_rank() -> None:
    plan = Plan(pp=4, gbs=4)
    config = dataclasses.replace(run_config(), lora=Lora())
    validate(plan, run_config(), 4)  # embedding | two layers | a layer | a layer and head
    with pytest.raises(UserError, match="adapters give it nothing to train; lower pp or vp"):
        validate(plan, config, 4)
    validate(Plan(pp=2, vp=2, gbs=4), config, 2)


def test_advice_works() -> None:
    """What a refusal proposes for the global batch is itself accepted."""
    for gbs in (16, 24):
        validate(dataclasses.replace(WORKING, gbs=gbs), run_config(), 16)


@pytest.mark.parametrize("n_layers", [1, 2, 4, 7, 32, 126])
def test_layers_are_split_once_and_evenly(n_layers: int) -> None:
    for stages in range(1, n_layers + 3):
        parts = split_layers(n_layers, stages)
        assert [layer for _, layers, _ in parts for layer in layers] == list(range(n_layers))
        assert [embedding for embedding, _, _ in parts] == [True] + [False] * (stages - 1)
        assert [head for _, _, head in parts] == [False] * (stages - 1) + [True]
        sizes = [embedding + len(layers) + head for embedding, layers, head in parts]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_405b_falls_evenly_on_64_stages() -> None:
    assert {e + len(layers) + h for e, layers, h in split_layers(126, 64)} == {2}


@pytest.mark.parametrize("order", ["-".join(p) for p in itertools.permutations(AXES)])
def test_any_order_is_one_mesh(order: str) -> None:
    mesh = Mesh.of(Plan(tp=2, cp=3, dp=4, pp=5, order=order))
    assert sorted(mesh.rank(**mesh.coordinates(r)) for r in range(120)) == list(range(120))
    assert mesh.stride(order.split("-")[0]) == 1
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(r for group in groups for r in group) == list(range(120))
        assert all(b - a == mesh.stride(axis) for g in groups for a, b in itertools.pairwise(g))
    ranks = mesh.rank_tensor()
    axes = ("pp", *mesh.data_axes, "tp")
    assert sorted(axes) == sorted(CANONICAL)
    assert ranks.shape == tuple(mesh.sizes[axis] for axis in axes)
    assert ranks[3, 1, 1, 1].item() == mesh.rank(**dict(zip(axes, (3, 1, 1, 1), strict=True)))


@pytest.mark.parametrize("order", ["-".join(p) for p in itertools.permutations(AXES)])
def test_shard_groups_are_the_nearest_ranks(order: str) -> None:
    """Groups of 4 of dp x cp = 12 ranks, with the replicas across them; every other choice reaches further."""
    mesh = Mesh.of(Plan(tp=2, cp=3, dp=4, pp=5, shard=4, order=order))
    shards, replicas = mesh.shard_groups(), mesh.replicate_groups()
    assert len(shards) == 30
    assert len(replicas) == 40
    for groups, size in ((shards, 4), (replicas, 3)):
        assert {len(group) for group in groups} == {size}
        assert sorted(r for group in groups for r in group) == list(range(120))
    whole = {tuple(sorted(group)) for group in mesh.groups("dp", "cp")}
    for copy in whole:
        inside = sorted(group for group in shards if set(group) <= set(copy))
        assert [r for group in inside for r in group] == list(copy)  # cut in the order of ranks
    for group in replicas:
        assert len({i for i, shard in enumerate(shards) for r in group if r in shard}) == 3


def test_a_shard_group_of_72_lies_in_its_domain() -> None:
    text = describe(Plan(dp=144, shard=72, gbs=144), gpus_per_node=4, domain=72)
    assert "shard    72    2 groups, each over 18 nodes; all within one domain" in text
    assert "           0-71\n           72-143\n" in text
    assert "replicate 2     72 groups, each over 2 nodes; each over 2 domains\n           0, 72\n" in text
    assert "shard" not in describe(Plan(dp=144, gbs=144))


def test_record_mappings_of_2496_ranks() -> None:
    """TP4 x CP2 x PP8 x DP39 (the 405B record): data parallel last keeps whole pipelines in 64 ranks."""
    last = Mesh.of(Plan(tp=4, cp=2, pp=8, vp=8, dp=39, order="tp-cp-pp-dp"))
    assert last.world_size == 2496
    assert last.group(0, "pp") == list(range(0, 64, 8))
    assert last.group(2495, "dp") == list(range(63, 2496, 64))
    assert all(group[-1] // 64 == group[0] // 64 for group in last.groups("pp"))
    text = describe(Plan(tp=4, cp=2, pp=8, vp=8, dp=39, order="tp-cp-pp-dp"), gpus_per_node=4, domain=64)
    assert "2496 ranks on 624 nodes of 4, scale-up domains of 64; order tp-cp-pp-dp" in text
    assert "pp       8     312 groups, each over 8 nodes; all within one domain" in text
    assert "0, 8, 16, ... 56" in text
    spread = describe(Plan(tp=4, cp=2, pp=8, dp=39), gpus_per_node=4, domain=64)
    assert "pp       8     312 groups, each over 8 nodes; each over 8 domains" in spread


def test_reach_is_counted_where_groups_differ() -> None:
    """Three ranks a node and pairs: of each two pairs one lies across the border."""
    text = describe(Plan(tp=2, dp=3), gpus_per_node=3)
    assert "tp       2     3 groups, 2 of 3 within one node" in text


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from timetrial.parallel import plan, mesh; from timetrial.config import Plan; "
        "mesh.describe(Plan(tp=2)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
