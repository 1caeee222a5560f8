"""Configurations: what is dumped loads again, and overrides are read as their field's type."""

from __future__ import annotations

import json

import pytest

from timetrial.config import Evaluation, dump, load, override, replace
from timetrial.errors import UserError
from timetrial.workloads.workload import find, names, resolve


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("preset", ["mini", "official"])
def test_dump_and_load_are_inverse(name, preset):
    config = resolve(name, preset)
    assert load(json.loads(json.dumps(dump(config)))) == config


def test_load_refuses_foreign_types_and_unknown_fields():
    values = dump(resolve("llama31_8b", "mini"))
    with pytest.raises(UserError, match="not part of this package"):
        load({**values, "model": {**values["model"], "type": "os:system"}})
    with pytest.raises(UserError, match="colour"):
        load({**values, "colour": "red"})


def test_override_reads_the_fields_type():
    config = resolve("llama2_70b_lora", "mini")
    assert override(config, "plan.gbs", "1e3").plan.gbs == 1000
    assert override(config, "optim.base_lr", "3e-4").optim.base_lr == 3e-4
    assert override(config, "lora.targets", "wq, wv").lora.targets == ("wq", "wv")
    assert override(config, "max_steps", "none").max_steps is None
    assert override(config, "plan.compile", "true").plan.compile is True
    assert override(config, "lora", "none").lora is None
    official = resolve("llama31_8b", "official")
    assert override(official, "model.rope_scaling", "none").model.rope_scaling is None


@pytest.mark.parametrize(
    ("dotted", "text"),
    [("plan.gbs", "1.5"), ("optim.base_lr", "nan"), ("plan.compile", "perhaps"), ("seed", "one"), ("plan.x", "1")],
)
def test_override_refuses_what_does_not_fit(dotted, text):
    with pytest.raises(UserError):
        override(resolve("llama31_8b", "mini"), dotted, text)


def test_every_provenance_key_is_a_field():
    for name in names():
        workload = find(name)
        config = resolve(name, "official")
        for dotted in workload.provenance:
            value = config
            for part in dotted.split("."):
                assert hasattr(value, part), f"{name}: {dotted}"
                value = getattr(value, part)


def test_evaluation_points_and_skipped_ones():
    evaluation = Evaluation(metric="loss", target=1.0, every_samples=100, samples=1, skip_first=2)
    due = [n for n in range(0, 600, 40) if evaluation.due(n, n + 40)]
    assert [n + 40 for n in due] == [320, 400, 520, 600]


def test_reached_in_both_directions():
    loss = Evaluation(metric="loss", target=1.0, every_samples=1, samples=1)
    assert loss.reached(1.0)
    assert not loss.reached(1.001)
    accuracy = replace(loss, higher_is_better=True)
    assert accuracy.reached(1.0)
    assert not accuracy.reached(0.999)
