"""Token files: tokenized text on disk, memory-mapped, checksummed.

A directory holds parts and a `meta.json`. Part NAME is

    NAME.bin    ids, little-endian, uint16 where the vocabulary has up to 65,536 ids, else uint32
    NAME.idx    uint64 [documents + 1]: where each document starts in the part, and its end
    NAME.mask   uint8 [tokens], only in packed fine-tuning data: 1 where the token is to be learnt

and the parts, in the order of `meta.json`, read as one row of tokens. `meta.json` holds counts and
sha256 of every file, the tokenizer's name and sha256, the command that makes the directory again,
and a checksum of itself. Opening compares sizes (instant); `verify()` reads everything.

Parts and not one file, as Megatron has: a killed build loses only the parts that were not finished,
and nothing is copied together at the end.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from timetrial.data.tokenizer import Tokenizer
from timetrial.errors import UserError

FORMAT, VERSION = "timetrial tokens", 1
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Part:
    """One finished part."""

    name: str
    documents: int
    tokens: int
    sha256: dict[str, str]
    """File suffix -> checksum."""
    origin: dict[str, Any] = field(default_factory=dict)
    """What it was made from, as the builder chooses to say it."""


@dataclass(frozen=True)
class Meta:
    """What `meta.json` says."""

    source: str
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    rebuild: str
    """Command that makes the directory again."""
    parts: tuple[Part, ...]
    seq_len: int | None = None
    """Length of the packed sequences; None for a pretraining stream."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype[Any]:
        return dtype_for(self.vocab_size)

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


# ---- writing -------------------------------------------------------------------------------------


class PartWriter:
    """Writes one part under temporary names; `finish()` makes it appear whole, or it never does."""

    def __init__(self, directory: Path, name: str, vocab_size: int, masked: bool = False) -> None:
        self.directory, self.name = directory, name
        self.tokens = self.documents = 0
        self._lengths: list[np.ndarray] = []
        self._dtype = dtype_for(vocab_size)
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._files = {s: _HashedFile(self._temporary(s)) for s in (("bin", "mask") if masked else ("bin",))}

    def add(self, ids: np.ndarray, mask: np.ndarray | None = None, lengths: np.ndarray | None = None) -> None:
        """Append ids [n], and which of them are to be learnt, bool [n], if masked.

        They are one document, unless `lengths` says how long the documents are that end here.
        """
        with disk_errors(self.directory / f"{self.name}.bin"):
            self._files["bin"].write(np.ascontiguousarray(ids, dtype=self._dtype))
            if "mask" in self._files:
                learnt = np.ones(len(ids)) if mask is None else mask
                self._files["mask"].write(np.ascontiguousarray(learnt, dtype=np.uint8))
        ended = np.array([len(ids)]) if lengths is None else lengths
        self.tokens += len(ids)
        self.documents += len(ended)
        self._lengths.append(ended.astype(np.uint64))

    def finish(self, origin: dict[str, Any] | None = None) -> Part:
        """Flush to disk, move into place and return the part."""
        with disk_errors(self.directory / f"{self.name}.bin"):
            self._files["idx"] = _HashedFile(self._temporary("idx"))
            starts = np.cumsum(np.concatenate([np.zeros(1, np.uint64), *self._lengths]), dtype="<u8")
            self._files["idx"].write(starts)
            sums = {suffix: file.close() for suffix, file in self._files.items()}
            for suffix in self._files:
                self._temporary(suffix).replace(self.directory / f"{self.name}.{suffix}")
        return Part(self.name, self.documents, self.tokens, dict(sorted(sums.items())), origin or {})

    def discard(self) -> None:
        """Remove the temporary files of an unfinished part."""
        for suffix, file in self._files.items():
            file.abandon()
            self._temporary(suffix).unlink(missing_ok=True)

    def _temporary(self, suffix: str) -> Path:
        return self.directory / f"{self.name}.{suffix}.{os.getpid()}.tmp"


class _HashedFile:
    """A file whose sha256 is known when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb", buffering=_CHUNK)
        self._hash = hashlib.sha256()

    def write(self, values: np.ndarray) -> None:
        self._file.write(values.data)
        self._hash.update(values.data)

    def close(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, and the disk may be what is full
            self._file.close()


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns errors of writing into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "free some space or choose another --out, then run the same command again"
            raise UserError(f"no space left for {path}; {advice}") from None
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write `values` with a checksum of themselves, all or nothing."""
    text = json.dumps({**values, "checksum": _self_sum(values)}, indent=1) + "\n"
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_meta(directory: Path, meta: Meta) -> None:
    """Declare the directory complete."""
    write_json(directory / "meta.json", {"format": FORMAT, "version": VERSION, **asdict(meta)})


