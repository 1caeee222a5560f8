"""Files whole or not at all: atomic replacement, JSON lines with offsets, clear errors."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from timetrial.errors import RunFailed, UserError
from timetrial.train import durable
from timetrial.train.durable import DirectoryLock, JsonLines, storage_error, writable_directory, write_atomic


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "config.json"
    write_atomic(target, "old\n")
    write_atomic(target, b"\x00new\xff")
    assert target.read_bytes() == b"\x00new\xff"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_write_atomic_syncs_file_then_renames_then_syncs_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        real_fsync(fd)

    def replace(source: Path, target: Path) -> None:
        events.append(("rename", target.name))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_atomic(tmp_path / "a", "text")
    assert events == [("fsync", ".a.tmp"), ("rename", "a"), ("fsync", tmp_path.name)]


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, RunFailed, ["disk full", "bytes are needed", "bytes are free"]),
        (errno.EDQUOT, RunFailed, ["quota", "bytes are free"]),
        (errno.EFBIG, RunFailed, ["ulimit -f"]),
        (errno.EIO, RunFailed, ["Input/output error", "check the disk"]),
        (errno.EROFS, UserError, ["Read-only file system", "--out"]),
        (errno.EACCES, UserError, ["Permission denied", "--out"]),
    ],
)
def test_failed_write_keeps_the_old_file_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], words: list[str]
) -> None:
    target = tmp_path / "result.json"
    write_atomic(target, "old")

    def broken(fd: int, data: bytes) -> None:
        os.write(fd, bytes(data)[:3])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable, "write_all", broken)
    with pytest.raises(kind) as caught:
        write_atomic(target, "something new")
    message = str(caught.value)
    assert "\n" not in message
    assert str(target) in message
    assert all(word in message for word in words), message
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_storage_error_counts_free_bytes_of_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    message = str(storage_error(OSError(errno.ENOSPC, "No space"), tmp_path / "a" / "b", needed=12_345))
    stats = os.statvfs(tmp_path)
    free = int(message.split("needed and ")[1].split(" bytes are free")[0].replace(",", ""))
    assert "12,345 bytes are needed" in message
    assert abs(free - stats.f_bavail * stats.f_frsize) < 1 << 30  # others write meanwhile


def test_a_file_in_place_of_the_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    for wrong in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(UserError, match="cannot write there") as caught:
            writable_directory(wrong)
        assert str(wrong) in str(caught.value)
    with pytest.raises(UserError, match="cannot write there"):
        write_atomic(tmp_path / "run" / "a", "text")
    with pytest.raises(UserError, match="cannot write there"):
        JsonLines(tmp_path / "missing" / "metrics.jsonl")


def test_writable_directory_makes_parents_and_leaves_nothing(tmp_path: Path) -> None:
    made = writable_directory(tmp_path / "a" / "b")
    assert made.is_dir()
    assert list(made.iterdir()) == []


def test_lines_are_in_the_file_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 0.1 + 0.2, "phases": {"data": 1e-300}}, {"step": 2, "loss": None, "text": "Ä\n"}]
    with JsonLines(path) as lines:
        for row in rows:
            lines.append(row)
        assert [json.loads(text) for text in path.read_text().splitlines()] == rows
        assert lines.offset() == path.stat().st_size


def test_numbers_unknown_to_json_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.append({"loss": float("nan"), "norms": [float("inf"), 1.0], "phases": {"data": float("-inf")}})
    assert json.loads(path.read_text()) == {"loss": None, "norms": [None, 1.0], "phases": {"data": None}}


def test_resume_cuts_back_to_the_offset_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.append({"step": 1})
        kept = lines.offset()
        lines.append({"step": 2, "by": "the killed run"})
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')
    with JsonLines(path, offset=kept) as lines:
        lines.append({"step": 2})
    assert [json.loads(text) for text in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("tail", [b"", b'{"st', b"x" * 200_000])
def test_a_torn_last_line_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    with JsonLines(path) as lines:
        assert lines.offset() == 24
        lines.append({"step": 3})
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 2, 3]


def test_a_file_with_one_torn_line_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1')
    with JsonLines(path) as lines:
        assert lines.offset() == 0
    assert path.read_bytes() == b""


@pytest.mark.parametrize(("offset", "words"), [(100, "has 24 bytes, but 100"), (5, "no line end at byte 5")])
def test_an_offset_that_does_not_fit_is_refused_and_nothing_is_cut(tmp_path: Path, offset: int, words: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    with pytest.raises(RunFailed, match=words):
        JsonLines(path, offset=offset)
    assert path.stat().st_size == 24


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    """A real limit, met in the middle of a line."""
    program = """
import resource, sys
from pathlib import Path
from timetrial.errors import RunFailed
from timetrial.train.durable import JsonLines
lines = JsonLines(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for step in range(100):
        lines.append({"step": step, "text": "x" * 70})
except RunFailed as error:
    print(error)
    sys.exit(1)
"""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert str(path) in done.stdout
    assert "ulimit -f" in done.stdout
    content = path.read_text()
    assert content.endswith("\n")
    assert 900 < len(content) <= 1000
    assert [json.loads(text)["step"] for text in content.splitlines()] == list(range(len(content.splitlines())))


def test_a_directory_belongs_to_one_process(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from timetrial.train.durable import DirectoryLock
from timetrial.errors import UserError
try:
    DirectoryLock(Path(sys.argv[1]))
except UserError as error:
    print(error)
else:
    print("free")
"""

    def other() -> str:
        return subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True).stdout

    lock = DirectoryLock(tmp_path)
    assert f"another run (process {os.getpid()}) is using it" in other()
    lock.release()
    assert other() == "free\n"
