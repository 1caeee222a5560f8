"""Directories of weights that appear whole or not at all.

They are filled beside their place, flushed to the disk and renamed; what a killed process leaves has a
name that nothing reads. Files get the mode 0644 less the user's umask, like the rest of a run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from timetrial.errors import RunFailed, UserError


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `directory` when the block ends well and vanishes otherwise.

    Raises UserError when `directory` is taken or cannot be written, RunFailed when the disk is full.
    """
    temporary = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{directory}: exists and is no empty directory; choose another")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        temporary.rename(directory)
        flush(directory.parent)
    except (OSError, SafetensorError) as error:
        raise cannot_write(directory, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, `path` being new."""
    path.touch(0o644)
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors puts a file of its own there, which only its owner can read


def write_text(path: Path, text: str) -> None:
    """Write a text file, `path` being new."""
    path.touch(0o644)
    path.write_text(text, encoding="utf-8")


def cannot_write(directory: Path, error: OSError | SafetensorError) -> UserError | RunFailed:
    """`error`, met while writing into `directory`, as one line."""
    # safetensors reports only what the system refused while writing, without its number
    if isinstance(error, SafetensorError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunFailed(f"{directory}: cannot be written ({error}); free some space or choose another disk")
    return UserError(f"{directory}: cannot be written ({error.strerror}); choose another directory")


def flush(path: Path) -> None:
    """Have the system put a file's or directory's content on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
