"""Megatron's indexed data set, version 1 (`megatron/core/datasets/indexed_dataset.py`) -> one part.

PREFIX.bin is ids one after the other. PREFIX.idx is, little-endian:

    9 bytes "MMIDIDX" 0 0; uint64 version = 1; uint8 code of the id type;
    uint64 sequences n; uint64 document boundaries; int32 length [n]; int64 byte offset [n]; ...

MLCommons distributes the tokenized C4 of the Llama 3.1 benchmarks in this form. The ids are copied
and not linked: the type may differ, and every id is compared with the vocabulary on the way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from timetrial.data.job import Report, size_of
from timetrial.data.tokenfile import PartWriter
from timetrial.data.tokenizer import Tokenizer
from timetrial.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHUNK = 1 << 22


@dataclass(frozen=True)
class MegatronPart:
    """A .bin and .idx pair -> one part."""

    split: str
    name: str
    inputs: tuple[Path, ...]
    """The .bin, then the .idx."""
    masked: bool = False
    seq_len: int | None = None

    def write(self, writer: PartWriter, tokenizer: Tokenizer, report: Report) -> None:
        """See `Job`."""
        bin_path, idx_path = self.inputs
        dtype, lengths = read_index(idx_path)
        total = int(lengths.sum(dtype=np.int64))
        found = size_of(bin_path)
        if found != total * dtype.itemsize or not total:
            raise UserError(f"{bin_path} has {found:,} bytes, its .idx tells of {total * dtype.itemsize:,}; fetch both")
        ids = np.memmap(bin_path, dtype=dtype, mode="r")
        none = np.empty(0, dtype=np.int64)
        for start in range(0, total, _CHUNK):
            chunk = ids[start : start + _CHUNK]
            if int(chunk.max()) >= tokenizer.vocab_size or int(chunk.min()) < 0:
                raise UserError(
                    f"{bin_path} holds id {int(chunk.max()):,}, tokenizer {tokenizer.name} has "
                    f"{tokenizer.vocab_size:,}; give the tokenizer it was made with"
                )
            writer.add(chunk, lengths=none)
            report(chunk.nbytes, 0, len(chunk))
        writer.add(none, lengths=lengths)
        report(size_of(idx_path), len(lengths), 0)


def read_index(path: Path) -> tuple[np.dtype[Any], np.ndarray]:
    """(type of the ids, int32 length of every sequence). Raises UserError for anything else."""
    bytes_found = size_of(path)
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    fields = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0, 0, 0)
    magic, version, code, sequences, _ = fields
    if magic != MAGIC or version != 1 or code not in _TYPES:
        raise UserError(f"{path} is no Megatron index of version 1; fetch it again")
    if bytes_found < _HEADER.size + 12 * sequences:
        raise UserError(f"{path} is cut short; fetch it again")
    lengths = np.fromfile(path, dtype="<i4", count=sequences, offset=_HEADER.size)
    return np.dtype(_TYPES[code]), lengths
