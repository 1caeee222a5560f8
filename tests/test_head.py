"""Head and loss in chunks give what whole logits give, without ever holding them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from timetrial.models.llama.config import LlamaConfig
from timetrial.parallel import head as heads
from timetrial.parallel.head import head_loss_sum, model_loss_sum
from timetrial.parallel.loss import token_loss_sum
from timetrial.precision import bf16

D, V = 16, 40
MODEL = LlamaConfig(vocab_size=V, dim=D, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=32, init_std=0.05)


@pytest.fixture(autouse=True)
def seven_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of seven tokens, which no count here divides into."""
    monkeypatch.setitem(heads.CHUNK_BYTES, "cpu", 7 * V * 4)


def case(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Linear, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, D, generator=g, dtype=dtype, requires_grad=True)
    head = nn.Linear(D, V, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, D, generator=g))
    labels = torch.randint(0, V, (tokens,), generator=g)
    labels[::3] = -100
    return x, head, labels


def whole(x: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return token_loss_sum(head(x)[None], labels[None])


def results(loss: Tensor, x: Tensor, head: nn.Linear) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss / 5.0, (x, head.weight))]


@pytest.mark.parametrize("tokens", [1, 7, 30])
def test_equals_whole_logits(tokens: int) -> None:
    x, head, labels = case(tokens)
    for a, b in zip(
        results(whole(x, head, labels), x, head), results(head_loss_sum(x, head, labels), x, head), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_gradients_equal_finite_differences_in_double() -> None:
    """`gradcheck` would need a double loss; here the loss is summed in float32, so whole logits are the judge."""
    x, head, labels = case(30, torch.float64)
    ours = results(head_loss_sum(x, head, labels), x, head)
    exact = torch.nn.functional.cross_entropy(head(x), labels, reduction="sum", ignore_index=-100)
    for a, b in zip(results(exact, x, head), ours, strict=True):
        assert torch.allclose(a, b.to(a.dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [7, 30])
def test_bf16_rounds_where_whole_logits_round(tokens: int) -> None:
    x, plain, labels = case(tokens)
    model = nn.Sequential(plain)
    bf16.convert(model)
    head = model[0]
    assert isinstance(head, nn.Linear)
    one, ours = results(whole(x, head, labels), x, head), results(head_loss_sum(x, head, labels), x, head)
    exact = results(whole(x, plain, labels), x, head)
    assert not torch.equal(one[1], exact[1]), "bf16 must be at work"
    for a, b in zip(one, ours, strict=True):
        # products are of the same rounded numbers, but gradients are rounded before they are scaled and not
        # after: each is off by up to 2^-9, so they may be 2^-8 apart
        assert ((a - b).norm() / a.norm()).item() < 2**-8


def test_no_token_counts() -> None:
    x, head, labels = case(9)
    loss, dx, dw = results(head_loss_sum(x, head, torch.full_like(labels, -100)), x, head)
    assert loss == 0
    assert not dx.any()
    assert not dw.any()


def test_a_frozen_head_and_no_gradients() -> None:
    x, head, labels = case(9)
    head.requires_grad_(False)
    loss = head_loss_sum(x, head, labels)
    (dx,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(whole(x, head, labels), x)
    assert torch.allclose(dx, expected, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        assert head_loss_sum(x, head, labels).item() == pytest.approx(loss.item())


class Largest(TorchDispatchMode):
    """The largest tensor that any operator made, elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def test_all_logits_are_never_held() -> None:
    model = MODEL.create()
    tokens = torch.randint(0, V, (8, 32))
    with Largest() as seen:
        model_loss_sum(model, tokens, tokens).backward()
    assert seen.elements < tokens.numel() * V
    with Largest() as seen:
        token_loss_sum(model(tokens), tokens).backward()
    assert seen.elements == tokens.numel() * V


def test_a_head_of_another_kind_gets_its_logits() -> None:
    model = MODEL.create()
    tokens = torch.randint(0, V, (2, 8))
    chunked = model_loss_sum(model, tokens, tokens)
    model.head = nn.Sequential(model.head)
    assert model_loss_sum(model, tokens, tokens).item() == pytest.approx(chunked.item(), rel=1e-6)
