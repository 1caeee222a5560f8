"""Compiled blocks compute what they compute otherwise, roundings included."""

from __future__ import annotations

import copy

import pytest
import torch

from timetrial.config import Plan
from timetrial.models.llama.config import LlamaConfig
from timetrial.parallel.parallelize import compile_blocks
from timetrial.precision import bf16

MODEL = LlamaConfig(vocab_size=64, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=48)


def outputs(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits and gradients."""
    logits = model(tokens)
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_block_rounds_as_the_plain_one(precision: str) -> None:
    model = MODEL.create()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if name.endswith("norm.weight") else p.normal_(std=0.2, generator=generator)
    exact = copy.deepcopy(model)
    if precision == "bf16":
        bf16.convert(model)
    compiled = copy.deepcopy(model)
    compile_blocks(compiled, Plan(precision=precision, compile=True))
    tokens = torch.randint(0, 64, (2, 16), generator=generator)
    torch._dynamo.reset()
    plain, fast, full = outputs(model, tokens), outputs(compiled, tokens), outputs(exact, tokens)
    for a, b, c in zip(fast, plain, full, strict=True):
        error, rounding = (a - b).norm().item(), (b - c).norm().item()
        # an operand that lies between two bfloat16 values may fall to the other side of a last bit's difference
        assert error < (0.2 * rounding if precision == "bf16" else 1e-5 * b.norm().item())
