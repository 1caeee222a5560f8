"""Learning rate, AdamW and clipping against restatements that share no code with them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from timetrial.config import Optim
from timetrial.errors import UserError
from timetrial.optim import adamw, schedule
from timetrial.parallel.engine import OneRank

FROM_ZERO = "cosine with linear warmup from zero"


def nemo(optim: Optim, steps: int) -> list[float]:
    """NeMo's CosineAnnealing restated from its description, as its counter walks: rise includes step W."""
    rates = []
    last = optim.warmup_steps + optim.decay_steps
    for counter in range(steps):
        if 0 < optim.warmup_steps >= counter:
            rates.append(optim.base_lr * (counter + 1) / (optim.warmup_steps + 1))
        elif counter > last:
            rates.append(optim.end_lr)
        else:
            done = (counter - optim.warmup_steps) / (last - optim.warmup_steps)
            rates.append((optim.base_lr - optim.end_lr) * 0.5 * (1 + math.cos(math.pi * done)) + optim.end_lr)
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedule_of_the_llama_31_references(warmup: int) -> None:
    optim = Optim(base_lr=4e-4, end_lr=4e-5, warmup_steps=warmup, decay_steps=50)
    ours = [schedule.learning_rate(optim, step) for step in range(80)]
    assert ours == pytest.approx(nemo(optim, 80), rel=1e-14)


def test_points_by_hand() -> None:
    optim = Optim(base_lr=1.0, end_lr=0.1, warmup_steps=4, decay_steps=8)
    rate = [schedule.learning_rate(optim, step) for step in range(14)]
    assert rate[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rate[6] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert rate[8] == pytest.approx(0.55)
    assert rate[12] == rate[13] == 0.1


def test_first_and_last_step_of_the_official_schedules() -> None:
    from timetrial.workloads.workload import resolve

    small = resolve("llama31_8b", "official", "v6.0", 32).optim
    assert schedule.learning_rate(small, 0) == pytest.approx(8e-4 / 129)
    assert schedule.learning_rate(small, 128) == 8e-4
    assert schedule.learning_rate(small, 1_200_000) == small.end_lr == 8e-5
    lora = resolve("llama2_70b_lora", "official").optim
    assert schedule.learning_rate(lora, 0) == 4e-4
    assert schedule.learning_rate(lora, 512) == pytest.approx(2e-4)
    assert schedule.learning_rate(lora, 1024) == 0.0


def test_schedule_of_the_lora_reference_as_its_own_log_shows() -> None:
    """mlcommons/training llama2_70b_lora/convergence_example.txt: 440 steps, warm-up 0.03, rate 1e-3.

    The line of step k shows the rate that the scheduler has set for the next one, index k from 0.
    """
    logged = {
        1: 7.142857142857142e-05,
        7: 0.0005,
        14: 0.001,
        15: 0.0009999864037673423,
        22: 0.000999130089531422,
        44: 0.0009878131657762535,
        62: 0.0009689998780094837,
    }
    warmup = math.ceil(0.03 * 440)
    optim = Optim(base_lr=1e-3, end_lr=0.0, schedule=FROM_ZERO, warmup_steps=warmup, decay_steps=440 - warmup)
    assert schedule.learning_rate(optim, 0) == 0.0
    for index, rate in logged.items():
        assert schedule.learning_rate(optim, index) == pytest.approx(rate, rel=1e-12)


def test_schedule_from_zero_is_hugging_faces() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=3e-4)
    theirs = optimization.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=40)
    optim = Optim(base_lr=3e-4, end_lr=0.0, schedule=FROM_ZERO, warmup_steps=5, decay_steps=35)
    for step in range(40):
        assert schedule.learning_rate(optim, step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-20)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        (Optim(schedule="linear"), "optim.schedule 'linear' is unknown"),
        (Optim(decay_steps=0), "optim.decay_steps 0"),
        (Optim(warmup_steps=-1), "optim.warmup_steps -1"),
        (Optim(base_lr=1e-5, end_lr=1e-4), "optim.end_lr 0.0001 must lie between 0 and optim.base_lr 1e-05"),
    ],
)
def test_impossible_schedules_are_refused(optim: Optim, message: str) -> None:
    with pytest.raises(UserError, match=message):
        schedule.check(optim)


# ---- AdamW ---------------------------------------------------------------------------------------


