"""What was odd about a log: one finding a kind of oddity, with the first line and the count."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from timetrial.results.records import Finding, Level

PARSER = "mlperf-logging 4.1.68 compliance_checker/mlp_parser/ruleset_500.py"

SAID: dict[str, tuple[str, str, str]] = {
    "foreign": ("event lines alone, or lines without :::MLLOG", f"{PARSER}:66", "nothing: they are skipped"),
    "long": ("lines of reasonable length", "here, read.py: bounded memory", "cut the line out if it is no event"),
    "nul": ("text", f"{PARSER}:59", "look for a crash of the file system while the log was written"),
    "token": ("`:::MLLOG ` with one space", f"{PARSER}:24", "write the space: the official reader skips the line"),
    "merged": (
        "one event a line",
        f"{PARSER}:68",
        "let one rank write, or write whole lines: the official reader takes the last alone",
    ),
    "prefix": (
        "nothing, or any text, before :::MLLOG",
        f"{PARSER}:68",
        "nothing: the official reader drops it too",
    ),
    "truncated": ("a whole last line", "mlperf-logging 4.1.68 mlp_compliance.py:301", "get the whole log"),
    "broken": (
        "one JSON object with time_ms, key, value and metadata",
        "mlperf-logging 4.1.68 mlp_compliance.py:301, result_summarizer.py:136",
        "mend the line: the official reader refuses the whole log",
    ),
    "encoding": ("UTF-8", f"{PARSER}:59 (reads latin-1)", "convert the log to UTF-8"),
    "key": ("a key that is text", f"{PARSER}:48", "write the key's name"),
    "metadata": ("metadata as an object", f"{PARSER}:50", "write {} where there is none"),
    "event_type": (
        "POINT_IN_TIME, INTERVAL_START or INTERVAL_END",
        "mlperf-logging 4.1.68 mllog/constants.py",
        "write it: read as POINT_IN_TIME",
    ),
    "confused": (
        "these words in events of that key alone",
        "mlperf-logging 4.1.68 rcp_checker.py:102-128 (finds keys by substring)",
        "rename the field: the official convergence checker takes this line for such an event",
    ),
    "time": ("milliseconds as a whole number", f"{PARSER}:44", "write an integer: it was rounded"),
    "year": ("milliseconds since 1970", f"{PARSER}:44", "check the clock and the unit"),
    "clock": (
        "times in the order of the lines",
        "none: no official program looks",
        "nothing where ranks or late evaluations are logged together; else check the clock",
    ),
    "thinned": ("a log of reasonable size", "here, read.py: bounded memory", "log these events less often"),
}
"""Oddity -> what is asked, where it stands, what to change."""


@dataclass
class _Seen:
    level: Level
    what: str
    line: int
    count: int = 1


@dataclass
class Oddities:
    """Collects them while a file is read; bounded, however many there are."""

    path: Path
    """The log."""
    seen: dict[tuple[str, Level], _Seen] = field(default_factory=dict)
    """(oddity, level) -> its first occurrence and how many there were."""
    jump_ms: int = 0
    """How far the clock ran backwards at most, milliseconds."""

    def add(self, rule: str, level: Level, what: str, line: int, count: int = 1) -> None:
        known = self.seen.get((rule, level))
        if known:
            known.count += count
        else:
            self.seen[rule, level] = _Seen(level, what, line, count)

    def note(self, rule: str, what: str) -> None:
        """One of the whole file."""
        self.add(rule, "note", what, 0)

    def longest(self, rule: str, jump_ms: int, line: int) -> None:
        """The clock ran back by so much."""
        if jump_ms > self.jump_ms:
            self.jump_ms = jump_ms
        self.add(rule, "note", "", line)

    def findings(self) -> tuple[Finding, ...]:
        made = []
        for (rule, level), seen in self.seen.items():
            asked, source, change = SAID[rule]
            what = seen.what
            if rule == "clock":
                what = f"the clock runs backwards, by up to {self.jump_ms / 1000:.1f} s"
            if seen.count > 1:
                what += f" ({seen.count:,} times, first here)"
            made.append(Finding(level, f"reader.{rule}", what, asked, source, change, self.path, seen.line or None))
        return tuple(made)
