"""Samples: how a stream of tokens is cut into sequences and labels.

A sample is `seq_len` tokens and, for each position, the token it must predict: `labels` are already
shifted, so nobody shifts later, and -100 marks positions without loss.

`StreamSamples` cuts as Megatron's GPT data set does (`megatron/core/datasets/gpt_dataset.py`):
sample i reads stream[i*S : i*S + S + 1], so every token but the first is a label once.
`PackedSamples` cuts as the LoRA reference does (`group_texts` in mlcommons/training
`llama2_70b_lora/scripts/utils.py`): sample i is stream[i*S : i*S + S] and its last position has no
label, because the model shifts within the sequence.
Neither stops attention where one document ends and the next begins; nor do the references.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORE = -100
"""Label of a position that carries no loss."""


class Samples(Protocol):
    """A fixed list of samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        """`tokens` and `labels`, int64 [seq_len] each. Raises IndexError past the end."""
        ...


class Tokens(Protocol):
    """A long row of ids: an array in memory or token files."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids [stop - start], int64."""
        ...

    def read_mask(self, start: int, stop: int) -> np.ndarray:
        """Whether each of these tokens is to be learnt, bool [stop - start]."""
        ...


@dataclass(frozen=True)
class ArrayTokens:
    """Tokens in memory."""

    ids: np.ndarray
    mask: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop].astype(np.int64)

    def read_mask(self, start: int, stop: int) -> np.ndarray:
        if self.mask is None:
            return np.ones(stop - start, dtype=bool)
        return self.mask[start:stop].astype(bool)


@dataclass(frozen=True)
class StreamSamples:
    """Windows of a pretraining stream; neighbours share the token that ends one's labels."""

    tokens: Tokens
    seq_len: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        _check(index, len(self))
        start = index * self.seq_len
        window = self.tokens.read(start, start + self.seq_len + 1)
        return {"tokens": window[:-1], "labels": window[1:]}


@dataclass(frozen=True)
class PackedSamples:
    """Windows of packed fine-tuning pairs; only masked-in tokens are labels."""

    tokens: Tokens
    seq_len: int

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        _check(index, len(self))
        start, stop = index * self.seq_len, (index + 1) * self.seq_len
        ids = self.tokens.read(start, stop)
        learnt = np.where(self.tokens.read_mask(start, stop), ids, IGNORE)
        return {"tokens": ids, "labels": np.append(learnt[1:], IGNORE)}


def _check(index: int, length: int) -> None:
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of {length}")
