"""Read one result log: a stream of bytes to events, in bounded memory, never a traceback.

Which lines are events is what the official reader says (mlperf-logging 4.1.68, compliance_checker/mlp_parser/
ruleset_500.py:24 and 56-93, the same in every round): the text after the last `:::MLLOG ` of a line, read as latin-1
with any of LF, CR, CRLF as line end. One event line that it cannot parse makes it refuse the whole log
(result_summarizer.py:122-138, mlp_compliance.py:301); here such a line is a finding of level `fail`, and the run does
not count (`runs.py`). Where this reader is more tolerant: it names the line, goes on behind it, and gives a finding
where the official one ends in a traceback (no `value`, no `metadata`, an object that is none, a directory).

A log may have any size. Up to `limit` events are kept; behind it those of keys that no score needs are counted
(`RunLog.thinned`) and of `tracked_stats` the step times alone are kept.
"""

from __future__ import annotations

import json
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from timetrial.results.odd import Oddities
from timetrial.results.records import Finding, LogEvent, RunLog

TOKEN = b":::MLLOG "
MARK = TOKEN.rstrip()
SPACE = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0"
"""What str.strip() takes off the end of a line that was decoded as latin-1."""
BLANK = b" \t\n\r"
"""What JSON allows before a value."""
CHUNK = 1 << 20
"""Bytes read at a time."""
MAX_LINE = 16 << 20
"""Longest line, bytes; a longer one is skipped and told."""
MAX_KEYS = 1000
"""Keys of events not kept that are counted each for itself."""
LIMIT = 100_000
"""Events kept unless told otherwise; some 80 MB."""
SCORED = frozenset(
    (
        *("run_start", "run_stop", "init_start", "init_stop", "eval_accuracy", "eval_error", "global_batch_size"),
        *("train_samples", "seed", "submission_benchmark", "submission_division", "submission_org"),
        *("submission_platform", "submission_status"),
    )
)
"""Keys kept up to twice the limit: scores and rules hang on them."""
KINDS: dict[Any, Literal["point", "start", "end"]] = {
    "POINT_IN_TIME": "point",
    "INTERVAL_START": "start",
    "INTERVAL_END": "end",
}
CONFUSED = ("global_batch_size", "submission_benchmark", "eval_accuracy", "eval_error")
"""The official convergence checker takes any line with these words for an event of that key
(rcp_checker.py:102-128)."""
LATEST_MS = 4_102_444_800_000
"""The year 2100."""
EARLIEST_MS = 1_262_304_000_000
"""The year 2010."""

