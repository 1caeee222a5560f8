"""Block attention on a CPU is torch's attention, in another order of sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from timetrial.models.llama.config import LlamaConfig
from timetrial.models.llama.model import Attention, CausalAttention
from timetrial.parallel import attention, recompute
from timetrial.parallel.attention import BlockAttention, causal_attention

SHAPES = [
    # samples, tokens, heads, key/value heads, head dim
    (1, 1, 1, 1, 8),
    (2, 63, 4, 2, 16),
    (2, 64, 4, 4, 16),
    (1, 65, 6, 2, 8),
    (3, 200, 8, 1, 32),
    (1, attention.LONGEST, 2, 1, 64),
]


def case(samples: int, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype=torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(tokens)
    shapes = [(samples, tokens, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=g, dtype=dtype, requires_grad=True) for s in shapes]


def gradients(core: CausalAttention, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of a weighted sum of it."""
    out = core(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out, *torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_exact_attention(shape: tuple[int, ...]) -> None:
    inputs = case(*shape)
    exact = gradients(CausalAttention(), [x.detach().double().requires_grad_() for x in inputs])
    for ours, wanted in zip(gradients(BlockAttention(), inputs), exact, strict=True):
        # 1e-6: some float32 roundings of 6e-8 each; torch's flash operator is as far from float64
        assert (ours.double() - wanted).abs().max() <= 1e-6 * wanted.abs().max().clamp(min=1)


def test_no_token_sees_what_comes_after_it() -> None:
    q, k, v = case(1, 130, 2, 1, 8)
    before = causal_attention(q, k, v)[0]
    with torch.no_grad():
        k[:, 100:] += 1
        v[:, 100:] += 1
    after = causal_attention(q, k, v)[0]
    assert torch.equal(before[:, :100], after[:, :100])
    assert not torch.equal(before[:, 100], after[:, 100])


def test_probabilities_are_counted_before_they_are_kept() -> None:
    q, k, v = case(2, 130, 4, 2, 8)
    kept = causal_attention(q, k, v)[1]
    assert kept.numel() == attention.probabilities(4, 130, 2) == 2 * 4 * (64 * 64 + 64 * 128 + 2 * 130)


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(attention.LONGEST + 1, torch.float32), (8, torch.float64), (8, torch.bfloat16)]
)
def test_what_it_is_not_for_goes_to_torch(tokens: int, dtype: torch.dtype) -> None:
    inputs = case(1, tokens, 2, 1, 8, dtype)
    assert torch.equal(BlockAttention()(*inputs), CausalAttention()(*inputs))


def test_it_is_a_proper_operator() -> None:
    torch.library.opcheck(causal_attention, tuple(case(1, 70, 2, 1, 8)))


def test_a_model_gets_it_once_and_context_parallelism_takes_it_away() -> None:
    model = LlamaConfig(vocab_size=8, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=16)
    module = torch.nn.ModuleList([Attention(model)])
    attention.apply(module)
    first = module[0].core
    attention.apply(module)
    assert type(first) is BlockAttention
    assert module[0].core is first
    assert isinstance(first, CausalAttention), "context.apply replaces by that class"


def test_selective_recomputation_does_not_run_it_twice() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict({"0": BlockAttention()})

    model = Model()
    recompute.apply(model, "selective")
    inputs = case(1, 70, 2, 1, 8)
    with torch.profiler.profile() as profile:
        model.layers["0"](*inputs).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::_softmax"] == 2, "70 tokens are two blocks, forward only"
