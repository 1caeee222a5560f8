"""The reader on odd logs: the same events as the official reader, a finding for each oddity, never a traceback."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from mlperf_logging.compliance_checker.mlp_parser import parse_file

from score_runs import LOGS, START, line, needs_logs, run_lines, write
from timetrial.results import read as reader
from timetrial.results.read import read
from timetrial.results.records import Finding, Run, RunLog
from timetrial.results.runs import run_of


def raw(path: Path, data: bytes) -> RunLog:
    path.write_bytes(data)
    return read(path)


def same_as_official(log: RunLog) -> None:
    """Events and refusal are the official reader's."""
    theirs, failed = parse_file(str(log.path), ruleset="5.1.0")
    assert [(e.key, e.time_ms, e.value, e.metadata) for e in log.events] == [
        (e.key, e.timestamp, e.value["value"], e.value["metadata"]) for e in theirs
    ]
    assert bool(failed) == any(found.level == "fail" for found in log.findings)


def rules(log: RunLog | Run) -> dict[str, Finding]:
    return {found.rule: found for found in log.findings}


@needs_logs
def test_published_logs_are_read_as_the_official_reader_does() -> None:
    for path in sorted(LOGS.rglob("result_[05].txt")):
        log = read(path)
        same_as_official(log)
        assert log.bytes == path.stat().st_size
        assert log.lines == len(path.read_bytes().splitlines())


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_line_ends_and_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, chunk: int) -> None:
    monkeypatch.setattr(reader, "CHUNK", chunk)
    lines = run_lines()
    log = raw(tmp_path / "result_0.txt", end.join(lines).encode())
    same_as_official(log)
    assert len(log.events) == len(lines)
    assert log.findings == ()
    assert [event.line for event in log.events] == ([1] * 9 if end == "\r" else list(range(1, 10)))


def test_foreign_lines_prefixes_and_progress_bars(tmp_path: Path) -> None:
    lines = run_lines()
    lines[2:2] = ["Epoch 1: 3%|#   | 1/30\rEpoch 1: 6%|##  | 2/30", "", "plain text", "::MLLOG {}"]
    lines[6] = "0: " + lines[6]
    lines[7] = "\x1b[32m[rank0]\x1b[0m " + lines[7]
    lines[8] = "50%|## |\r" + lines[8] + "\r60%|###|"
    log = raw(tmp_path / "result_0.txt", "\n".join(lines).encode())
    same_as_official(log)
    found = rules(log)
    assert found["reader.foreign"].found == "4 lines are no events"
    assert found["reader.prefix"].found == "text before :::MLLOG (2 times, first here)"
    assert found["reader.prefix"].line == 7
    assert run_of(log).converged


def test_interleaved_ranks(tmp_path: Path) -> None:
    """Each rank logs all; the official summarizer takes the last run_start before the first run_stop."""
    ranks = [run_lines(60.0, offset=100 * rank) for rank in range(8)]
    lines = [rank[i] for i in range(len(ranks[0])) for rank in ranks]
    log = raw(tmp_path / "result_0.txt", "\n".join(lines).encode())
    same_as_official(log)
    run = run_of(log)
    assert run.converged
    assert run.time_min == pytest.approx(60 - 700 / 60_000)
    assert rules(run)["run.several"].level == "warn"
    assert "run_start 8 times" in rules(run)["run.several"].found or "run_stop" in rules(run)["run.several"].found
    assert run.samples == 24576
    disagreeing = [text.replace("success", "aborted") if i % 8 == 5 else text for i, text in enumerate(lines)]
    assert not run_of(raw(tmp_path / "result_1.txt", "\n".join(disagreeing).encode())).converged


def test_broken_lines_make_a_run_not_count(tmp_path: Path) -> None:
    lines = run_lines()
    for i, text in enumerate(
        [
            lines[3][:-20],
            ":::MLLOG ",
            ":::MLLOG {}",
            ":::MLLOG []",
            ":::MLLOG 1",
            ':::MLLOG {"time_ms": "x", "key": "a", "value": 1, "metadata": {}}',
            ':::MLLOG {"time_ms": null, "key": "a", "value": 1, "metadata": {}}',
            ':::MLLOG {"time_ms": NaN, "key": "a", "value": 1, "metadata": {}}',
            ':::MLLOG {"time_ms": 1e400, "key": "a", "value": 1, "metadata": {}}',
            ':::MLLOG {"time_ms": 1, "key": "a", "metadata": {}}',
            ":::MLLOG " + "[" * 100_000,
            ':::MLLOG {"time_ms": ' + "9" * 5000 + "}",
        ]
    ):
        log = raw(tmp_path / f"result_{i}.txt", "\n".join([*lines[:3], text, *lines[3:]]).encode())
        run = run_of(log)
        assert run.broken, text[:80]
        assert not run.converged
        assert run.time_min == pytest.approx(60.0)
        worst = [found for found in log.findings if found.level == "fail"]
        assert worst[0].line == 4
        assert worst[0].rule == "reader.broken"


