"""SCROLLS GovReport as the Llama 2 70B LoRA benchmark uses it: packed to 8,192 tokens.

Two kinds of input are taken:

* packed already, as MLCommons distributes it (`scrolls_gov_report_8k`, on the Hugging Face hub
  regisss/scrolls_gov_report_preprocessed_mlperf_2): train*.parquet and validation*.parquet, or the
  same rows as .jsonl, with `input_ids` and `labels`, -100 where there is no loss;
* the raw task of SCROLLS, train.jsonl and validation.jsonl with `input` and `output`, which is
  packed here by the reference's steps (`packing.py`).

The reference set has 3,901 training and 173 validation sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from timetrial.data.bundled import Pair
from timetrial.data.job import Job, Report, json_lines, text_of
from timetrial.data.packing import HELD_OUT_SHARDS, TRAIN_SHARDS, Row, pack, tokenize
from timetrial.data.samples import IGNORE
from timetrial.data.tokenfile import PartWriter
from timetrial.data.tokenizer import Tokenizer
from timetrial.errors import UserError

SEQ_LEN = 8192
REFERENCE_SEQUENCES = {"train": 3901, "heldout": 173}
_FILES = {"train": "train", "heldout": "validation"}


@dataclass(frozen=True)
class PackedPart:
    """One split -> one part of packed sequences, each a document of the part."""

    split: str
    name: str
    inputs: tuple[Path, ...]
    seq_len: int | None = SEQ_LEN
    masked: bool = True

    @property
    def length(self) -> int:
        return self.seq_len or SEQ_LEN

    def write(self, writer: PartWriter, tokenizer: Tokenizer, report: Report) -> None:
        """See `Job`."""
        if _is_packed(self.inputs[0]):
            for path, number, row in _rows(self.inputs, report):
                self._copy(row, f"{path} row {number}", writer, tokenizer, report)
        else:
            self._pack(writer, tokenizer, report)
        if not writer.documents:
            raise UserError(f"{self.inputs[0]} holds no sequence; fetch it again")

    def _copy(self, row: dict[str, Any], where: str, writer: PartWriter, tokenizer: Tokenizer, report: Report) -> None:
        try:
            ids, labels = (np.asarray(row[key], dtype=np.int64) for key in ("input_ids", "labels"))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UserError(f"{where}: rows of input_ids and labels are needed") from None
        if ids.shape != (self.length,) or labels.shape != ids.shape:
            raise UserError(f"{where}: {len(ids)} ids and {len(labels)} labels, not {self.length} of each")
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            raise UserError(f"{where}: id {ids.max()}, but tokenizer {tokenizer.name} has {tokenizer.vocab_size:,}")
        learnt = labels != IGNORE
        if (labels[learnt] != ids[learnt]).any():
            raise UserError(f"{where}: labels are neither the ids nor {IGNORE}")
        writer.add(ids, learnt)
        report(0, 1, len(ids))

    def _pack(self, writer: PartWriter, tokenizer: Tokenizer, report: Report) -> None:
        evaluation = self.split == "heldout"

        def tokenized() -> Iterator[Row]:
            for path, number, row in _rows(self.inputs, report):
                pair = Pair(str(number), text_of(row, "input", path, number), text_of(row, "output", path, number))
                yield tokenize(pair, tokenizer, summary_only=evaluation)

        packed = pack(tokenized(), self.length, HELD_OUT_SHARDS if evaluation else TRAIN_SHARDS)
        for start in range(0, len(packed), self.length):
            stop = start + self.length
            writer.add(packed.read(start, stop), packed.read_mask(start, stop))
        report(0, writer.documents, writer.tokens)


def jobs(directory: Path, seq_len: int = SEQ_LEN) -> list[Job]:
    """The two parts to make. Raises UserError when a split is missing."""
    found: list[Job] = []
    for split, stem in _FILES.items():
        choices = (sorted(directory.glob(f"{stem}{end}")) for end in ("*.parquet", "*.jsonl", "*.jsonl.gz"))
        inputs = next((paths for paths in choices if paths), None)
        if inputs is None:
            raise UserError(f"{directory} has no {stem}.jsonl (SCROLLS GovReport) and no {stem}*.parquet (packed)")
        found.append(PackedPart(split, stem, tuple(inputs), seq_len))
    return found


def _is_packed(path: Path) -> bool:
    """Whether the rows hold ids already."""
    if path.suffix == ".parquet":
        return True
    _, first = next(json_lines(path), (0, {}))
    return "input_ids" in first


def _rows(paths: tuple[Path, ...], report: Report) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    for path in paths:
        rows = _parquet(path, report) if path.suffix == ".parquet" else json_lines(path, report)
        for number, row in rows:
            yield path, number, row


def _parquet(path: Path, report: Report) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow; run: pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=16):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}; fetch it again") from None
    report(path.stat().st_size, 0, 0)
