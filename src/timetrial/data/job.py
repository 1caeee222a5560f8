"""One unit of a data build: some input files that become one part of token files."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from timetrial.data.tokenfile import PartWriter
from timetrial.data.tokenizer import Tokenizer
from timetrial.errors import UserError

Report = Callable[[int, int, int], None]
"""Called with what was done since the last call: input bytes, documents, tokens."""


class Job(Protocol):
    """Frozen, so that it can be sent to a worker process."""

    @property
    def split(self) -> str:
        """train or heldout."""
        ...

    @property
    def name(self) -> str:
        """Of the part; unique within its split, and parts are read in the order of the jobs."""
        ...

    @property
    def inputs(self) -> tuple[Path, ...]: ...

    @property
    def masked(self) -> bool:
        """Whether the part says which tokens are to be learnt."""
        ...

    @property
    def seq_len(self) -> int | None:
        """Length of packed sequences; None for a stream."""
        ...

    def write(self, writer: PartWriter, tokenizer: Tokenizer, report: Report) -> None:
        """Read the inputs into `writer`. Raises UserError naming the file, and the line, at fault."""
        ...


def origin(job: Job) -> dict[str, Any]:
    """What the finished part remembers of its inputs: enough to notice that they are others."""
    return {"inputs": [{"file": path.name, "bytes": size_of(path)} for path in job.inputs]}


def size_of(path: Path) -> int:
    """Bytes of an input file. Raises UserError when there is none."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; it is needed, fetch it") from None


def json_lines(path: Path, report: Report | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of a .json, .jsonl or .gz file with one JSON object a line.

    Raises UserError naming the file and line for what cannot be read. `report` gets the bytes read.
    """
    number, seen = 0, 0
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                yield number, _object(line, path, number)
                if report and raw.tell() != seen:
                    report(raw.tell() - seen, 0, 0)
                    seen = raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged gzip after line {number} ({error}); fetch the file again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def text_of(row: dict[str, Any], key: str, path: Path, number: int) -> str:
    """The string at `key`. Raises UserError when there is none."""
    value = row.get(key)
    if not isinstance(value, str):
        raise UserError(f'{path} line {number}: no text under "{key}"; is this the right file?')
    return value


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    return gzip.open(raw) if path.suffix == ".gz" else raw  # type: ignore[return-value]


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(f"{path} line {number}: no JSON ({error}); fetch the file again") from None
    if not isinstance(row, dict):
        raise UserError(f"{path} line {number}: a JSON object with the text is needed")
    return row
