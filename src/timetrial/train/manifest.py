"""What a checkpoint consists of: its files with sizes and sha256, and every value that is no tensor.

Tensors lie in the files that torch.distributed.checkpoint writes. `manifest.json` is written last and
lists them all, so a checkpoint without one was never finished; it also carries a sha256 of itself, so a
changed step or data position is noticed like a changed weight. Values that are no tensors (learning
rate, betas, the data position) stand in it as JSON rather than as pickles beside the tensors: floats
come back bit for bit, and a person can read them.

The hash of a file is taken from the bytes on their way to the disk, not by reading them back: this
costs no second pass, and it notices what was damaged between the memory and the disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystem

from timetrial.train.durable import write_all, write_atomic

if TYPE_CHECKING:
    from typing_extensions import Buffer

NAME = "manifest.json"
FORMAT = "timetrial checkpoint 1"
_BLOCK_BYTES = 4 << 20


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the message says which file is wrong and how."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`."""

    step: int
    """Optimizer steps made before the checkpoint was taken."""
    world_size: int
    """Ranks that wrote it; any number can read it."""
    torch_version: str
    files: Mapping[str, FileEntry]
    """File name in the checkpoint's directory -> size and hash."""
    values: Mapping[str, Any]
    """Dotted place in the state -> value that is no tensor."""
    extra: Mapping[str, Any]
    """What the caller stored beside the state."""
    format: str = FORMAT

    def write(self, directory: Path) -> None:
        """Writes the manifest into `directory`, durably."""
        content = json.loads(json.dumps(dataclasses.asdict(self)))  # as it will be read back
        write_atomic(directory / NAME, json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n")


def read(directory: Path) -> Manifest:
    """The manifest of the checkpoint in `directory`. Raises Damaged when there is none, or it was changed."""
    path = directory / NAME
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{NAME} is missing") from None
    except OSError as error:
        raise Damaged(f"{NAME} cannot be read ({error.strerror})") from error
    except ValueError:
        raise Damaged(f"{NAME} is no JSON, it was cut or changed") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise Damaged(f"{NAME} has the format {found!r}, not {FORMAT!r}")
    if content.pop("sha256", None) != _digest(content):
        raise Damaged(f"{NAME} was changed after it was written")
    content["files"] = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    return Manifest(**content)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def problems(directory: Path, entries: Iterable[tuple[str, FileEntry]], threads: int = 4) -> list[str]:
    """One message for each of `entries` that is not in `directory` as the manifest says; empty when all are.

    Reads `threads` files at a time: hashlib and file reads release the interpreter lock.
    """

    def check(item: tuple[str, FileEntry]) -> str | None:
        return problem(directory, *item)

    with ThreadPoolExecutor(threads) as pool:
        return [found for found in pool.map(check, entries) if found is not None]


def problem(directory: Path, name: str, entry: FileEntry) -> str | None:
    """What is wrong with one file, or None."""
    path = directory / name
    hashed = hashlib.sha256()
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{name} has {size:,} bytes instead of {entry.bytes:,}"
        block = bytearray(_BLOCK_BYTES)
        view = memoryview(block)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                hashed.update(view[:count])
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if hashed.hexdigest() == entry.sha256 else f"{name} has another sha256 than when it was written"


class HashingFileSystem(FileSystem):
    """The file system under torch.distributed.checkpoint's writer: hashes what passes, keeps the first error.

    An OSError is kept in `error` and the rest of the data is dropped, instead of being raised: the
    writer runs threads whose exceptions nobody sees, and torch.save turns ENOSPC into a message about
    file positions. The caller looks at `error` when the writer is done.
    Files are not buffered: the writer fsyncs `.metadata` without flushing it first.
    """

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with open(path, mode, buffering=0) as file:
            stream = _HashingStream(file.fileno(), self)
            try:
                yield stream
            except OSError as error:  # fsync can fail too
                self.keep(error)
        self.entries[Path(path).name] = stream.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)

    def keep(self, error: OSError) -> None:
        """Remembers the first error."""
        self.error = self.error or error


class _HashingStream(io.RawIOBase):
    def __init__(self, fd: int, owner: HashingFileSystem) -> None:
        self._fd = fd
        self._owner = owner
        self._size = 0
        self._sha256 = hashlib.sha256()

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        if self._owner.error is None:
            try:
                write_all(self._fd, view)
                self._sha256.update(view)
            except OSError as error:
                self._owner.keep(error)
        self._size += len(view)
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._fd

    def entry(self) -> FileEntry:
        return FileEntry(self._size, self._sha256.hexdigest())
