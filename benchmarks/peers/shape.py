"""The work that every contestant does: one Llama, its batches and its optimizer, without torch at import."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SAMPLES = 4096
"""Samples of the data set; more than any run reads."""


@dataclass(frozen=True)
class Shape:
    """By default 31,990,272 parameters and 4,096 tokens a step."""

    dim: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1408
    vocab: int = 8192
    seq: int = 512
    batch: int = 8
    """Sequences of a step over all ranks."""
    lr: float = 3e-4
    clip: float = 1.0
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.batch * self.seq

    @property
    def linears(self) -> dict[str, tuple[int, int, int]]:
        """Linear layers by name: outputs, inputs, how many the model has."""
        kv = self.dim // self.heads * self.kv_heads
        return {
            "wq, wo": (self.dim, self.dim, 2 * self.layers),
            "wk, wv": (kv, self.dim, 2 * self.layers),
            "w1, w3": (self.ffn, self.dim, 2 * self.layers),
            "w2": (self.dim, self.ffn, self.layers),
            "head": (self.vocab, self.dim, 1),
        }

    @property
    def parameters(self) -> int:
        """Parameters with an untied head, elements."""
        matrices = sum(out * into * count for out, into, count in self.linears.values())
        return matrices + self.vocab * self.dim + (2 * self.layers + 1) * self.dim

    @property
    def flops(self) -> float:
        """Model FLOP of a step: 6 per matrix parameter and token, causal attention counted as half of the square."""
        matrices = sum(out * into * count for out, into, count in self.linears.values())
        return 6.0 * self.tokens * (matrices + self.layers * self.dim * self.seq)


def parse(text: str) -> Shape:
    """ "dim=64,layers=2" -> the default shape with these changed. Raises ValueError."""
    kinds = {f.name: type(f.default) for f in fields(Shape)}
    given = dict(item.split("=", 1) for item in text.split(",") if item)
    if unknown := sorted(set(given) - set(kinds)):
        raise ValueError(f"no field {unknown[0]}; there are {', '.join(kinds)}")
    return Shape(**{key: kinds[key](value) for key, value in given.items()})


def text(shape: Shape) -> str:
    """What `parse` reads back."""
    return ",".join(f"{f.name}={getattr(shape, f.name)}" for f in fields(shape))


def sample(shape: Shape, index: int) -> torch.Tensor:
    """Sample `index` of the data set: uniformly random ids, int64 [seq + 1]; the last one is a label only."""
    import torch

    generator = torch.Generator().manual_seed(index)
    return torch.randint(shape.vocab, (shape.seq + 1,), generator=generator)


def batch(shape: Shape, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels) of one rank's part of a step, int64 [batch / ranks, seq] each; `step` from 0."""
    import torch

    part = shape.batch // ranks
    first = (step * shape.batch + rank * part) % SAMPLES
    rows = torch.stack([sample(shape, (first + row) % SAMPLES) for row in range(part)])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