def part_from(values: dict[str, Any]) -> Part:
    """The part that `asdict` described."""
    return Part(**{f.name: values[f.name] for f in fields(Part)})


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """What `write_json` wrote. Raises UserError, ending in `advice`, when it is missing or altered."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        expected = values.pop("checksum")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {advice}") from None
    except (ValueError, KeyError, AttributeError):
        raise UserError(f"{path} is damaged; {advice}") from None
    if _self_sum(values) != expected:
        raise UserError(f"{path} was altered; {advice}")
    return values


def _self_sum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# ---- reading -------------------------------------------------------------------------------------


class TokenFiles:
    """The tokens of one directory, all parts in a row. See `samples.Tokens`."""

    def __init__(self, directory: Path | str) -> None:
        """Map the files. Raises UserError when one is missing or has not the size it was written with."""
        self.directory = Path(directory)
        self.meta = read_meta(self.directory)
        starts = np.cumsum([0, *(part.tokens for part in self.meta.parts)])
        self._starts: np.ndarray = starts.astype(np.int64)
        for part in self.meta.parts:
            for suffix in part.sha256:
                self._check_size(part, suffix)
        self._bins = [self._map(part, "bin", self.meta.dtype) for part in self.meta.parts]
        self._masks = [self._map(part, "mask", np.uint8) for part in self.meta.parts if "mask" in part.sha256]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids [stop - start], int64."""
        return self._gather(self._bins, start, stop).astype(np.int64)

    def read_mask(self, start: int, stop: int) -> np.ndarray:
        """Whether each of these tokens is to be learnt, bool [stop - start]."""
        if not self._masks:
            return np.ones(stop - start, dtype=bool)
        return self._gather(self._masks, start, stop).astype(bool)

    def document(self, part: int, index: int) -> np.ndarray:
        """Ids, int64, of one document of one part."""
        boundaries = self._map(self.meta.parts[part], "idx", np.dtype("<u8"))
        begin, end = int(boundaries[index]), int(boundaries[index + 1])
        return np.asarray(self._bins[part][begin:end], dtype=np.int64)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every file. Raises UserError naming the first one that is not as it was written.

        `progress(bytes read, bytes in all)` is called now and then.
        """
        files = [(part, suffix) for part in self.meta.parts for suffix in part.sha256]
        total = sum(self._path(part, suffix).stat().st_size for part, suffix in files)
        done = 0
        for part, suffix in files:
            digest = hashlib.sha256()
            with self._path(part, suffix).open("rb") as file:
                while block := file.read(_CHUNK):
                    digest.update(block)
                    done += len(block)
                    if progress:
                        progress(done, total)
            if digest.hexdigest() != part.sha256[suffix]:
                raise UserError(f"{self._path(part, suffix)} was altered: its sha256 differs; {self._advice()}")
            if suffix == "idx":
                self._check_boundaries(part)

    def _gather(self, arrays: list[np.ndarray], start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start}:{stop} of {len(self)}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        for i in range(first, len(arrays)):
            base = int(self._starts[i])
            if base >= stop:
                break
            pieces.append(arrays[i][max(0, start - base) : stop - base])
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=self.meta.dtype)

    def _map(self, part: Part, suffix: str, dtype: np.dtype[Any] | type) -> np.ndarray:
        return np.memmap(self._path(part, suffix), dtype=dtype, mode="r")

    def _check_size(self, part: Part, suffix: str) -> None:
        width = {"bin": self.meta.dtype.itemsize, "mask": 1, "idx": 8}[suffix]
        expected = width * (part.documents + 1 if suffix == "idx" else part.tokens)
        path = self._path(part, suffix)
        try:
            found = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; {self._advice()}") from None
        if found != expected:
            raise UserError(f"{path} has {found:,} bytes, not {expected:,}; {self._advice()}")

    def _check_boundaries(self, part: Part) -> None:
        boundaries = self._map(part, "idx", np.dtype("<u8"))
        if boundaries[0] != 0 or boundaries[-1] != part.tokens or (boundaries[1:] < boundaries[:-1]).any():
            raise UserError(f"{self._path(part, 'idx')} is no rising list of documents; {self._advice()}")

    def _path(self, part: Part, suffix: str) -> Path:
        return self.directory / f"{part.name}.{suffix}"

    def _advice(self) -> str:
        return f"remove {self.directory} and run: {self.meta.rebuild}"


def read_meta(directory: Path) -> Meta:
    """The directory's description. Raises UserError when there is none, or one of another version."""
    advice = f"make it with: timetrial data build SOURCE --input DIR --tokenizer FILE --out {directory}"
    values = read_json(directory / "meta.json", advice)
    if values.pop("format", None) != FORMAT:
        raise UserError(f"{directory / 'meta.json'} describes no token files; {advice}")
    if (version := values.pop("version")) != VERSION:
        raise UserError(f"{directory} has format version {version}, this program reads {VERSION}; {advice}")
    parts = tuple(part_from(part) for part in values.pop("parts"))
    return Meta(parts=parts, **values)


def check_tokenizer(meta: Meta, tokenizer: Tokenizer, directory: Path) -> None:
    """Raises UserError when the files were made with another tokenizer."""
    if meta.tokenizer_sha256 != tokenizer.sha256:
        raise UserError(
            f"{directory} was made with tokenizer {meta.tokenizer} (sha256 {meta.tokenizer_sha256[:12]}), "
            f"not with {tokenizer.name} ({tokenizer.sha256[:12]}); give that tokenizer or another --out"
        )
