"""Checkpoints that are whole or not there, written while the training goes on.

`save` copies the state into staging buffers and returns; a thread writes the copy with
torch.distributed.checkpoint into `.step-00000100.tmp`, adds `manifest.json` (sizes, sha256), fsyncs
everything, renames the directory to `step-00000100` and fsyncs the parent. A kill at any moment
leaves the checkpoints before it as they were. Old ones go only when the new one is durable.

All ranks take part: each writes its own shards, rank 0 the manifest. The thread's collectives run in
a gloo group of their own, because two threads that share a group may interleave differently on two
ranks. The directory must be one that all ranks see.

Why not dcp.async_save: it would start the same thread, but leave the renaming, the checksums and the
agreement between ranks to be done after it, in the training loop.

A checkpoint is to be trusted like code: the `.metadata` file of torch.distributed.checkpoint is a pickle.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from timetrial.errors import RunFailed, UserError
from timetrial.train import manifest as manifests
from timetrial.train import statetree
from timetrial.train.durable import DirectoryLock, free_bytes, fsync_directory, storage_error, writable_directory
from timetrial.train.manifest import Damaged, HashingFileSystem, Manifest
from timetrial.train.ranks import Ranks, one_line

_FILE_BYTES = 256 << 20  # a rank writes one file per so much state, at most _MAX_FILES, in as many threads
_MAX_FILES = 8
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read."""

    step: int
    """Optimizer steps made before it was taken."""
    extra: dict[str, Any]
    """What was given to `save` beside the state."""
    path: Path
    skipped: list[str]
    """One message for each newer checkpoint that was damaged."""


