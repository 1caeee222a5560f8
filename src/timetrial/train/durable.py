"""Files that outlive a kill, a power cut and a full disk whole, or not at all.

`write_atomic` writes a temporary file in the same directory, fsyncs it, renames it over the target
and fsyncs the directory. Rename alone is not enough: file systems may order it before the data
(Pillai et al., OSDI 2014, "All File Systems Are Not Created Equal"). `JsonLines` is the append-only
counterpart: one `write` a line, a torn last line dropped, and cut back to a byte offset on resume.

Every OSError leaves here as one line: what failed, where, how much space there is, what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timetrial.errors import RunFailed, UserError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_UNUSABLE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT,
    errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system of `path`, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def storage_error(error: OSError, path: Path, needed: int | None = None) -> UserError | RunFailed:
    """`error`, met while writing `path`, as one line for the user. `needed`: bytes that were to be written."""
    reason = error.strerror or str(error)
    wants = f"{needed:,} bytes are needed and " if needed is not None else ""
    if error.errno in _FULL:
        kind = "disk quota exceeded" if error.errno == errno.EDQUOT else "disk full"
        return RunFailed(
            f"{path}: {kind}: {wants}{free_bytes(path):,} bytes are free; free some space or give another --out"
        )
    if error.errno == errno.EFBIG:
        return RunFailed(f"{path}: {wants}the file size limit of this process is lower; raise it with `ulimit -f`")
    if error.errno in _UNUSABLE:
        return UserError(f"{path}: cannot write there ({reason}); give a directory that can be written with --out")
    return RunFailed(f"{path}: writing failed ({reason}); {free_bytes(path):,} bytes are free; check the disk")


def writable_directory(path: Path) -> Path:
    """`path`, made with its parents when absent, after a file was written there and removed again.

    Raises UserError when it cannot be a directory or cannot be written, RunFailed when the disk is full.
    """
    probe = path / ".writable"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"?")
        probe.unlink()
    except OSError as error:
        raise storage_error(error, path) from error
    return path


class DirectoryLock:
    """Holds `directory` for this process, so that no second run writes there at the same time.

    The kernel drops the lock when the process ends, killed or not. A POSIX record lock, because
    flock() would live on in forked data workers that outlive a killed run.
    Raises UserError when another process holds it.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / ".lock"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, path) from error
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 64, 0).decode(errors="replace").strip()
            self.release()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise UserError(
                    f"{directory}: another run (process {holder or 'unknown'}) is using it; stop that one or give "
                    "another --out"
                ) from None
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise storage_error(error, path) from error
            return  # a file system without locks: nothing to hold
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets another process have the directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def fsync_directory(path: Path) -> None:
    """Makes the names in `path` (files created, renamed, removed) durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all of `data`; one write() takes at most 2 GiB and may take less near a limit."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replaces the file `path` by `data`, durably; a reader sees the old content or the new, never a part.

    Raises UserError when `path` cannot be written, RunFailed when the disk is full; then the old file stands.
    """
    raw = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, raw)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the directory itself may be the trouble; the first error says so
            temporary.unlink(missing_ok=True)
        raise storage_error(error, path, len(raw)) from error


class JsonLines:
    """A file of one JSON object a line, appended to while a run goes on.

    A line is in the file when `append` returns (a killed process loses none), and on the disk after
    `offset()`. Store that in a checkpoint and pass it as `offset` on resume: lines that a killed run
    wrote after its last checkpoint are cut off, to be written again by the resumed one.

    offset: bytes to keep, or None to keep every whole line.
    Raises UserError when `path` cannot be written, RunFailed when it is shorter than `offset` or
    `offset` is inside a line, or the disk is full; a line that did not fit is taken back.
    """

    def __init__(self, path: Path, offset: int | None = None) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, path) from error
        try:
            self._offset = self._end_of_lines() if offset is None else self._checked(offset)
            os.ftruncate(self._fd, self._offset)
        except BaseException:
            self.close()
            raise

    def _end_of_lines(self) -> int:
        """Bytes up to and with the last newline."""
        end = os.fstat(self._fd).st_size
        while end > 0:
            start = max(0, end - 65536)
            found = os.pread(self._fd, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def _checked(self, offset: int) -> int:
        size = os.fstat(self._fd).st_size
        if size < offset:
            raise RunFailed(
                f"{self.path} has {size:,} bytes, but {offset:,} when the checkpoint was written; put the whole file "
                "back, or start anew in another --out"
            )
        if offset > 0 and os.pread(self._fd, 1, offset - 1) != b"\n":
            raise RunFailed(
                f"{self.path} has no line end at byte {offset:,}, where the checkpoint was written: it was changed "
                "since; put it back, or start anew in another --out"
            )
        return offset

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds `row` as one line. Numbers that JSON does not know (nan, inf) become null."""
        line = json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        try:
            write_all(self._fd, line)
        except OSError as error:
            os.ftruncate(self._fd, self._offset)  # no half line stays behind
            raise storage_error(error, self.path, len(line)) from error
        self._offset += len(line)

    def offset(self) -> int:
        """Bytes of all lines so far, after making them durable: what a checkpoint refers to must be on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise storage_error(error, self.path) from error
        return self._offset

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
