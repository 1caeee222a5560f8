"""The official presets against sources that are not ours: RCP files, rule files, Hugging Face's models."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import resources
from typing import Any

import pytest
import torch

from timetrial import config as configs
from timetrial.errors import UserError
from timetrial.models import lora
from timetrial.models.lora_targets import lora_params
from timetrial.optim import schedule
from timetrial.workloads import llama2_70b_lora, llama31_405b
from timetrial.workloads.workload import find, resolve

LANGUAGE = ("llama31_8b", "llama31_405b", "llama2_70b_lora")
ROUNDS = {"v5.0": "5.0.0", "v5.1": "5.1.0", "v6.0": "6.0.0", "v6.1": "6.1.0"}
CASES = [(name, round_) for name in LANGUAGE for round_ in find(name).rounds]
NO_FLOAT_FITS = [1984, 3520, 3968, 5824, 7040, 7936, 8384]
"""Multiples of 64 up to 9,216 at which the checker takes no learning rate at all."""


def rcps(name: str, round_: str) -> list[dict[str, Any]]:
    """The reference convergence points that mlperf-logging ships."""
    path = resources.files("mlperf_logging.rcp_checker") / f"training_{ROUNDS[round_]}" / f"rcps_{name}.json"
    return list(json.loads(path.read_text()).values())


def evaluated_at(config: configs.RunConfig, up_to: int) -> set[int]:
    """Samples after which a run evaluates, found by stepping."""
    steps = range(up_to // config.plan.gbs + 1)
    gbs = config.plan.gbs
    return {(step + 1) * gbs for step in steps if config.evaluation.due(step * gbs, (step + 1) * gbs)}


# ---- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama31_8b", 8_030_261_248), ("llama31_405b", 402_699_272_192), ("llama2_70b_lora", 68_976_648_192)],
)
def test_parameter_counts(name: str, parameters: int) -> None:
    shape = resolve(name, "official").model
    assert shape.n_params() == parameters
    with torch.device("meta"):
        assert sum(p.numel() for p in shape.create().parameters()) == parameters


def test_lora_trains_what_the_reference_trains() -> None:
    """One A and one B for the fused query, key and value, and one each for the output projection."""
    config = resolve("llama2_70b_lora", "official")
    assert config.lora is not None
    q_k_v = 8192 + 2 * 8 * 128
    assert lora_params(config.model, config.lora) == 80 * 16 * (8192 + q_k_v + 8192 + 8192) == 44_564_480
    with torch.device("meta"):
        model = config.model.create()
        lora.apply(model, config.lora, seed=1)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 44_564_480


def test_405b_with_metas_own_vocabulary() -> None:
    """Meta's checkpoint has 128,256 rows at either end; the benchmark keeps the first 32,000."""
    assert dataclasses.replace(llama31_405b.MODEL, vocab_size=128_256).n_params() == 405_853_388_800