MAGIC = (
    (b"\x1f\x8b", "gzip", "gunzip it"),
    (b"PK\x03\x04", "zip", "unzip it"),
    (b"BZh", "bzip2", "bunzip2 it"),
    (b"\xfd7zXZ\x00", "xz", "unxz it"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd it"),
)
UTF16 = (b":\x00:\x00:\x00", b"\x00:\x00:\x00:")


def read(path: Path, limit: int | None = None) -> RunLog:
    """The events of one log in file order, and findings on what was odd about the file.

    `limit` is how many events are kept (100,000). Raises nothing for a bad file: what cannot be opened, is no file
    or holds no events has a finding of level `fail` and no events.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "a directory" if path.is_dir() else "no regular file"
            return _unread(path, "reader.no_file", f"{path.name} is {kind}", "a text file", "put the log in its place")
        with path.open("rb") as file:
            return _Reader(path, LIMIT if limit is None else limit).run(file)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return _unread(path, "reader.unreadable", reason, "a readable log", "check that it exists and may be read")


def is_log(path: Path) -> bool:
    """Whether the first megabyte of a regular file has an event line."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return TOKEN in file.read(CHUNK)
    except OSError:
        return False


def _unread(path: Path, rule: str, found: str, asked: str, change: str, size: int = 0) -> RunLog:
    source = "mlperf-logging 4.1.68 result_summarizer.py:122-138"
    return RunLog(path, (), (Finding("fail", rule, found, asked, source, change, path),), 0, size)


class _Reader:
    """The state of reading one file."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.events: list[LogEvent] = []
        self.odd = Oddities(path)
        self.line = 1
        """Number of the line at the start of what is read next."""
        self.bytes = 0
        self.event_lines = 0
        self.latest = 0
        self.thinned: dict[str, int] = {}
        self.step_times = array("d")
        self.names: dict[str, str] = {}
        """One copy of each source file's name."""

    def run(self, file: BinaryIO) -> RunLog:
        head = file.read(4096)
        for magic, name, change in MAGIC:
            if head.startswith(magic):
                found = f"{name} data"
                return _unread(self.path, "reader.compressed", found, "plain text", change, self._size(file))
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) or any(mark in head for mark in UTF16):
            change = "convert it, e.g. iconv -f UTF-16 -t UTF-8"
            return _unread(
                self.path, "reader.encoding", "UTF-16 text", "one byte a character", change, self._size(file)
            )
        file.seek(0)
        ended = True
        for block, whole in self._blocks(file):
            self._block(block, whole)
            ended = whole
        if not self.bytes:
            return _unread(self.path, "reader.empty", "an empty file", "a log with events", "run it again")
        if not self.event_lines:
            change = "give the log of the run's first rank"
            return _unread(self.path, "reader.no_events", "no :::MLLOG line", "event lines", change, self.bytes)
        lines = self.line if not ended else self.line - 1
        foreign = lines - self.event_lines
        if foreign > 0:
            self.odd.note("foreign", f"{foreign} lines are no events")
        for key, count in self.thinned.items():
            level: Literal["fail", "note"] = "fail" if key in SCORED else "note"
            self.odd.add("thinned", level, f"{count} events of {_name(key)} behind event {self.limit} not kept", 0)
        return RunLog(
            self.path,
            tuple(self.events),
            self.odd.findings(),
            lines,
            self.bytes,
            self.thinned,
            self.step_times,
        )

    @staticmethod
    def _size(file: BinaryIO) -> int:
        return file.seek(0, 2)

    def _blocks(self, file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
        """Whole lines, as many as a chunk has, and whether they end in a line end; the last may not."""
        rest = b""
        skipping = False
        while chunk := file.read(CHUNK):
            self.bytes += len(chunk)
            data = rest + chunk if rest else chunk
            cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if skipping:  # behind the head of a line that is too long
                if not cut:
                    continue
                start = min(i for i in (data.find(b"\n"), data.find(b"\r")) if i >= 0)
                data, cut, skipping = data[start:], cut - start, False
            if cut:
                yield data[:cut], True
            rest = data[cut:]
            if len(rest) > MAX_LINE:
                level: Literal["fail", "note"] = "fail" if MARK in rest else "note"
                self.odd.add("long", level, f"a line longer than {MAX_LINE >> 20} MiB", self.line)
                rest, skipping = b"", True
        if rest:
            yield rest, False

    def _block(self, block: bytes, whole: bool) -> None:
        nul = block.count(b"\x00")
        if nul:
            first = self.line + block.count(b"\n", 0, block.find(b"\x00"))
            self.odd.add("nul", "warn", "NUL bytes", first, nul)
        counted, position = 0, block.find(MARK)
        while position >= 0:
            end = block.find(b"\n", position)
            end = len(block) if end < 0 else end
            stop = block.find(b"\r", position, end)
            stop = end if stop < 0 else stop
            self.line += block.count(b"\n", counted, position)
            counted = position
            start = block.rfind(TOKEN, position, stop)
            if start < 0:
                self.odd.add("token", "warn", ":::MLLOG without the space behind it", self.line)
            else:
                self.event_lines += 1
                if start > position and block.count(TOKEN, position, stop) > 1:
                    self.odd.add("merged", "warn", "two events in one line; the first is lost", self.line)
                elif position and block[position - 1] not in b"\r\n":
                    self.odd.add("prefix", "note", "text before :::MLLOG", self.line)
                payload = block[start + len(TOKEN) : stop].rstrip(SPACE).lstrip(BLANK)
                if not self._event(payload):
                    cut_off = not whole and stop == len(block)
                    rule, what = ("truncated", "the last line is cut off") if cut_off else ("broken", _excerpt(payload))
                    self.odd.add(rule, "fail", what, self.line)
            position = block.find(MARK, stop)
        self.line += block.count(b"\n", counted)

    def _event(self, payload: bytes) -> bool:
        """Keep one event; False where the line is none by the official reader."""
        try:
            text = payload.decode()
        except UnicodeDecodeError:
            text = payload.decode("latin-1")
            self.odd.add("encoding", "warn", "bytes that are no UTF-8, read as latin-1", self.line)
        try:
            fields, end = _scan(text)
            time, key, value, metadata = fields["time_ms"], fields["key"], fields["value"], fields["metadata"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        if end != len(text):
            return False
        if "\\u" in text:
            try:
                key, value, metadata = _printable(key), _printable(value), _printable(metadata)
            except RecursionError:
                return False
        if type(time) is not int or not EARLIEST_MS < time < LATEST_MS:
            time = self._time(time)
            if time is None:
                return False
        if not isinstance(key, str):
            self.odd.add("key", "warn", f"a key that is no text: {_excerpt(repr(key).encode())}", self.line)
            return True
        if not isinstance(metadata, dict):
            self.odd.add(
                "metadata", "fail" if key in SCORED else "warn", f"{_name(key)}: metadata is no object", self.line
            )
            metadata = {}
        try:
            kind = KINDS[fields["event_type"]]
        except (KeyError, TypeError):
            self.odd.add("event_type", "note", f"{_name(key)}: no known event_type", self.line)
            kind = "point"
        if CONFUSED[0] in text or CONFUSED[1] in text or CONFUSED[2] in text or CONFUSED[3] in text:
            for word in CONFUSED:
                if word in text and key != word:
                    self.odd.add("confused", "warn", f"{_name(key)}: the line names {word}", self.line)
        if time > self.latest:
            self.latest = time
        elif time < self.latest - 100:
            self.odd.longest("clock", self.latest - time, self.line)
        if len(self.events) >= self.limit and (key not in SCORED or len(self.events) >= 2 * self.limit):
            self._thin(key, value)
            return True
        name = metadata.get("file")
        if type(name) is str:
            metadata["file"] = self.names.setdefault(name, name)
        self.events.append(LogEvent(time, kind, self.names.setdefault(key, key), value, metadata, self.line))
        return True

    def _thin(self, key: str, value: Any) -> None:
        if key not in self.thinned and len(self.thinned) >= MAX_KEYS:
            key = "other keys"
        self.thinned[key] = self.thinned.get(key, 0) + 1
        if key == "tracked_stats" and isinstance(value, dict):
            step = value.get("train_step_time")
            if isinstance(step, float):
                self.step_times.append(step)

    def _time(self, time: Any) -> int | None:
        """Milliseconds, or None where there is no telling."""
        if type(time) is not int:
            if isinstance(time, bool) or not isinstance(time, (float, str)):
                return None
            try:
                exact = float(time)
                rounded = round(exact)
            except (ValueError, OverflowError):
                return None
            self.odd.add("time", "warn", f"time_ms is {_excerpt(repr(time).encode())}, no whole number", self.line)
            time = rounded
        if not EARLIEST_MS < time < LATEST_MS:
            if abs(time) > 1 << 53:
                return None
            self.odd.add("year", "warn", f"time_ms {time} lies outside of 2010 to 2100", self.line)
        return int(time)


_scan = json.JSONDecoder().raw_decode
"""One JSON value of a text and where it ends; without the search for blanks, which are off already."""


def _excerpt(text: bytes, most: int = 60) -> str:
    """A few characters that any terminal can show."""
    shown = "".join(c if c.isprintable() else "." for c in text[:most].decode("ascii", "replace").replace("�", "?"))
    return shown + ("..." if len(text) > most else "") or "nothing behind :::MLLOG"


def _name(key: str) -> str:
    return _excerpt(key.encode("utf-8", "replace"), 40)


def _printable(value: Any) -> Any:
    """The same without halves of surrogate pairs, which no encoding can write."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value
