"""The Llama itself: sizes, causality, positions, initial weights, FLOP, and being the same twice."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from timetrial.config import replace
from timetrial.models.layers.config import RopeScaling
from timetrial.models.layers.norm import RMSNorm
from timetrial.models.layers.rope import frequencies, rotate, rotation
from timetrial.models.llama.config import LlamaConfig
from timetrial.models.llama.model import Llama

SMALL = LlamaConfig(vocab_size=97, dim=48, n_layers=3, n_heads=6, n_kv_heads=2, ffn_dim=80)

LLAMA_31_8B = LlamaConfig(128_256, 4096, 32, 32, 8, 14_336, rope_scaling=RopeScaling())
LLAMA_31_405B = LlamaConfig(128_256, 16_384, 126, 128, 8, 53_248, rope_scaling=RopeScaling())
LLAMA_2_70B = LlamaConfig(32_000, 8192, 80, 64, 8, 28_672, rope_theta=10_000.0)


def llama(config: LlamaConfig = SMALL, seed: int = 1) -> Llama:
    model = Llama(config)
    model.init_weights(seed)
    return model


def tokens(batch: int, length: int, config: LlamaConfig = SMALL, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "n_params"),
    [
        (LLAMA_31_8B, 8_030_261_248),
        (LLAMA_31_405B, 405_853_388_800),
        (LLAMA_2_70B, 68_976_648_192),
        (replace(SMALL, tied=True), None),
        (SMALL, None),
    ],
)
def test_parameters_on_the_meta_device_are_those_of_the_closed_form(config: LlamaConfig, n_params: int | None) -> None:
    with torch.device("meta"):
        model = Llama(config)
    assert sum(p.numel() for p in model.parameters()) == config.n_params()
    assert n_params is None or config.n_params() == n_params
    linears = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert config.linears() == linears


@pytest.mark.parametrize("module", ["llama.config", "llama.hf_config", "llama.hf_names", "lora_targets"])
def test_a_models_shape_is_read_without_torch(module: str) -> None:
    code = f"import sys, timetrial.models.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class MatmulAttention(nn.Module):
    """Causal attention by plain matrix products, which the counter of FLOP sees."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_flops_per_sample_is_what_torch_counts_less_half_of_attention(frozen: bool) -> None:
    """The counter sees attention in full, 12 s^2 d a layer; ours has the causal half of it, 6 s^2 d."""
    model, seq_len = llama(), 40
    for block in model.layers.values():
        block.attention.core = MatmulAttention()
    if frozen:
        model.requires_grad_(False)
        model.embed.weight.requires_grad_(True)  # so that gradients pass through every layer
    with FlopCounterMode(display=False) as counter:
        model(tokens(1, seq_len)).sum().backward()
    upper_half = 6 * SMALL.n_layers * seq_len**2 * SMALL.dim
    assert SMALL.flops_per_sample(seq_len, frozen) == counter.get_total_flops() - upper_half


# ---- what it computes ----------------------------------------------------------------------------


def test_attention_is_softmax_over_the_past() -> None:
    model, other = llama(), llama()
    for block in other.layers.values():
        block.attention.core = MatmulAttention()
    assert relative(model(tokens(2, 33)), other(tokens(2, 33))) < 2e-6


def test_future_tokens_change_nothing_before_them() -> None:
    model, one = llama(), tokens(2, 65)
    other = one.clone()
    other[:, 40:] = tokens(2, 25, seed=1)
    assert torch.equal(model(one)[:, :40], model(other)[:, :40])
    assert not torch.equal(model(one)[:, 40], model(other)[:, 40])


def test_samples_of_a_batch_do_not_meet() -> None:
    model, batch = llama(), tokens(3, 20)
    logits = model(batch)
    for i in range(3):
        assert relative(model(batch[i : i + 1]), logits[i : i + 1]) < 2e-6


def test_only_distances_between_positions_count() -> None:
    model, batch = llama(), tokens(2, 30)
    logits = model(batch)
    assert torch.equal(model(batch, torch.arange(30)), logits)
    assert relative(model(batch, torch.arange(30) + 100), logits) < 2e-5
    assert relative(model(batch, 2 * torch.arange(30)), logits) > 1e-3


