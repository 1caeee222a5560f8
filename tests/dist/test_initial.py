"""Initial values by shards: the same bits under every plan, and never a whole model on a rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from layouts import GBS, MODEL, config_of, model_of, values_of, whole
from torch.profiler import ProfilerActivity, profile
from world import run_world

from timetrial.config import Lora, Plan, RunConfig
from timetrial.models.llama import hf
from timetrial.models.llama.config import LlamaConfig
from timetrial.models.llama.hf_names import plain_name
from timetrial.parallel.initial import Values, fill
from timetrial.parallel.parallelize import build
from timetrial.train.build import InitialValues, empty_model
from timetrial.train.dryrun import bytes_per_rank

ADAPTERS = Lora(rank=5, targets=("wqkv", "wo", "w2"))
"""A rank that two do not share out evenly."""
DEEP = LlamaConfig(vocab_size=128, dim=64, n_layers=8, n_heads=4, n_kv_heads=2, ffn_dim=128)
LARGEST = DEEP.vocab_size * DEEP.dim * 4
"""bytes"""
PLANS = {
    "dp": Plan(dp=2),
    "replicas": Plan(dp=2, shard=1),
    "tp": Plan(tp=2),
    "cp": Plan(cp=2),
    "pp": Plan(pp=2),
    "pp v-shaped": Plan(pp=2, vp=2, schedule="zbv"),
}
MIXED = {"dp tp": Plan(dp=2, tp=2), "hybrid": Plan(dp=4, shard=2), "pp tp": Plan(pp=2, tp=2, order="pp-tp-dp-cp")}


@dataclass
class Started:
    """What a rank holds after a start, and what that took."""

    weights: dict[str, torch.Tensor]
    """Whole, of the parameters this rank has a part of."""
    asked: list[str]
    """Names for which a whole value was made or read, in that order."""
    peak: int
    """Bytes that tensors took at once."""
    held: int
    """Bytes of this rank's parts."""


def start(plan: Plan, adapters: Lora | None = None, model: LlamaConfig = MODEL, weights: Path | None = None) -> Started:
    config = config_of(replace(plan, gbs=GBS, precision="fp32"), adapters, model)
    asked: list[str] = []
    values = values_of(config) if weights is None else InitialValues(config, weights)
    gc.collect()  # what an earlier start left must not be freed while this one is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        engine = build(config, empty_model(config), noting(values, asked))
    peak = now = 0
    changes = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for change in sorted(changes, key=lambda e: e.start_ns()):
        now += change.nbytes()
        peak = max(peak, now)
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in engine.model.parameters()]
    found = {name: whole(p.detach()) for name, p in engine.parameters_named()}
    return Started(found, asked, peak, sum(p.numel() * p.element_size() for p in parts))


