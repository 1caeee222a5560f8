"""Ways to damage a result log, and what must hold of a damaged one: the oracle of the fuzzers.

An operation is a name and three numbers, so that a case is a short list that can be shrunk and printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from mlperf_logging.compliance_checker.mlp_parser import parse_file
from mlperf_logging.result_summarizer import result_summarizer

from score_runs import line, run_lines
from timetrial.results.read import read
from timetrial.results.records import Run
from timetrial.results.runs import run_of

Operation = tuple[str, int, int, int]

NUMBERS = (
    b"0", b"-1", b"1", b"true", b"null", b'"12"', b'"x"', b"NaN", b"-Infinity", b"1e999", b"1e308", b"9" * 400, b"0.5",
    b"1760000000000", b"1760003600000", b"1759999999999", b"1760003599999.5", b'"1760000000000"', b"[]", b"{}", b"2e9",
    b"[" * 600 + b"]" * 600, b"[" * 600 + b'"\\ud800"' + b"]" * 600,
)  # fmt: skip
BYTES = b'\x00\r\n{}[]",:\\\xff\x80 \x85\xa00z'
PIECES = (
    b":::MLLOG ", b":::MLLOG", b"\r", b"\r\n", b"\n", b"\x00" * 9, b"\xef\xbb\xbf", b"0: ", b"\\ud800",
    b'"metadata": 3, ', b'"key": "run_stop", ', b'"key": "run_start", ', b"global_batch_size", b"eval_accuracy",
    b"[" * 3000, b"}\n{",
)  # fmt: skip
WORDS = (
    b"success", b"aborted", b"run_start", b"run_stop", b"eval_accuracy", b"samples_count", b"time_ms", b"metadata",
    b"value", b"key", b"status", b"global_batch_size", b"FID", b"CLIP", b"INTERVAL_END", b"tracked_stats",
)  # fmt: skip


def seeds() -> list[bytes]:
    """Small whole logs to start from."""
    both = [(1_024_000, 95.0, 0.1), (2_048_000, 80.0, 0.17)]
    diffusion = run_lines(15.0, samples=(), benchmark="stable_diffusion", gbs=256)
    for count, fid, clip in both:
        diffusion[-1:-1] = [
            line("eval_accuracy", fid, 10, samples_count=count, metric="FID"),
            line("eval_accuracy", clip, 11, samples_count=count, metric="CLIP"),
        ]
    steps = run_lines(30.0)
    steps[6:6] = [line("tracked_stats", {"train_step_time": 1.5}, i) for i in range(4)]
    ranks = [run_lines(60.0, offset=100 * rank) for rank in range(3)]
    return [
        "\n".join(lines).encode() + b"\n"
        for lines in (
            run_lines(),
            diffusion,
            steps,
            run_lines(300.0, (0.7, 0.75), "dlrm_dcnv2", 55296, position="epoch_num"),
            [rank[i] for i in range(9) for rank in ranks],
            run_lines(status="aborted"),
        )
    ]


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def _flip(data: bytes, a: int, b: int, c: int) -> bytes:
    i = a % max(1, len(data))
    return data[:i] + bytes([data[i] ^ (1 << b % 8)]) + data[i + 1 :] if data else data


def _byte(data: bytes, a: int, b: int, c: int) -> bytes:
    i = a % (len(data) + 1)
    return data[:i] + BYTES[b % len(BYTES) :][:1] + data[i + c % 2 :]


def _piece(data: bytes, a: int, b: int, c: int) -> bytes:
    i = a % (len(data) + 1)
    return data[:i] + PIECES[b % len(PIECES)] + data[i:]


def _at_line_start(data: bytes, a: int, b: int, c: int) -> bytes:
    lines = _lines(data)
    i = a % (len(lines) + 1)
    return b"".join([*lines[:i], PIECES[b % len(PIECES)], *lines[i:]])


def _cut(data: bytes, a: int, b: int, c: int) -> bytes:
    i = a % (len(data) + 1)
    return data[:i] if c % 2 else data[:i] + data[i + b % 40 :]


def _drop(data: bytes, a: int, b: int, c: int) -> bytes:
    lines = _lines(data)
    i = a % max(1, len(lines))
    return b"".join([*lines[:i], *lines[i + 1 :]])


def _double(data: bytes, a: int, b: int, c: int) -> bytes:
    lines = _lines(data)
    i, j = a % max(1, len(lines)), b % (len(lines) + 1)
    return b"".join([*lines[:j], *lines[i : i + 1], *lines[j:]])


def _move(data: bytes, a: int, b: int, c: int) -> bytes:
    lines = _lines(data)
    if not lines:
        return data
    taken = lines.pop(a % len(lines))
    lines.insert(b % (len(lines) + 1), taken)
    return b"".join(lines)


def _join(data: bytes, a: int, b: int, c: int) -> bytes:
    ends = [i for i, byte in enumerate(data) if byte == 10]
    i = ends[a % len(ends)] if ends else 0
    return data[:i] + data[i + 1 :]


def _number(data: bytes, a: int, b: int, c: int) -> bytes:
    found = list(re.finditer(rb"-?\d+(\.\d+)?", data))
    if not found:
        return data
    match = found[a % len(found)]
    return data[: match.start()] + NUMBERS[b % len(NUMBERS)] + data[match.end() :]


def _nudge(data: bytes, a: int, b: int, c: int) -> bytes:
    found = list(re.finditer(rb"\d{2,15}", data))
    if not found:
        return data
    match = found[a % len(found)]
    return data[: match.start()] + str(max(0, int(match[0]) + (b - 128) * 10 ** (c % 7))).encode() + data[match.end() :]


def _word(data: bytes, a: int, b: int, c: int) -> bytes:
    old = WORDS[a % len(WORDS)]
    places = [match.start() for match in re.finditer(re.escape(old), data)]
    if not places:
        return data
    i = places[b % len(places)]
    return data[:i] + WORDS[c % len(WORDS)] + data[i + len(old) :]


def _encoding(data: bytes, a: int, b: int, c: int) -> bytes:
    text = data.decode("latin-1")
    return text.encode(("utf-16", "utf-16-le", "utf-8", "utf-7")[a % 4])


def _ends(data: bytes, a: int, b: int, c: int) -> bytes:
    return data.replace(b"\n", (b"\r\n", b"\r", b"\n\n", b"")[a % 4])


OPERATIONS: dict[str, Callable[[bytes, int, int, int], bytes]] = {
    **{"flip": _flip, "byte": _byte, "piece": _piece, "start": _at_line_start, "cut": _cut, "drop": _drop},
    **{"double": _double, "move": _move, "join": _join, "number": _number, "nudge": _nudge, "word": _word},
    **{"encoding": _encoding, "ends": _ends},
}
RARE = ("encoding", "ends")


def apply(data: bytes, operations: Sequence[Operation]) -> bytes:
    for name, a, b, c in operations:
        data = OPERATIONS[name](data, a, b, c)
    return data


def some(dice: random.Random) -> list[Operation]:
    """A few operations at random."""
    names = [name for name in OPERATIONS if name not in RARE or dice.random() < 0.1]
    count = dice.choice((1, 1, 2, 3, 5))
    return [
        (dice.choice(names), dice.randrange(1 << 16), dice.randrange(256), dice.randrange(256)) for _ in range(count)
    ]


class Place:
    """One log that is written again and again; in memory where the system can."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "result_0.txt"
        if hasattr(os, "memfd_create"):
            self.path = Path(f"/proc/self/fd/{os.memfd_create('log')}")
        else:
            self.path.touch()

    def write(self, data: bytes) -> Path:
        with self.path.open("r+b") as file:
            file.write(data)
            file.truncate()
        return self.path