@pytest.mark.parametrize("name", LANGUAGE)
def test_shape_counts_as_many_as_hugging_faces_model(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    ours = resolve(name, "official").model
    theirs = transformers.LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.dim,
        intermediate_size=ours.ffn_dim,
        num_hidden_layers=2,  # of the real count; layers are alike
        num_attention_heads=ours.n_heads,
        num_key_value_heads=ours.n_kv_heads,
        tie_word_embeddings=ours.tied,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(theirs)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    ends = sum(p.numel() for p in model.parameters()) - 2 * layer
    assert ours.n_params() == ends + ours.n_layers * layer


def test_flop_per_sample_against_the_constants_in_published_configurations() -> None:
    """NVIDIA's MODEL_TFLOP_PER_SAMPLE (results v5.1): 421.59 for 8B and 21,508 for 405B.

    They count differently: 8B with 128,000 ids and half the attention, as we do; 405B with 128,256 ids
    and the whole of it.
    """
    small = dataclasses.replace(resolve("llama31_8b", "official").model, vocab_size=128_000)
    assert small.flops_per_sample(8192) / 1e12 == pytest.approx(421.59, abs=0.005)
    large = dataclasses.replace(llama31_405b.MODEL, vocab_size=128_256)
    other_half = 6.0 * large.n_layers * large.dim * 8192**2
    assert (large.flops_per_sample(8192) + other_half) / 1e12 == pytest.approx(21_508, abs=1)


# ---- hyperparameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "round_"), CASES)
def test_hyperparameters_are_those_of_every_rcp(name: str, round_: str) -> None:
    points = rcps(name, round_)
    assert points
    for point in points:
        theirs, gbs = point["Hyperparams"], point["BS"]
        config = resolve(name, "official", round_, gbs)
        assert config.optim.base_lr == pytest.approx(theirs["opt_base_learning_rate"], rel=1e-12)
        if "opt_learning_rate_warmup_steps" in theirs:
            assert config.optim.warmup_steps == theirs["opt_learning_rate_warmup_steps"]
        elif "opt_learning_rate_warmup_samples" in theirs:
            assert 0 <= config.optim.warmup_steps * gbs - theirs["opt_learning_rate_warmup_samples"] < gbs
        else:
            assert config.optim.warmup_steps == theirs["opt_learning_rate_warmup_epochs"] == 0
            assert config.optim.decay_steps == theirs["max_steps"]
            assert config.optim.clip_norm == theirs["opt_max_grad_norm"]
            assert config.lora is not None
            assert (config.lora.rank, config.lora.alpha) == (theirs["lora_r"], theirs["lora_alpha"])


@pytest.mark.parametrize(("name", "round_"), CASES)
def test_every_rcp_converged_at_one_of_our_evaluations(name: str, round_: str) -> None:
    """Each reference run stopped at an evaluation, so the interval and the skipped ones must fit them all.

    One RCP breaks the rules: llama31_8b at 96 was evaluated every 129 steps, where 12,288 is 128 steps.
    """
    for point in rcps(name, round_):
        stops = next(value for key, value in point.items() if "converge" in key.lower())
        if (name, point["BS"]) == ("llama31_8b", 96):
            assert all(stop % (129 * 96) == 0 for stop in stops)
            continue
        ours = evaluated_at(resolve(name, "official", round_, point["BS"]), max(stops))
        assert set(stops) <= ours


def test_rounds_of_405b_differ_in_evaluation_alone() -> None:
    old, new = (resolve("llama31_405b", "official", round_) for round_ in ("v5.0", "v5.1"))
    assert (old.evaluation.every_samples, old.evaluation.skip_first) == (46_080, 0)
    assert (new.evaluation.every_samples, new.evaluation.skip_first) == (18_432, 14)
    same = dataclasses.replace(new, round="v5.0", evaluation=old.evaluation)
    assert same == old


def test_evaluation_interval_is_rounded_up_to_whole_batches() -> None:
    assert resolve("llama31_405b", "official", "v5.0", 6912).evaluation.every_samples == 7 * 6912
    assert resolve("llama31_8b", "official", "v6.0", 72).evaluation.every_samples == 171 * 72
    assert resolve("llama2_70b_lora", "official", "v5.1", 9).evaluation.every_samples == 43 * 9
    assert resolve("llama2_70b_lora", "official", "v6.1", 128).evaluation.skip_first == 18


@pytest.mark.parametrize("gbs", [1152, 1728, 2304, 4608, 6912, 9216])
def test_405b_schedule_scales_with_the_batch(gbs: int) -> None:
    optim = resolve("llama31_405b", "official", "v6.0", gbs).optim
    assert optim.warmup_steps == math.ceil(8000 * 1152 / gbs)
    assert optim.warmup_steps + optim.decay_steps == math.ceil(1_200_000 * 1152 / gbs)
    assert optim.base_lr * 1152 == gbs * 8e-5
    assert optim.end_lr == 8e-7


def test_405b_learning_rate_passes_wherever_any_float_does() -> None:
    for gbs in range(64, 9217, 64):
        rate = llama31_405b.base_learning_rate(gbs)
        near = [rate]
        for target in (0.0, 1.0):
            one = math.nextafter(rate, target)
            near += [one, math.nextafter(one, target)]
        possible = any(llama31_405b.checker_accepts(r, gbs) for r in near)
        assert llama31_405b.checker_accepts(rate, gbs) == possible
        assert possible == (gbs not in NO_FLOAT_FITS)


def test_batch_sizes_between_rcps_take_the_smaller_ones_rate() -> None:
    assert resolve("llama31_8b", "official", "v6.0", 72).optim.base_lr == 8e-4
    assert resolve("llama31_8b", "official", "v6.0", 8).optim.base_lr == 4e-4
    assert llama2_70b_lora.base_learning_rate(64) == 4e-4


# ---- every preset --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("preset", ["official", "mini"])
def test_presets_are_whole(name: str, preset: str) -> None:
    config = resolve(name, preset)
    assert (config.workload, config.preset) == (name, preset)
    schedule.check(config.optim)
    assert config.plan.gbs % config.plan.mbs == 0
    assert 0 < config.evaluation.every_samples <= config.evaluation.max_samples
    assert configs.load(json.loads(configs.dumps(config))) == config


@pytest.mark.parametrize("name", LANGUAGE)
def test_provenance_names_every_official_value(name: str) -> None:
    config = resolve(name, "official")
    groups = ["model", "data", "optim", "evaluation", *(["lora"] if config.lora else [])]
    needed = {f"{group}.{f.name}" for group in groups for f in dataclasses.fields(getattr(config, group))}
    needed -= {"data.path", "evaluation.metric", "evaluation.higher_is_better"}
    if config.init.kind == "hf":
        needed -= {"model.init_std"}
    provenance = find(name).provenance
    assert needed <= provenance.keys()
    for key in provenance:
        group, _, field = key.partition(".")
        assert hasattr(getattr(config, group), field), f"{key} is no configuration key"


def test_unknown_round_and_batch_are_refused() -> None:
    with pytest.raises(UserError, match=r"llama31_405b is not in round v6\.1; it is in v5\.0"):
        resolve("llama31_405b", "official", "v6.1")
    with pytest.raises(UserError, match=r"llama31_8b is not in round v5\.0"):
        resolve("llama31_8b", "official", "v5.0")
    for name in LANGUAGE:
        with pytest.raises(UserError, match="global batch size 0 must be at least 1"):
            resolve(name, "official", None, 0)