def noting(values: Values, asked: list[str]) -> Values:
    def noted(shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
        given = values(shapes)
        while True:
            try:
                name, value = next(given)
            except StopIteration:
                return
            asked.append(name)
            yield name, value
            del value  # as the fill does

    return noted


def start_all(plans: dict[str, Plan], checkpoint: Path | None) -> dict[tuple[str, str], Started]:
    found = {}
    for name, plan in plans.items():
        found[name, "plain"] = start(plan)
        found[name, "adapters"] = start(plan, ADAPTERS)
        if checkpoint is not None:
            found[name, "deep"] = start(plan, model=DEEP)
            found[name, "read"] = start(plan, ADAPTERS, weights=checkpoint)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "hf"
    hf.save(whole_model(config_of(Plan(), model=replace(MODEL, init_std=0.3))), path)
    return path


def whole_model(config: RunConfig) -> torch.nn.Module:
    model = config.model.create()
    model.init_weights(config.seed)
    return model


@pytest.fixture(scope="module")
def on_two(checkpoint: Path) -> list[dict[tuple[str, str], Started]]:
    return run_world(start_all, 2, PLANS, checkpoint)


@pytest.fixture(scope="module")
def on_four() -> list[dict[tuple[str, str], Started]]:
    return run_world(start_all, 4, MIXED, None)


def same_bits(ranks: list[dict[tuple[str, str], Started]], key: tuple[str, str], right: torch.nn.Module) -> None:
    """Every rank's parameters, and all ranks' together."""
    expected = {name: p.detach() for name, p in right.named_parameters()}
    for rank in ranks:
        for name, value in rank[key].weights.items():
            assert value.equal(expected[name]), f"{key}: {name}"
    assert {name for rank in ranks for name in rank[key].weights} == set(expected)


@pytest.mark.parametrize("adapters", [None, ADAPTERS], ids=["plain", "adapters"])
def test_every_plan_starts_from_one_ranks_bits(adapters: Lora | None, on_two: list, on_four: list) -> None:
    right = model_of(config_of(Plan(), adapters))
    for plans, ranks in ((PLANS, on_two), (MIXED, on_four)):
        for name in plans:
            same_bits(ranks, (name, "adapters" if adapters else "plain"), right)


def test_one_rank_starts_as_the_model_itself_does() -> None:
    config = config_of(Plan())
    same_bits([{("one", "plain"): start(Plan())}], ("one", "plain"), whole_model(config))


@pytest.mark.parametrize("name", PLANS)
def test_a_checkpoint_is_read_once_and_only_where_it_is_needed(name: str, on_two: list, checkpoint: Path) -> None:
    config = config_of(Plan(), ADAPTERS)
    stored = config.model.create()
    hf.load(stored, checkpoint)
    expected = dict(stored.named_parameters())
    for rank in on_two:
        started = rank[name, "read"]
        assert len(set(started.asked)) == len(started.asked)
        assert set(started.asked) == set(started.weights)
        for ours, value in started.weights.items():
            if ".lora_" not in ours:
                assert value.equal(expected[plain_name(ours)]), ours
    assert {ours for rank in on_two for ours in rank[name, "read"].asked} == dict(
        empty_model(config).named_parameters()
    ).keys()


@pytest.mark.parametrize("name", ["pp", "pp v-shaped"])
def test_no_stage_makes_another_stages_parameters(name: str, on_two: list) -> None:
    one, other = (set(rank[name, "deep"].asked) for rank in on_two)
    assert not one & other
    assert "embed.weight" in one
    assert "head.weight" in (one if name == "pp v-shaped" else other)


@pytest.mark.parametrize("name", ["dp", "tp", "cp", "pp", "pp v-shaped"])
def test_a_start_takes_a_ranks_shards_and_one_parameter(name: str, on_two: list) -> None:
    """The tenth is for what torch makes of its own: groups, generators."""
    total = 4 * DEEP.n_params()
    for rank in on_two:
        started = rank[name, "deep"]
        assert started.held <= started.peak <= started.held + 1.1 * LARGEST
        assert started.peak < 0.65 * total


@pytest.mark.parametrize("name", ["dp", "replicas", "tp", "cp", "dp tp", "hybrid"])
def test_a_rank_holds_what_the_dry_run_says(name: str, on_two: list, on_four: list) -> None:
    """But for the norms, which every tensor-parallel rank holds whole."""
    ranks, plan = (on_two, PLANS[name]) if name in PLANS else (on_four, MIXED[name])
    config = config_of(replace(plan, gbs=GBS, precision="fp32"))
    for rank in ranks:
        assert rank[name, "plain"].held == pytest.approx(bytes_per_rank(config, empty_model(config)).weights, rel=0.02)


def test_the_peak_sees_a_whole_model() -> None:
    started = start(Plan(), model=DEEP)
    assert started.held == 4 * DEEP.n_params()
    assert started.held < started.peak <= started.held + 1.1 * LARGEST


def test_values_must_be_those_that_were_asked_for() -> None:
    config = config_of(Plan())
    good = InitialValues(config, None)
    with pytest.raises(ValueError, match=r"no value was given for layers.0.attention_norm.weight"):
        fill(
            empty_model(config),
            lambda shapes: (x for x in good(shapes) if x[0] != "layers.0.attention_norm.weight"),
            "cpu",
        )
    with pytest.raises(ValueError, match=r"embed.weight of shape \[2\] was not asked for"):
        fill(empty_model(config), lambda shapes: iter([("embed.weight", torch.ones(2))]), "cpu")
    with pytest.raises(ValueError, match=r"other of shape \[2\] was not asked for"):
        fill(empty_model(config), lambda shapes: iter([("other", torch.ones(2))]), "cpu")
