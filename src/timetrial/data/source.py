"""Sources: `config.Data` -> training and held-out samples (`samples.py` says how they are cut)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from timetrial.config import Data
from timetrial.data import bundled, packing
from timetrial.data.cache import cached_tokens
from timetrial.data.dataset import SPLITS, open_dataset
from timetrial.data.samples import IGNORE, ArrayTokens, PackedSamples, Samples, StreamSamples
from timetrial.data.tokenizer import Tokenizer, bundled_tokenizer
from timetrial.errors import UserError


@dataclass(frozen=True)
class Source:
    """What one `config.Data` opens."""

    train: Samples
    heldout: Samples
    vocab_size: int
    """Ids that samples may hold: the model's vocabulary is at least this."""
    tokenizer: Tokenizer


def open_source(data: Data) -> Source:
    """The samples of `data.source`. Raises UserError for an unknown source or unusable files."""
    if data.source not in SOURCES:
        raise UserError(f"unknown data source {data.source!r}; there are {', '.join(sorted(SOURCES))}")
    return SOURCES[data.source](data)


def open_sotu(data: Data, years: range = range(3000)) -> Source:
    """The bundled State of the Union addresses; `data.tokenizer` is `sotu-VOCAB`, by default 2,048.

    Only those given in `years`; which are held out does not depend on it.
    """
    tokenizer = bundled_by_name(data.tokenizer or "sotu-2048")
    text = bundled.sources()["sotu"]["uncompressed_sha256"]

    def samples(part: int, name: str) -> StreamSamples:
        def make() -> ArrayTokens:
            documents = bundled.split(bundled.documents("sotu"))[part]
            return _stream([d for d in documents if int(d.name[:4]) in years], tokenizer)

        key = f"sotu-{years.start}-{years.stop}-{name}"
        return StreamSamples(cached_tokens(key, [text], tokenizer, make), data.seq_len)

    return Source(samples(0, "train"), samples(1, "heldout"), tokenizer.vocab_size, tokenizer)


def open_synopses(data: Data) -> Source:
    """The bundled pairs, packed to `data.seq_len`; the tokenizer is that of `sotu`."""
    tokenizer = bundled_by_name(data.tokenizer or "sotu-2048")
    text = bundled.sources()["synopses"]["uncompressed_sha256"]

    def samples(part: int, name: str, shards: int) -> PackedSamples:
        def make() -> ArrayTokens:
            pairs = bundled.split(bundled.pairs("synopses"))[part]
            rows = (packing.tokenize(pair, tokenizer, summary_only=name == "heldout") for pair in pairs)
            return packing.pack(rows, data.seq_len, shards)

        decided_by = [text, str(data.seq_len)]
        return PackedSamples(cached_tokens(f"synopses-{name}", decided_by, tokenizer, make), data.seq_len)

    train = samples(0, "train", packing.TRAIN_SHARDS)
    return Source(train, samples(1, "heldout", packing.HELD_OUT_SHARDS), tokenizer.vocab_size, tokenizer)


def open_c4(data: Data) -> Source:
    """Token files of C4 in `data.path`, made by `timetrial data build c4`."""
    splits, tokenizer = open_dataset(_path(data), "c4", data.tokenizer)
    train, heldout = (StreamSamples(splits[split], data.seq_len) for split in SPLITS)
    return Source(train, heldout, tokenizer.vocab_size, tokenizer)


def open_govreport(data: Data) -> Source:
    """Packed token files of GovReport in `data.path`, made by `timetrial data build govreport`."""
    splits, tokenizer = open_dataset(_path(data), "govreport", data.tokenizer)
    packed = splits["train"].meta.seq_len
    if packed != data.seq_len:
        raise UserError(f"{data.path} is packed to {packed} tokens, the run wants {data.seq_len}; set data.seq_len")
    train, heldout = (PackedSamples(splits[split], data.seq_len) for split in SPLITS)
    return Source(train, heldout, tokenizer.vocab_size, tokenizer)


def _path(data: Data) -> Path:
    if data.path is None:
        raise UserError(
            f"{data.source} is not bundled; build it with `timetrial data build {data.source} --input DIR "
            "--tokenizer FILE --out DIR` and pass the directory with --data"
        )
    return Path(data.path)


def bundled_by_name(name: str) -> Tokenizer:
    """The bundled tokenizer called `sotu-VOCAB`. Raises UserError for any other name."""
    head, _, size = name.partition("-")
    if head != "sotu" or not size.isdigit():
        raise UserError(f"unknown bundled tokenizer {name!r}; write sotu-VOCAB, for example sotu-2048")
    return bundled_tokenizer(int(size))


def _stream(documents: list[bundled.Document], tokenizer: Tokenizer) -> ArrayTokens:
    ids = tokenizer.encode_batch([d.text for d in documents])
    return ArrayTokens(np.concatenate([part for doc in ids for part in (doc, [tokenizer.eos_id])]).astype(np.int32))


__all__ = ["IGNORE", "SOURCES", "Samples", "Source", "open_source"]

SOURCES: dict[str, Callable[[Data], Source]] = {
    "sotu": open_sotu,
    "sotu-before-1900": partial(open_sotu, years=range(1900)),
    "sotu-since-1900": partial(open_sotu, years=range(1900, 3000)),
    "synopses": open_synopses,
    "c4": open_c4,
    "govreport": open_govreport,
}
