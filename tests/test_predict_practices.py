"""What submissions do that tables do not tell, and the constants that came with it."""

from __future__ import annotations

import math

import pytest

from timetrial.config import replace
from timetrial.predict import answer, constants, fit, practices
from timetrial.predict.predict import fitted, predict
from timetrial.predict.request import Request, request
from timetrial.systems import stack as stacks
from timetrial.systems import system as systems

ROW = {
    "round": "v5.0", "benchmark": "llama2_70b_lora", "accelerator": "AMD Instinct MI300X 192GB HBM3",
    "accelerators": "8", "gbs": "8", "TP": "1", "precision": "fp8", "act_ckpt": "", "micro_batch": "1",
}  # fmt: skip


def asked(**cells: str) -> Request:
    return request(ROW | cells)


def test_a_row_that_tells_nothing_follows_the_submissions_on_its_accelerator() -> None:
    found = asked()
    assert found.hints.recompute_layers == 21
    assert found.plan.recompute == "none"
    assert any("21 blocks" in text and "config_MI300X" in text for text in found.assumed)
    assert asked(accelerator="AMD Instinct MI325X 256GB HBM3E").hints.recompute_layers == 0


@pytest.mark.parametrize(
    ("cell", "layers", "recompute"), [("none", 21, "none"), ("full:5", 5, "none"), ("full", 0, "full")]
)
def test_a_row_that_tells_is_followed(cell: str, layers: int, recompute: str) -> None:
    found = asked(act_ckpt=cell)
    assert (found.hints.recompute_layers, found.plan.recompute) == (layers, recompute)


def test_attention_is_of_the_submissions_where_no_precision_is_told() -> None:
    blackwell = {"accelerator": "NVIDIA Blackwell GPU (B200-SXM-180GB)", "round": "v5.1"}
    assert asked(**blackwell, precision="").attention == "fp8"
    assert asked(**blackwell, precision="fp8").attention == "bf16"
    assert asked(accelerator="NVIDIA H200-SXM5-141GB", precision="").attention == "bf16"


def test_every_practice_has_a_source_and_does_something() -> None:
    for one in practices.practices():
        assert one.source.startswith("mlcommons/")
        assert one.recompute_layers > 0 or one.attention


def test_blocks_computed_again_cost_a_forward_pass_each() -> None:
    some, none = (predict(asked(act_ckpt=cell)) for cell in ("full:20", "full:0"))
    forward = none.step.stages[0].seconds.forward.total
    share = 20 / 80 * (1 + math.log2(8) * constants.load().get("skew"))
    assert some.step.seconds - none.step.seconds == pytest.approx(forward * share, rel=0.02)


def test_a_constant_of_stack_and_generation_bears_on_both_alone() -> None:
    name = f"ripeness.{constants.on('ngc25.09', 'blackwell')}"
    ripe = constants.Constants({name: 1.1})
    for system, stack, share in (
        ("b200-sxm", "ngc25.09", 1.1), ("gb200-nvl72", "ngc25.09", 1.1), ("b200-sxm", "ngc25.04", 1.0),
        ("h200-sxm", "ngc25.09", 1.0),
    ):  # fmt: skip
        kinds = systems.named(system), stacks.load(stack)
        ratio = fitted(ripe, *kinds, False).speed / fitted(constants.Constants({}), *kinds, False).speed
        assert ratio == pytest.approx(share), (system, stack)
    point = fit.Point("b200-sxm", "blackwell", "ngc25.09", 1.0, lambda c: 1.0)
    assert name in fit.names([point])


def test_each_doubling_costs_the_same_share() -> None:
    """Without communication over data-parallel ranks there is nothing else that grows."""

    def skew_share(gpus: int) -> float:
        made = predict(
            answer.request_of(
                "llama31_405b", "gb200-nvl72", gpus, plan=f"tp=4,pp=8,vp=8,cp=2,gbs={gpus}", round_="v5.1"
            )
        )
        rest = made.step.seconds - made.step.parts["skew"] - made.step.parts["fixed"]
        return made.step.parts["skew"] / rest

    skew = constants.load().get("skew")
    assert 0.001 < skew < 0.02
    assert skew_share(512) == pytest.approx(9 * skew)
    assert skew_share(4096) == pytest.approx(12 * skew)


def test_the_last_bucket_of_gradients_is_never_hidden() -> None:
    row = {**ROW, "benchmark": "llama31_8b", "round": "v5.1", "accelerator": "NVIDIA B200", "accelerators": "64",
           "gbs": "64", "precision": "fp8"}  # fmt: skip
    made = predict(request(row))
    whole = replace(made.stack, bucket_elements=1e12)  # one bucket: nothing hides
    fine = replace(made.stack, bucket_elements=1e6)
    late, soon = (predict(request(row), stack=stack).step.parts["dp"] for stack in (whole, fine))
    assert late > 1.5 * made.step.parts["dp"] > 1.5 * soon


def test_context_parallel_ranks_send_attentions_format() -> None:
    row = {**ROW, "accelerator": "NVIDIA GB200", "CP": "2", "round": "v5.0", "gbs": "4"}
    wide, low = (predict(request({**row, "precision": p})) for p in ("fp8", "fp8+fp8attn"))

    def sent(made: object) -> int:
        kernels = made.layers["block"].kernels  # type: ignore[attr-defined]
        return sum(k.bytes for k in kernels if k.kind == "collective" and k.part == "cp")

    assert sent(low) * 2 == sent(wide) > 0