def test_two_events_in_one_line(tmp_path: Path) -> None:
    """Torn writes of two ranks: the official reader takes the last of the line, and so does this, and says so."""
    lines = run_lines()
    log = raw(tmp_path / "result_0.txt", "\n".join([*lines[:3], lines[3][:30] + lines[4], *lines[5:]]).encode())
    same_as_official(log)
    assert len(log.events) == 8
    assert (rules(log)["reader.merged"].level, rules(log)["reader.merged"].line) == ("warn", 4)


@pytest.mark.parametrize("blank", [b" ", b"\t", b"\x0b", b"\x0c", b"\x1c", b"\x85", b"\xa0", b"\xc2\xa0"])
def test_blanks_around_an_event(tmp_path: Path, blank: bytes) -> None:
    """Found by the fuzzer: behind the object any blank of latin-1 is taken off, before it those of JSON alone."""
    lines = [text.encode() for text in run_lines()]
    same_as_official(raw(tmp_path / "result_0.txt", b"\n".join([*lines[:3], lines[3] + blank, *lines[4:]])))
    before = lines[3].replace(b":::MLLOG ", b":::MLLOG " + blank)
    same_as_official(raw(tmp_path / "result_1.txt", b"\n".join([*lines[:3], before, *lines[4:]])))


def test_truncated_tail(tmp_path: Path) -> None:
    text = "\n".join(run_lines()).encode()
    log = raw(tmp_path / "result_0.txt", text[:-30])
    run = run_of(log)
    assert rules(log)["reader.truncated"].line == 9
    assert (run.converged, run.status, run.time_min) == (False, "no run_stop", None)
    whole = raw(tmp_path / "result_1.txt", text)  # no line end at the end is no harm
    assert run_of(whole).converged


def test_clock(tmp_path: Path) -> None:
    lines = run_lines()
    back = [*lines[:8], line("eval_accuracy", 3.2, -5000, samples_count=36864), lines[8]]
    log = raw(tmp_path / "result_0.txt", "\n".join(back).encode())
    assert "runs backwards, by up to" in rules(log)["reader.clock"].found
    assert run_of(log).converged  # late evaluations are logged so
    wrong = run_of(
        raw(tmp_path / "result_1.txt", "\n".join([*lines[:8], lines[8].replace(str(START)[:4], "1750")]).encode())
    )
    assert (wrong.converged, wrong.time_min, wrong.status) == (False, None, "clock ran backwards")
    assert rules(wrong)["run.clock"].line == 9
    swapped = run_of(raw(tmp_path / "result_2.txt", "\n".join([lines[8], *lines[:8]]).encode()))
    assert rules(swapped)["run.order"].level == "fail"


def test_duplicate_keys_with_other_values(tmp_path: Path) -> None:
    lines = run_lines()
    log = raw(tmp_path / "result_0.txt", "\n".join([*lines[:5], line("global_batch_size", 64), *lines[5:]]).encode())
    run = run_of(log)
    assert run.gbs == 64  # as the official convergence checker: the last
    assert rules(run)["run.values"].level == "fail"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16(tmp_path: Path, encoding: str) -> None:
    log = raw(tmp_path / "result_0.txt", "\n".join(run_lines()).encode(encoding))
    assert rules(log)["reader.encoding"].level == "fail"
    assert not log.events
    assert run_of(log).status == "unreadable"