def test_rotation_of_a_dot_product_depends_on_the_distance() -> None:
    """q_m . k_n = sum of the pairs' rotations by (m - n) f, computed here with complex numbers."""
    head_dim = 16
    q, k = torch.randn(2, head_dim, dtype=torch.float64).unbind()
    freq = frequencies(head_dim, 10_000.0, None).double()
    cos, sin = rotation(torch.tensor([7, 3]), freq)
    turned = rotate(torch.stack((q, k)).view(1, 2, 1, head_dim), cos.double(), sin.double())
    found = turned[0, 0, 0] @ turned[0, 1, 0]
    half = head_dim // 2
    q_c, k_c = (torch.complex(x[:half], x[half:]) for x in (q, k))
    expected = (q_c * k_c.conj() * torch.polar(torch.ones(half, dtype=torch.float64), 4 * freq)).real.sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_stretched_frequencies_follow_the_paper() -> None:
    """Each frequency by itself, in Python's floats: kept, divided, or blended by its turns over the old context."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)
    found = frequencies(128, 500_000.0, scaling)
    kinds = set()
    for i, value in enumerate(found.tolist()):
        freq = 500_000.0 ** (-2 * i / 128)
        turns = 8192 * freq / (2 * math.pi)
        if turns > 4.0:
            kind, expected = "kept", freq
        elif turns < 1.0:
            kind, expected = "divided", freq / 8.0
        else:
            share = (turns - 1.0) / 3.0
            kind, expected = "blended", share * freq + (1.0 - share) * freq / 8.0
        kinds.add(kind)
        assert value == pytest.approx(expected, rel=1e-5), i
    assert kinds == {"kept", "divided", "blended"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_takes_its_statistics_in_float32(dtype: torch.dtype) -> None:
    """So bfloat16 is rounded once, after the division, and equals float64 rounded there."""
    torch.manual_seed(0)
    norm = RMSNorm(64, 1e-5)
    nn.init.normal_(norm.weight)
    x = (30.0 * torch.randn(5, 64)).to(dtype)
    x64 = x.double()
    divided = (x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype)
    assert relative(norm(x).double(), norm.weight.double() * divided.double()) < 1e-6


def test_pipeline_stages_in_a_row_are_the_model() -> None:
    whole, first, last = llama(), llama(), llama()
    first.norm = first.head = None
    last.embed = None
    del first.layers["1"], first.layers["2"], last.layers["0"]
    assert torch.equal(last(first(tokens(2, 20))), whole(tokens(2, 20)))


def test_tied_ends_are_one_parameter() -> None:
    model = llama(replace(SMALL, tied=True))
    assert model.head.weight is model.embed.weight
    with torch.device("meta"):
        empty = Llama(replace(SMALL, tied=True))
    empty.to_empty(device="cpu")
    empty.tie()
    empty.init_weights(1)
    assert torch.equal(empty(tokens(1, 9)), model(tokens(1, 9)))


def test_the_same_twice() -> None:
    def gradients() -> list[Tensor]:
        model, batch = llama(), tokens(4, 33)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


# ---- initial weights -----------------------------------------------------------------------------


def test_initial_weights_have_their_distributions() -> None:
    config = replace(SMALL, dim=192, ffn_dim=256, vocab_size=512, init_std=0.03)
    for name, parameter in llama(config).named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones(192))
            continue
        residual = name.endswith(("wo.weight", "w2.weight"))
        std = 0.03 / math.sqrt(2 * config.n_layers) if residual else 0.03
        error = 5 * std / math.sqrt(parameter.numel())  # five standard errors
        assert abs(parameter.mean().item()) < error, name
        assert abs(parameter.std().item() - std) < error, name
        assert 3.5 < (parameter.abs().max() / std).item() < 7.0, name


def test_initial_loss_is_that_of_guessing() -> None:
    model = llama(replace(SMALL, init_std=0.002))
    loss = F.cross_entropy(model(tokens(4, 32)).flatten(0, 1), tokens(4, 32, seed=1).flatten())
    assert loss.item() == pytest.approx(math.log(SMALL.vocab_size), abs=0.01)


def test_each_parameter_is_drawn_by_seed_and_name_alone() -> None:
    whole = dict(llama().named_parameters())
    stage = Llama(SMALL)
    stage.embed = None
    del stage.layers["0"]
    torch.manual_seed(123)
    stage.init_weights(1)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole[name]), name
    drawn = [p.flatten()[:512] for name, p in whole.items() if not name.endswith("norm.weight")]
    assert torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0).abs().max() < 6 / math.sqrt(512)
    for name, parameter in llama(seed=2).named_parameters():
        assert name.endswith("norm.weight") or not torch.equal(parameter, whole[name]), name
