"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout.

Channel i of a head is paired with channel i + H/2 and the pair turned by position * f_i, with
f_i = theta^(-2i/H). The half-split layout is that of the Hugging Face checkpoints, so their weights
load as they are; Meta's interleaved layout differs from it by a permutation of wq and wk.

Llama 3.1 slows the low frequencies by `factor`, keeps the high ones and blends in between, to reach
beyond the pretrained context (Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from timetrial.models.layers.config import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None) -> Tensor:
    """Angular frequencies [H/2] in radians per token, float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    freq_h = 1.0 / theta**exponent
    if scaling is None:
        return freq_h
    wavelength = 2 * math.pi / freq_h
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 where the wave is longer than the old context / low, 1 where it is shorter than old / high
    keep = ((scaling.original_max_len / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    # in the order in which transformers rounds: positions of 10^5 magnify a difference in the last bit
    return (1.0 - keep) * freq_h / scaling.factor + keep * freq_h


def rotation(positions_T: Tensor, freq_h: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [T, H], for positions [T]."""
    angle = torch.outer(positions_T.float(), freq_h)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [B, T, N, H] by the angles whose cos and sin are [T, H]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos[:, None, :] + turned * sin[:, None, :]).to(x.dtype)