class Small(nn.Module):
    """An embedding, a linear layer with bias, a norm and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)


def names_by_decay(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, list[str]]:
    name_of = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: [name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups}


def test_who_decays() -> None:
    model = Small()
    groups = names_by_decay(adamw.build(model.named_parameters(), Optim(weight_decay=0.1)), model)
    assert groups == {
        "decay": ["embed.weight", "linear.weight"],
        "no_decay": ["linear.bias", "norm.weight", "norm.bias"],
    }
    everything = names_by_decay(adamw.build(model.named_parameters(), Optim(decay_norms=True)), model)
    assert everything == {"decay": ["embed.weight", "linear.weight", "linear.bias", "norm.weight", "norm.bias"]}


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_equals_a_plain_restatement_in_float64(fused: bool) -> None:
    torch.manual_seed(0)
    model = Small().double()
    optim = Optim(base_lr=1e-2, end_lr=1e-3, eps=1e-5, weight_decay=0.1, warmup_steps=3, decay_steps=10)
    optimizer = adamw.build(model.named_parameters(), optim, fused=fused)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    want = {name: p.detach().clone() for name, p in trained.items()}
    mean = {name: torch.zeros_like(p) for name, p in want.items()}
    square = {name: torch.zeros_like(p) for name, p in want.items()}
    for step in range(12):
        rate = schedule.learning_rate(optim, step)
        adamw.set_learning_rate(optimizer, rate)
        for name, parameter in trained.items():
            grad = torch.randn_like(parameter)
            parameter.grad = grad.clone()
            decay = 0.1 if want[name].ndim == 2 else 0.0
            mean[name] = 0.9 * mean[name] + 0.1 * grad
            square[name] = 0.95 * square[name] + 0.05 * grad**2
            m_hat = mean[name] / (1 - 0.9 ** (step + 1))
            v_hat = square[name] / (1 - 0.95 ** (step + 1))
            want[name] = want[name] - rate * (decay * want[name] + m_hat / (v_hat.sqrt() + 1e-5))
        optimizer.step()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.detach(), want[name], rtol=1e-12, atol=1e-14)
    assert all(p.grad is None for p in model.frozen.parameters())


def test_nothing_to_train_and_unknown_optimizers_are_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="no parameter requires a gradient"):
        adamw.build(model.named_parameters(), Optim())
    with pytest.raises(UserError, match=r"optim\.name 'sgd' is unknown"):
        adamw.build(model.requires_grad_().named_parameters(), Optim(name="sgd"))


# ---- clipping ------------------------------------------------------------------------------------
# over ranks: tests/dist/test_layouts.py, where every step of every layout is clipped


def with_gradients(*grads: torch.Tensor | None) -> OneRank:
    """An engine whose parameters have these gradients."""
    parameters = nn.ParameterList(nn.Parameter(torch.zeros(2) if g is None else torch.zeros_like(g)) for g in grads)
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = None if grad is None else grad.clone()
    return OneRank(parameters, torch.device("cpu"))


@pytest.mark.parametrize("max_norm", [0.3, 1e9])
def test_clipping_scales_all_gradients_alike(max_norm: float) -> None:
    torch.manual_seed(1)
    grads = [torch.randn(shape) for shape in [(3, 4), (7,), (2, 2, 2)]]
    engine = with_gradients(*grads)
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads))
    assert float(engine.clip_grad_norm(max_norm)) == pytest.approx(norm, rel=1e-6)
    scale = min(1.0, max_norm / (norm + 1e-6))
    for parameter, grad in zip(engine.model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, (grad.double() * scale).float(), rtol=1e-6, atol=0)


def test_clipping_equals_torchs_own_to_the_bit() -> None:
    torch.manual_seed(2)
    grads = [torch.randn(shape) for shape in [(30, 40), (70,), (20, 2, 20)]]
    engine, theirs = with_gradients(*grads), with_gradients(*grads)
    assert engine.clip_grad_norm(0.7) == nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.7)
    for parameter, other in zip(engine.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_clipping_shows_what_is_not_finite_and_bears_nothing() -> None:
    assert float(with_gradients(None).clip_grad_norm(1.0)) == 0.0
    assert math.isinf(float(with_gradients(torch.tensor([1.0, math.inf]), None).clip_grad_norm(1.0)))
