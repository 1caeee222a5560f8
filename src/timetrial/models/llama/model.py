"""Llama: pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

Single-device code. Parallelism, adapters and precision are applied from outside: layers are plain
`nn.Linear`s under stable names (`layers.3.attention.wq`), every block takes and returns [B, T, D],
and a model cut into pipeline stages is this class with the missing ends set to None.

Shapes: B samples, T tokens, D model, N query heads, K key/value heads, H head, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from timetrial.models.layers.norm import RMSNorm
from timetrial.models.layers.rope import frequencies, rotate, rotation
from timetrial.models.llama.config import LlamaConfig
from timetrial.seeding import stream


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.qkv = Projections()
        self.core = CausalAttention()

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTD, self.wq, self.wk, self.wv)
        # T from the projections and -1 for the heads: parallelism may hand in a part of the tokens
        # and leave each rank a part of the heads
        B, T, _ = q.shape
        q_BTNH = rotate(q.view(B, T, -1, self.head_dim), cos, sin)
        k_BTKH = rotate(k.view(B, T, -1, self.head_dim), cos, sin)
        v_BTKH = v.view(B, T, -1, self.head_dim)
        out_BTD: Tensor = self.wo(self.core(q_BTNH, k_BTKH, v_BTKH).reshape(B, T, -1))
        return out_BTD


class Projections(nn.Module):
    """Query, key and value of one input; no parameters.

    A module of its own, so that one adapter can span the three (`models/lora.py`).
    """

    def forward(self, x_BTD: Tensor, wq: nn.Module, wk: nn.Module, wv: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        return wq(x_BTD), wk(x_BTD), wv(x_BTD)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(H)) v over each token and those before it; no parameters.

    A module of its own, so that context parallelism can put a ring in its place.
    """

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """-> [B, T, N, H]; query head n reads key/value head n // (N / K)."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))
        return out_BTD


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin)
        x_BTD = x_BTD + self.feed_forward(self.ffn_norm(x_BTD))
        return x_BTD


class Llama(nn.Module):
    """Tokens to logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(config.dim, config.norm_eps)
        self.head: nn.Linear | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter again; `to_empty` and FSDP part them."""
        if self.config.tied and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, positions_T: Tensor | None = None, head: bool = True) -> Tensor:
        """[B, T] token ids (or [B, T, D] activations where a pipeline stage has no embedding) -> [B, T, V].

        `positions_T` are the tokens' places in the sequence, [T]; 0..T-1 when None. Without `head` the
        result is what the head would be given, [B, T, D].
        """
        x_BTD = self.embed(tokens) if self.embed is not None else tokens
        if positions_T is None:
            positions_T = torch.arange(tokens.shape[1], device=tokens.device)
        cfg = self.config
        cos, sin = rotation(positions_T, frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling, tokens.device))
        cos, sin = cos.to(x_BTD.dtype), sin.to(x_BTD.dtype)
        for block in self.layers.values():
            x_BTD = block(x_BTD, cos, sin)
        x_BTD = self.norm(x_BTD) if self.norm is not None else x_BTD
        return self.head(x_BTD) if head and self.head is not None else x_BTD

    def init_weights(self, seed: int) -> None:
        """Fill every parameter, each from a stream of its own, so that no rank count changes them."""
        for name, parameter in self.named_parameters():
            init_parameter(self.config, name, parameter, seed)


@torch.no_grad()
def init_parameter(config: LlamaConfig, name: str, parameter: Tensor, seed: int) -> None:
    """Fill one whole parameter, which is called `name` in the model.

    | parameter                 | distribution                         |
    | ------------------------- | ------------------------------------ |
    | embedding, wq, wk, wv, w1, w3, head | normal(0, init_std)        |
    | wo, w2                    | normal(0, init_std / sqrt(2 layers)) |
    | norms                     | 1                                    |

    The residual projections are scaled as in Radford et al. 2019 (GPT-2), section 2.3.
    """
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
        return
    residual = name.endswith(("wo.weight", "w2.weight"))
    std = config.init_std / math.sqrt(2 * config.n_layers) if residual else config.init_std
    parameter.normal_(0.0, std, generator=torch.Generator(parameter.device).manual_seed(stream(seed, name)))
