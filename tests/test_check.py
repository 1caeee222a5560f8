"""What a configuration may be: every field that can be set, at and beyond its ends."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import typing
from typing import Any

import pytest

from timetrial import config as configs
from timetrial.check import IDENTITY, NAMES, NOT_EMPTY, RANGES, check
from timetrial.config import RunConfig, dumps, load, override, replace
from timetrial.data.names import SOURCE_NAMES
from timetrial.data.source import SOURCES
from timetrial.errors import UserError
from timetrial.workloads import workload as workloads
from timetrial.workloads.workload import resolve

EVERY = [(name, preset) for name in workloads.names() for preset in workloads.PRESETS]


def refused(config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        check(config)
    text = str(caught.value)
    assert "\n" not in text
    return text


def mini(*settings: str, name: str = "llama2_70b_lora") -> RunConfig:
    config = resolve(name, "mini")
    for setting in settings:
        key, _, value = setting.partition("=")
        config = override(config, key, value)
    return config


@pytest.mark.parametrize(("name", "preset"), EVERY)
def test_every_definition_passes(name: str, preset: str) -> None:
    workload = workloads.find(name)
    for round_ in workload.rounds if preset == "official" else (None,):
        check(resolve(name, preset, round_))
    if workload.mini_base is not None:
        check(workload.mini_base())


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("model.dim=0", "from 1"),
        ("model.dim=-128", "from 1"),
        ("model.dim=130", "a multiple of model.n_heads=8"),
        ("model.dim=136", "an even multiple of model.n_heads=8"),
        ("model.n_heads=0", "from 1"),
        ("model.n_heads=1", "a multiple of model.n_kv_heads=2"),
        ("model.n_kv_heads=3", "a multiple of model.n_kv_heads=3"),
        ("model.n_kv_heads=0", "from 1"),
        ("model.n_layers=-1", "from 1"),
        ("model.n_layers=0", "from 1"),
        ("model.n_layers=1000000000", "from 1 to 9,999"),
        ("model.vocab_size=0", "from 1"),
        ("model.ffn_dim=3000000000", "to 2,147,483,647"),
        ("model.rope_theta=0", "above 0"),
        ("model.init_std=-1", "above 0"),
        ("data.seq_len=0", "at least 2"),
        ("data.seq_len=1", "at least 2"),
        ("data.seq_len=-8", "at least 2"),
        ("data.source=sottu", "did you mean 'sotu'"),
        ("evaluation.every_samples=0", "at least 1"),
        ("evaluation.samples=0", "at least 1"),
        ("evaluation.skip_first=-1", "at least 0"),
        ("evaluation.max_samples=0", "at least 1"),
        ("evaluation.average=sequence", "did you mean 'sequences'"),
        ("evaluation.metric=", "must be a name"),
        ("optim.name=sgd", "'adamw'"),
        ("optim.base_lr=0", "above 0"),
        ("optim.base_lr=-1e-3", "above 0"),
        ("optim.end_lr=1", "between 0 and optim.base_lr"),
        ("optim.end_lr=-1", "at least 0"),
        ("optim.beta1=1", "below 1"),
        ("optim.beta2=-0.1", "at least 0"),
        ("optim.eps=0", "above 0"),
        ("optim.weight_decay=-1", "at least 0"),
        ("optim.clip_norm=0", "above 0"),
        ("optim.schedule=cosine", "'cosine with linear warmup'"),
        ("optim.warmup_steps=-1", "at least 0"),
        ("optim.decay_steps=0", "at least 1"),
        ("checkpoint_every=-1", "at least 0"),
        ("keep_checkpoints=0", "at least 1"),
        ("threads=0", "at least 1"),
        ("threads=100000", "at most 4,096"),
        ("max_steps=0", "at least 1"),
        ("seed=-1", "at least 0"),
        ("plan.gbs=0", "at least 1"),
        ("plan.gbs=2147483648", "at most 2,147,483,647"),
        ("plan.tp=-2", "at least 1"),
        ("lora.rank=0", "at least 1"),
        ("lora.alpha=0", "above 0"),
        ("lora.dropout=1", "below 1"),
        ("lora.dropout=-0.5", "at least 0"),
        ("lora.targets=q_proj", "did you mean wq?"),
        ("lora.targets=wqk", "did you mean wqkv"),
        ("lora.targets=", "name at least one of"),
        ("init.kind=bas", "did you mean 'base'"),
        ("init.base=llama31_8", "did you mean 'llama31_8b'"),
        ("init.base=llama31_8b", "defines no base"),
        ("submission.org=", "must be a name"),
        ("submission.division=closd", "did you mean 'closed'"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_one_line_with_key_value_and_what_is_allowed(setting: str, allowed: str) -> None:
    text = refused(mini(setting))
    key, _, value = setting.partition("=")
    if key == "model.n_kv_heads" and value == "3":
        key, value = "model.n_heads", "8"  # the rule stands with the query heads
    if key == "init.base" and value == "llama31_8b":
        key = "init.kind"
    assert key in text
    assert value.lstrip("-").split("e")[0] in text
    assert allowed.replace("'", "") in text.replace("'", "")


@pytest.mark.parametrize(
    "setting",
    [
        "model.n_layers=1", "data.seq_len=2", "evaluation.skip_first=0", "evaluation.max_samples=1", "optim.beta1=0",
        "optim.weight_decay=0", "optim.warmup_steps=0", "optim.decay_steps=1", "checkpoint_every=0", "seed=0",
        "keep_checkpoints=1", "threads=1", "max_steps=1", "lora.dropout=0", "lora=none", "lora.targets=wq,wo",
        "plan.gbs=2147483647", "submission.division=open", "threads=none",
    ],
)  # fmt: skip
def test_the_last_allowed_value_passes(setting: str) -> None:
    check(mini(setting))


def test_the_largest_seed_passes() -> None:
    check(replace(mini(), seed=2**63 - 1))
    assert "seed=9223372036854775808: must be at most" in refused(replace(mini(), seed=2**63))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"workload": "llama31_8"}, "did you mean llama31_8b"),
        ({"preset": "foo"}, "preset=foo: unknown"),
        ({"round": "v9"}, "round=v9: unknown"),
        ({"round": "v5.0"}, "round=v5.0: unknown"),  # a round of other workloads
    ],
)
def test_a_run_is_what_its_definition_says(change: dict[str, str], says: str) -> None:
    assert says in refused(replace(mini(name="llama31_8b"), **change))
    assert set(IDENTITY) == {"workload", "preset", "round"}


@pytest.mark.parametrize(
    ("group", "field", "value", "says"),
    [
        ("optim", "base_lr", math.nan, "optim.base_lr=nan: must be a finite number"),
        ("optim", "eps", "small", "optim.eps=small: must be a finite number"),
        ("evaluation", "target", math.inf, "evaluation.target=inf: must be a finite number"),
        ("data", "seq_len", 128.0, "data.seq_len=128.0: must be a whole number"),
        ("data", "seq_len", True, "data.seq_len=True: must be a whole number"),
        ("optim", "decay_norms", 1, "optim.decay_norms=1: must be true or false"),
        ("data", "source", None, "data.source=None: must be text"),
        ("lora", "targets", "wq", "lora.targets=wq: must be a list"),
        ("model", "dim", "128", "model.dim=128: must be a whole number"),
    ],
)
def test_a_stored_configuration_of_wrong_types_is_refused(group: str, field: str, value: Any, says: str) -> None:
    values = json.loads(dumps(mini()))
    values[group][field] = value
    assert refused(load(values)) == says


def test_ranges_of_scaled_rotary_positions() -> None:
    config = resolve("llama31_8b", "official")
    assert "model.rope_scaling.factor=0.0: must be above 0" in refused(
        override(config, "model.rope_scaling.factor", "0")
    )
    text = refused(override(config, "model.rope_scaling.high_freq_factor", "1"))
    assert "must be above model.rope_scaling.low_freq_factor=1.0" in text


def test_a_model_without_a_check_of_its_own_needs_no_edit() -> None:
    @dataclasses.dataclass(frozen=True)
    class Plain:
        width: int = 3
        rate: float = 0.5

        def n_params(self) -> int:
            return self.width

    config = replace(mini("lora=none"), model=Plain())
    check(config)
    assert refused(replace(config, model=Plain(rate=math.nan))) == "model.rate=nan: must be a finite number"
    assert "at least one" in refused(replace(config, model=Plain(width=0)))


def test_every_number_and_name_of_the_configuration_has_a_rule() -> None:
    """A field that is added to config.py needs one here, or a reason why not."""
    free = {
        "data.tokenizer", "data.path", "init.path", "init.base", "evaluation.target", "lora.targets",
        "plan.order", "plan.precision", "plan.recompute", "plan.schedule",  # parallel.plan.validate
        *IDENTITY,
    }  # fmt: skip
    named = set(RANGES) | set(NAMES) | set(NOT_EMPTY) | free
    groups = {"data": configs.Data, "optim": configs.Optim, "evaluation": configs.Evaluation, "plan": configs.Plan,
              "init": configs.Init, "lora": configs.Lora, "submission": configs.Submission}  # fmt: skip
    fields = {f"{name}.{key}": hint for name, cls in groups.items() for key, hint in typing.get_type_hints(cls).items()}
    fields |= {key: hint for key, hint in typing.get_type_hints(RunConfig).items() if key not in (*groups, "model")}
    assert {key for key, hint in fields.items() if hint is not bool} == named


def test_every_source_has_its_name_without_what_opens_it() -> None:
    assert tuple(sorted(SOURCES)) == SOURCE_NAMES


def test_checking_needs_no_torch() -> None:
    code = (
        "import sys; from timetrial.check import check; from timetrial.workloads.workload import resolve; "
        "check(resolve('llama31_8b', 'mini')); print('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
