"""Sources: `config.Data` -> training and held-out samples.

A sample is `seq_len` tokens and, for each, the token that follows it; position t of `labels` is
what position t of `tokens` must predict, so nobody shifts later. -100 marks positions without loss.

Pretraining samples are cut as Megatron's GPT data set cuts them: documents, each closed by the end
token, form one stream; sample i reads stream[i*S : i*S + S + 1], and attention is not stopped at
document ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from timetrial.config import Data
from timetrial.data import bundled
from timetrial.data.tokenizer import Tokenizer, bundled_tokenizer
from timetrial.errors import UserError

IGNORE = -100
"""Label of a position that carries no loss."""


class Samples(Protocol):
    """A fixed list of samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`tokens` and `labels`, int64 [seq_len] each. Raises IndexError past the end."""
        ...


@dataclass(frozen=True)
class Source:
    """What one `config.Data` opens."""

    train: Samples
    heldout: Samples
    vocab_size: int
    """Ids that samples may hold: the model's vocabulary is at least this."""
    tokenizer: Tokenizer


@dataclass(frozen=True)
class StreamSamples:
    """Non-overlapping windows of one token stream."""

    stream: np.ndarray
    """Ids [n] of all documents, each closed by the end token."""
    seq_len: int

    def __len__(self) -> int:
        return max(0, (len(self.stream) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.seq_len
        window = np.asarray(self.stream[start : start + self.seq_len + 1], dtype=np.int64)
        return {"tokens": window[:-1], "labels": window[1:]}


def open_source(data: Data) -> Source:
    """The samples of `data.source`. Raises UserError for an unknown source or unusable files."""
    if data.source not in SOURCES:
        raise UserError(f"unknown data source {data.source!r}; there are {', '.join(sorted(SOURCES))}")
    return SOURCES[data.source](data)


def open_sotu(data: Data) -> Source:
    """The bundled State of the Union addresses; `data.tokenizer` is `sotu-VOCAB`, by default 2,048."""
    tokenizer = bundled_by_name(data.tokenizer or "sotu-2048")
    train, heldout = bundled.split(bundled.documents("sotu"))
    return Source(
        train=StreamSamples(_stream(train, tokenizer), data.seq_len),
        heldout=StreamSamples(_stream(heldout, tokenizer), data.seq_len),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
    )


def bundled_by_name(name: str) -> Tokenizer:
    """The bundled tokenizer called `sotu-VOCAB`. Raises UserError for any other name."""
    head, _, size = name.partition("-")
    if head != "sotu" or not size.isdigit():
        raise UserError(f"unknown bundled tokenizer {name!r}; write sotu-VOCAB, for example sotu-2048")
    return bundled_tokenizer(int(size))


def _stream(documents: list[bundled.Document], tokenizer: Tokenizer) -> np.ndarray:
    ids = tokenizer.encode_batch([d.text for d in documents])
    return np.concatenate([part for doc in ids for part in (doc, [tokenizer.eos_id])]).astype(np.int32)


SOURCES: dict[str, Callable[[Data], Source]] = {"sotu": open_sotu}