def official_minutes(path: Path) -> float | None:
    """What the official summarizer's reading makes of a log; None where it refuses it or ends in a traceback."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            events, failed = parse_file(str(path), ruleset="5.1.0")
            if failed:
                return None
            start, stop = result_summarizer._query_run_start_stop(events)
    except Exception:
        return None
    return float((stop - start) / 60 / 1000)


def oddity(path: Path) -> tuple[str | None, Run]:
    """What is wrong with our reading of a log (None: nothing), and the run.

    A run that counts has the very time that the official reading gives (but for a time that was no whole number, which
    is told); one that does not has a finding of level fail or warn that says why; what the official reader refuses
    never counts and has a finding of level fail.
    """
    run = run_of(read(path))
    told = [found for found in run.findings if found.level != "note"]
    for found in run.findings:
        if not (found.found and found.asked and found.source and found.change):
            return f"a finding without words: {found}", run
        f"{found.found} {found.change}".encode()  # can be written
    expected = official_minutes(path)
    if run.converged and (run.time_min is None or run.time_min <= 0):
        return f"counts with {run.time_min} minutes", run
    rounded = any(found.rule == "reader.time" for found in told)
    if expected is None and (run.converged or not any(found.level == "fail" for found in told)):
        return f"the official reader refuses it; here it counts: {run.converged}", run
    if run.converged and expected is not None and run.time_min != expected:
        off = abs((run.time_min or 0) - expected) * 60_000
        if not rounded or off > 1:
            return f"{run.time_min} minutes, officially {expected}", run
    if not run.converged and not told:
        return "does not count, without a finding", run
    return None, run
