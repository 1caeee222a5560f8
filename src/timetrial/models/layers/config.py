"""Settings of the shared layers, without torch, so that a model's shape can be read without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies beyond the pretrained context."""

    factor: float = 8.0
    """How much slower the low frequencies turn."""
    low_freq_factor: float = 1.0
    """Frequencies that turn less often than this over the original context are slowed fully."""
    high_freq_factor: float = 4.0
    """Frequencies that turn more often than this over the original context are kept."""
    original_max_len: int = 8192
    """Context length, in tokens, of the model before stretching."""
