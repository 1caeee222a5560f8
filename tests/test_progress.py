"""The line that tells how far a piece of work is."""

from __future__ import annotations

import io
import time

from timetrial import progress
from timetrial.progress import Watch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_line_tells_how_far_how_fast_and_how_long() -> None:
    clock = Clock()
    watch = Watch(io.StringIO(), "searching", clock)
    clock.now += 3
    assert watch.line() == "searching: 3 s"
    watch(0, 40, "groups")
    clock.now += 4
    assert watch.line() == "groups: 0 of 40, 4 s"
    watch(8, 40, "groups")
    assert watch.line() == "groups: 8 of 40, 4 s, 2/s, about 16 s left"
    watch(1, 20, "plans")
    clock.now += 1
    assert watch.line() == "plans: 1 of 20, 1 s, 1/s, about 19 s left", "another phase has a rate of its own"


def test_a_terminal_sees_it_before_anything_is_done(monkeypatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    terminal = Terminal()
    with Watch(terminal, "searching"):
        assert "searching: 0 s" in terminal.getvalue()
        for _ in range(200):
            if terminal.getvalue().count("\r") > 2:
                break
            time.sleep(0.01)
        assert terminal.getvalue().count("\r") > 2, "painted again, though nothing was reported"
    assert terminal.getvalue().endswith("\r\x1b[K"), "wiped"


def test_a_file_sees_nothing() -> None:
    stream = io.StringIO()
    with Watch(stream, "searching") as watch:
        watch(1, 2, "groups")
    assert stream.getvalue() == ""
