"""The shape of a Llama, without torch: so that listing and sizing a workload stays instant."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from timetrial.errors import UserError
from timetrial.models.layers.config import RopeScaling

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_LAYERS = 10_000


@dataclass(frozen=True)
class LlamaConfig:
    """One Llama (Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783)."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    """Width of the SwiGLU, elements."""
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    """Whether the output head reuses the embedding."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections get it over sqrt(2 n_layers)."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def check(self) -> None:
        """Raise UserError, naming the field, unless a model of this shape can be made."""
        for name in ("vocab_size", "dim", "n_heads", "n_kv_heads", "ffn_dim"):
            _require(0 < getattr(self, name) < 2**31, f"{name}={getattr(self, name)}", "from 1 to 2,147,483,647")
        _require(0 < self.n_layers < MAX_LAYERS, f"n_layers={self.n_layers}", f"from 1 to {MAX_LAYERS - 1:,}")
        _require(self.dim % self.n_heads == 0, f"dim={self.dim}", f"a multiple of model.n_heads={self.n_heads}")
        even = f"an even multiple of model.n_heads={self.n_heads}, for rotary positions turn pairs"
        _require(self.head_dim % 2 == 0, f"dim={self.dim}", even)
        shared = f"a multiple of model.n_kv_heads={self.n_kv_heads}"
        _require(self.n_heads % self.n_kv_heads == 0, f"n_heads={self.n_heads}", shared)
        for name in ("rope_theta", "norm_eps", "init_std"):
            _require(getattr(self, name) > 0, f"{name}={getattr(self, name)}", "above 0")
        if (rope := self.rope_scaling) is not None:
            for name in ("factor", "low_freq_factor", "original_max_len"):
                _require(getattr(rope, name) > 0, f"rope_scaling.{name}={getattr(rope, name)}", "above 0")
            above = f"above model.rope_scaling.low_freq_factor={rope.low_freq_factor}"
            high = rope.high_freq_factor
            _require(high > rope.low_freq_factor, f"rope_scaling.high_freq_factor={high}", above)

    def linears(self) -> dict[str, tuple[int, int]]:
        """Every linear layer by its name in the model: [outputs, inputs] of its weight."""
        kv = self.n_kv_heads * self.head_dim
        block = {
            "attention.wq": (self.dim, self.dim),
            "attention.wk": (kv, self.dim),
            "attention.wv": (kv, self.dim),
            "attention.wo": (self.dim, self.dim),
            "feed_forward.w1": (self.ffn_dim, self.dim),
            "feed_forward.w2": (self.dim, self.ffn_dim),
            "feed_forward.w3": (self.ffn_dim, self.dim),
        }
        layers = {f"layers.{i}.{name}": shape for i in range(self.n_layers) for name, shape in block.items()}
        return {**layers, "head": (self.vocab_size, self.dim)}

    def layer_params(self) -> int:
        """Parameters of one block, elements."""
        kv = self.n_kv_heads * self.head_dim
        attention = 2 * self.dim * self.dim + 2 * self.dim * kv
        return attention + 3 * self.dim * self.ffn_dim + 2 * self.dim

    def n_params(self) -> int:
        """All parameters, elements."""
        ends = self.vocab_size * self.dim * (1 if self.tied else 2)
        return ends + self.n_layers * self.layer_params() + self.dim

    def flops_per_sample(self, seq_len: int, frozen: bool = False) -> float:
        """Model FLOP of forward and backward over one sample of `seq_len` tokens.

        6 per matrix parameter and token (2 forward, 4 backward), and 6 s^2 d per layer for the two
        attention products under a causal mask, which computes half of the full 12 s^2 d
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, halved). Recomputation is not counted.
        `frozen` weights need no weight gradients, so 4 instead of 6; adapters are too small to count.
        """
        matmul = self.n_layers * (self.layer_params() - 2 * self.dim) + self.vocab_size * self.dim
        return (4.0 if frozen else 6.0) * matmul * seq_len + 6.0 * self.n_layers * self.dim * float(seq_len) ** 2

    def create(self) -> nn.Module:
        """The model, on torch's default device, without meaningful values."""
        from timetrial.models.llama.model import Llama

        return Llama(self)

    def init_parameter(self, name: str, parameter: Tensor, seed: int) -> None:
        """Fill one whole parameter of the model with its random initial value."""
        from timetrial.models.llama.model import init_parameter

        init_parameter(self, name, parameter, seed)

    def read_weights(
        self, path: Path, names: Collection[str], resize_vocab: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of the parameters `names` in a directory of Hugging Face safetensors.

        A tensor is a view of the file and must be copied before the next is asked for.
        """
        from timetrial.models.llama import hf

        return hf.read_tensors(path, self, names, resize_vocab)

    def save_weights(self, model: nn.Module, path: Path) -> None:
        """Write the model as a directory of Hugging Face safetensors."""
        from timetrial.models.llama import hf

        hf.save(model, path)


def _require(good: bool, field: str, allowed: str) -> None:
    if not good:
        raise UserError(f"model.{field}: must be {allowed}")