def test_latin1_byte_order_mark_and_nul(tmp_path: Path) -> None:
    lines = [line("submission_org", "X").replace('"X"', '"Übung"'), *run_lines()]
    log = raw(tmp_path / "result_0.txt", "\n".join(lines).encode("latin-1"))
    assert log.events[0].value == "Übung"
    assert rules(log)["reader.encoding"].level == "warn"
    marked = raw(tmp_path / "result_1.txt", b"\xef\xbb\xbf" + "\n".join(run_lines()).encode())
    same_as_official(marked)
    assert run_of(marked).converged
    holes = raw(tmp_path / "result_2.txt", "\n".join(run_lines()).encode().replace(b"\n", b"\n" + b"\0" * 512, 1))
    same_as_official(holes)
    assert rules(holes)["reader.nul"].found == "NUL bytes (512 times, first here)"
    surrogate = raw(tmp_path / "result_3.txt", b"\n".join([line("notice", "\udc80").encode("ascii")]))
    assert surrogate.events[0].value.encode() == b"?"


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "reader.empty"),
        (b"\n\n", "reader.no_events"),
        (b"hello\n", "reader.no_events"),
        (b":::MLLOG{}\n", "reader.no_events"),
        (gzip.compress(b"x"), "reader.compressed"),
        (b"PK\x03\x04....", "reader.compressed"),
        (os.urandom(20_000).replace(b":", b"."), "reader.no_events"),
    ],
    ids=["empty", "blank", "foreign", "no_space", "gzip", "zip", "random"],
)
def test_no_log_at_all(tmp_path: Path, data: bytes, rule: str) -> None:
    log = raw(tmp_path / "result_0.txt", data)
    run = run_of(log)
    assert [found.rule for found in log.findings if found.level == "fail"] == [rule]
    assert (run.converged, run.time_min, run.status) == (False, None, "unreadable")


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").mkdir()
    (tmp_path / "result_1.txt").symlink_to("result_1.txt")
    os.mkfifo(tmp_path / "result_2.txt")
    (tmp_path / "result_3.txt").symlink_to("nowhere")
    for i, words in enumerate(["is a directory", "symbolic links", "no regular file", "No such file"]):
        log = read(tmp_path / f"result_{i}.txt")
        assert words in log.findings[0].found
        assert run_of(log).status == "unreadable"


def test_odd_fields_are_told_and_do_not_stop_the_reading(tmp_path: Path) -> None:
    odd = [
        f':::MLLOG {{"time_ms": "{START}", "key": "a", "value": 1, "metadata": {{}}}}',
        f':::MLLOG {{"time_ms": {START}.4, "key": "a", "value": 1, "metadata": null}}',
        f':::MLLOG {{"time_ms": {START}, "key": 7, "value": 1, "metadata": {{}}}}',
        ':::MLLOG {"time_ms": 5, "key": "a", "value": 1, "metadata": {}}',
        line("tracked_stats", {"eval_accuracy": 1.0}),
    ]
    log = raw(tmp_path / "result_0.txt", "\n".join([*run_lines(), *odd]).encode())
    assert {
        "reader.time",
        "reader.metadata",
        "reader.key",
        "reader.event_type",
        "reader.year",
        "reader.confused",
    } <= set(rules(log))
    assert not any(found.level == "fail" for found in log.findings)
    assert run_of(log).converged


def test_a_long_log_keeps_what_the_score_needs(tmp_path: Path) -> None:
    lines = run_lines()
    steps = [line("tracked_stats", {"train_step_time": 0.5 + i}, i, samples_count=i) for i in range(300)]
    log = read(write(tmp_path / "result_0.txt", [*lines[:6], *steps, *lines[6:]]), limit=50)
    assert len(log.events) == 50 + 3
    assert log.thinned == {"tracked_stats": 256}
    assert list(log.step_times)[:2] == [44.5, 45.5]
    assert len(log.step_times) == 256
    assert rules(log)["reader.thinned"].level == "note"
    run = run_of(log)
    assert run.converged
    assert run.samples == 24576
    many = read(write(tmp_path / "result_1.txt", [*lines[:6], *[lines[6]] * 300, *lines[7:]]), limit=50)
    assert not run_of(many).converged  # evaluations were lost: no score
    assert rules(many)["reader.thinned"].level == "fail"


def test_a_line_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK", 1000)
    monkeypatch.setattr(reader, "MAX_LINE", 5000)
    lines = run_lines()
    for junk, level in (("x" * 20_000, "note"), (":::MLLOG " + "x" * 20_000, "fail"), ("x" * 4_000, None)):
        log = raw(tmp_path / "result_0.txt", "\n".join([*lines[:3], junk, *lines[3:], junk, lines[8]]).encode())
        assert len(log.events) == 10
        assert (rules(log)["reader.long"].level if "reader.long" in rules(log) else None) == level


def test_run_stop_without_success(tmp_path: Path) -> None:
    for status, said in (("aborted", "aborted"), ("stopped", "no status"), (None, "no run_stop")):
        run = run_of(raw(tmp_path / "result_0.txt", "\n".join(run_lines(status=status)).encode()))
        assert (run.converged, run.status, run.samples) == (False, said, None)
    lines = [text for text in run_lines() if "run_start" not in text]
    run = run_of(raw(tmp_path / "result_0.txt", "\n".join(lines).encode()))
    assert (run.status, run.time_min) == ("no run_start", None)