class Checkpointer:
    """Writes and reads the checkpoints of one run; every rank makes one, at the same point.

    directory: where they lie, such as RUN/checkpoints. Leftovers of a killed run are removed there.
    keep: newest checkpoints to keep, at least 1. The disk must hold one more while one is written.
    read_only: change nothing there and take no lock, so that the run may go on meanwhile; `save` is an error.
    Raises UserError when the directory cannot be written or another process is using it.
    """

    def __init__(self, directory: Path, keep: int = 2, read_only: bool = False) -> None:
        if keep < 1:
            raise UserError(f"keep_checkpoints={keep}: at least one checkpoint must be kept")
        self.directory = Path(directory)
        self.keep = keep
        self.read_only = read_only
        self._ranks = Ranks()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock: DirectoryLock | None = None
        gpu = torch.cuda.is_available()
        self._stager = DefaultStager(StagingOptions(gpu, False, False, gpu))  # pinned, non-blocking copies on a GPU
        # Writing alone is what a single process means to do; torch warns about it at each save and load.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        self._newest: int | None = self._ranks.first(self._open)
        self._unclaimed = self._newest is not None  # written by an earlier run, and not restored

    def _open(self) -> int | None:
        if not self.read_only:
            writable_directory(self.directory)
            self._lock = DirectoryLock(self.directory)
            for leftover in self.directory.glob(".step-*.tmp"):
                _remove(leftover)
        return max(_steps(self.directory), default=None)

    @property
    def newest(self) -> int | None:
        """Step of the newest durable checkpoint, None when there is none."""
        return self._newest

    # ---- writing ---------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> None:
        """Starts writing a checkpoint; returns when `state` is copied and may be changed.

        Waits for the one before when that is still being written. A step that is already there is
        not written again.

        state: nested dictionaries of tensors, DTensors and JSON values. A plain tensor has the same
        value on every rank that has one of its name.
        extra: JSON values; those of rank 0 are stored.
        Raises RunFailed when writing the one before failed, UserError when the directory holds
        checkpoints of an earlier run that `restore_newest` was not asked for.
        """
        if self.read_only:
            raise ValueError(f"{self.directory} was opened to be read")
        self.wait()
        if self._unclaimed:
            raise UserError(
                f"{self.directory} has checkpoints of an earlier run, the newest of step {self._newest}: "
                "go on from it with --resume, or give another --out"
            )
        if step == self._newest:
            return
        if self._newest is not None and step < self._newest:
            raise ValueError(f"checkpoint of step {step} after that of step {self._newest}")
        tensors, values = statetree.split(state)
        frozen: dict[str, Any] = json.loads(json.dumps(extra or {}))
        staged = self._stager.stage(tensors)
        self._thread = threading.Thread(
            target=self._write_catching, args=(step, staged, values, frozen), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()

    def poll(self) -> int | None:
        """Step of the newest durable checkpoint. Raises RunFailed when writing the last one failed."""
        if self._thread is not None and not self._thread.is_alive():
            return self.wait()
        return self._newest

    def wait(self) -> int | None:
        """As `poll`, after the checkpoint in flight is durable."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            intact = "there is none before it" if self._newest is None else f"that of step {self._newest} is intact"
            raise RunFailed(f"checkpoint not written ({intact}): {one_line(error)}") from error
        return self._newest

    def close(self) -> None:
        """Waits for the checkpoint in flight, then lets go of the directory, group and buffers."""
        try:
            self.wait()
        finally:
            self._stager.close()
            self._ranks.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RunFailed as late:
            if error is None:
                raise
            error.add_note(str(late))  # the first error is the one to show

    def _write_catching(self, step: int, staged: dict[str, Any], values: dict[str, Any], extra: dict[str, Any]) -> None:
        temporary = self.directory / f".step-{step:08d}.tmp"
        try:
            self._write(step, temporary, staged, values, extra)
        except BaseException as error:  # whatever it is: the training thread raises it
            if self._ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # gives a full disk its space back
            self._error = error
        else:
            self._newest = step

    def _write(
        self, step: int, temporary: Path, staged: dict[str, Any], values: dict[str, Any], extra: dict[str, Any]
    ) -> None:
        sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in statetree.leaves(staged).items()}
        parts = self._ranks.gather((values, sizes))
        needed = 0  # bytes of all ranks; only rank 0 knows

        def prepare() -> None:
            nonlocal needed
            needed = sum(statetree.merged(part[1] for part in parts).values())
            if free_bytes(self.directory) < needed:  # fail before others on this disk do
                raise storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.directory, needed)
            _remove(temporary)
            try:
                temporary.mkdir()
            except OSError as error:
                raise storage_error(error, temporary) from error

        self._ranks.first(prepare)
        files = HashingFileSystem()
        writer = FileSystemWriter(
            temporary,
            thread_count=max(1, min(_MAX_FILES, statetree.local_bytes(staged) // _FILE_BYTES, len(sizes))),
            per_thread_copy_ahead=0,  # the copy is on the host already
        )
        writer.fs = files
        try:
            dcp_save(staged, storage_writer=writer, process_group=self._ranks.group)
        except CheckpointException as error:  # the same one on every rank
            for failure, _ in error.failures.values():
                if isinstance(failure, OSError):
                    files.keep(failure)
            if files.error is None:
                raise
        written = self._ranks.gather((files.entries, files.error))

        def publish() -> None:
            for _, error in written:
                if error is not None:
                    raise storage_error(error, temporary, needed) from error
            entries = statetree.merged(part[0] for part in written)
            all_values = statetree.merged(part[0] for part in parts)
            Manifest(step, self._ranks.size, torch.__version__, entries, all_values, extra).write(temporary)
            try:
                os.rename(temporary, _path(self.directory, step))
                fsync_directory(self.directory)
            except OSError as error:
                raise storage_error(error, self.directory, needed) from error
            for old in sorted(_steps(self.directory))[: -self.keep]:
                _remove(_path(self.directory, old))

        self._ranks.first(publish)

    # ---- reading ---------------------------------------------------------------------------------

    def restore_newest(self, state: dict[str, Any]) -> Restored | None:
        """Reads the newest intact checkpoint into `state`, in place; None when there is none at all.

        Every file is checked against its sha256 first. When the newest is damaged, the one before it
        is used, and so on; `Restored.skipped` says what was wrong with which file. Damaged ones are
        renamed to `damaged-step-...`, so that they neither count as kept nor stand in the way; a reader
        (`read_only`) leaves them, and when the run removes what it reads, it takes a newer one.
        Tensors keep their memory; values that are no tensors are put in their place in `state`.

        Raises RunFailed when there are checkpoints but none is intact, UserError when the intact one
        does not fit `state`.
        """
        self.wait()
        while True:
            steps = self._ranks.first(lambda: sorted(_steps(self.directory), reverse=True))
            try:
                return self._restore_one_of(steps, state)
            except (RunFailed, UserError):
                if not self._ranks.first(partial(self._overtaken, steps)):
                    raise

    def _restore_one_of(self, steps: list[int], state: dict[str, Any]) -> Restored | None:
        """`restore_newest` of these steps, newest first. Raises RunFailed when none is intact."""
        damage: dict[int, str] = {}
        for step in steps:
            path = _path(self.directory, step)
            try:
                manifest = self._verified(path)
            except Damaged as found:
                damage[step] = f"checkpoint {path.name} is damaged: {found}"
                continue
            self._load(path, manifest, state)
            names = [] if self.read_only else self._ranks.first(partial(self._set_aside, list(damage)))
            kept = [f"kept as {name}, " for name in names] or [""] * len(damage)
            skipped = [f"{what}; {how}using {path.name}" for what, how in zip(damage.values(), kept, strict=True)]
            self._newest, self._unclaimed = step, False
            return Restored(step, dict(manifest.extra), path, skipped)
        if damage:
            advice = "" if self.read_only else ", start anew in another --out"
            raise RunFailed(f"{self.directory}: no checkpoint is intact{advice}: {'; '.join(damage.values())}")
        return None

    def _overtaken(self, steps: list[int]) -> bool:
        """Whether the run that a reader reads from has removed one of `steps`, so that there are newer ones."""
        return self.read_only and not set(steps) <= set(_steps(self.directory))

    def _verified(self, path: Path) -> Manifest:
        """The manifest, when all ranks together find every file as it says. Raises Damaged on all ranks."""
        manifest = self._ranks.first(partial(manifests.read, path))
        mine = sorted(manifest.files.items())[self._ranks.rank :: self._ranks.size]
        parts = self._ranks.gather(manifests.problems(path, mine))

        def judge() -> None:
            if found := [message for part in parts for message in part]:
                raise Damaged(found[0] + _more(found))

        self._ranks.first(judge)
        return manifest

    def _set_aside(self, steps: list[int]) -> list[str]:
        """Renames damaged checkpoints; their new names."""
        names = []
        for step in steps:
            name = f"damaged-{_path(self.directory, step).name}"
            target, count = self.directory / name, 1
            while target.exists():
                count += 1
                target = self.directory / f"{name}-{count}"
            try:
                os.rename(_path(self.directory, step), target)
                fsync_directory(self.directory)
            except OSError as error:
                raise storage_error(error, target) from error
            names.append(target.name)
        return names

    def _load(self, path: Path, manifest: Manifest, state: dict[str, Any]) -> None:
        tensors, values = statetree.split(state)
        mine = statetree.leaves(tensors)
        reader = FileSystemReader(path)
        stored: dict[str, Any] = {}
        try:
            stored = reader.read_metadata().state_dict_metadata
            misfits = statetree.misfits(mine, values, stored, manifest.values)
        except Exception as error:  # a pickle of another torch version fails in any way
            misfits = [f"torch {torch.__version__} cannot read what torch {manifest.torch_version} wrote ({error})"]
        parts = self._ranks.gather((misfits, [*mine, *values]))

        def judge() -> None:
            found = [misfit for part in parts for misfit in part[0]]
            wanted = {key for part in parts for key in part[1]}
            for key in [*stored, *manifest.values]:  # a state may leave out whole top-level parts, but no single key
                if key not in wanted and key.partition(".")[0] in state:
                    found.append(f"it has {key}, which this configuration has not")
            if found:
                raise UserError(
                    f"checkpoint {path} does not fit: {found[0]}{_more(found)}; resume with the configuration that "
                    "wrote it, or give another --out"
                )

        self._ranks.first(judge)
        try:
            dcp_load(tensors, storage_reader=reader, process_group=self._ranks.group)
        except CheckpointException as error:
            raise RunFailed(f"checkpoint {path} could not be read: {one_line(error)}") from error
        statetree.put_values(state, manifest.values)


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def _steps(directory: Path) -> list[int]:
    """Steps of which `directory` has a checkpoint, whole or not; none when there is no directory."""
    names = (_NAME.fullmatch(entry.name) for entry in directory.iterdir()) if directory.is_dir() else ()
    return [int(name.group(1)) for name in names if name]


def _remove(path: Path) -> None:
    """Removes a checkpoint's directory; a kill meanwhile leaves a name that is removed at the next start."""
    hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.tmp")
    try:
        if hidden != path:
            os.rename(path, hidden)
        if hidden.exists():
            shutil.rmtree(hidden)
    except OSError as error:
        raise storage_error(error, path) from error


def _more(found: list[str]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""
