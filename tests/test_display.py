"""The live line of a run, seen through a pseudo terminal: one line at any width, and true."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from timetrial.train import display
from timetrial.train.display import Line, clock, steps_to_evaluation
from timetrial.workloads.workload import resolve

DRIVER = """
import sys, time
from timetrial.train.display import Display
from timetrial.workloads.workload import resolve

config = resolve(sys.argv[1], sys.argv[2])
first, total, step_s = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
shown = Display(config, total)
for step in range(first, first + 6):
    shown.step(step, 12.3456, step_s, config.plan.gbs * config.data.seq_len, 0.314)
    time.sleep(0.3)
    if step == first + 3:
        shown.evaluation(step * config.plan.gbs, 4.71, False, 0.6)
shown.close()
print("the end", file=sys.stderr)
"""
MINI = ("llama31_8b", "mini", 118, 480, 0.15)
LORA_MINI = ("llama2_70b_lora", "mini", 118, 480, 0.15)
OFFICIAL = ("llama31_8b", "official", 1001, 1_200_000, 0.775)
LARGEST = ("llama31_405b", "official", 999, 1_200_000, 12.5)


def shown(columns: int, *arguments: object) -> list[str]:
    """All that the run wrote on a terminal of so many columns, a string for each time it began a line anew."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", DRIVER, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    output = b""
    try:
        while block := os.read(leader, 65536):
            output += block
    except OSError:  # the terminal's other end is closed
        pass
    os.close(leader)
    assert process.wait(timeout=60) == 0, output
    text = output.decode()
    assert text.count("\x1b[1A") == 1  # up a line once, to take it away; more would mean that it took several lines
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piece) for piece in re.split(r"\r\n|\r|\n|\x1b\[2K", text)]


@pytest.mark.parametrize("run", [MINI, LORA_MINI, OFFICIAL, LARGEST], ids=lambda run: f"{run[0]} {run[1]}")
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_it_fits_one_line_and_goes_at_the_end(run: tuple[object, ...], columns: int) -> None:
    pieces = [piece for piece in shown(columns, *run) if piece]
    live = [piece for piece in pieces if piece.startswith(str(run[0]))]
    assert len(live) >= 4
    assert max(len(piece) for piece in live) < columns
    assert pieces[-1] == "the end"
    [evaluation] = [piece for piece in pieces if piece.startswith("evaluation at")]
    assert evaluation.endswith(", 0.6 s")  # long lines are left whole, to be copied
    if columns >= 80:
        assert all("loss 12.346" in piece and f"/{run[3]:,}" in piece and "eval" in piece for piece in live[1:])
    if columns >= 120:
        assert all("tok/s" in piece and "MFU 31%" in piece for piece in live[1:])
        assert all(("left" in piece) == (run[1] == "mini") for piece in live[1:])


def test_a_wide_terminal_has_the_bar_and_both_times() -> None:
    line = next(piece for piece in shown(120, *MINI) if "step 120/480" in piece)
    assert re.fullmatch(
        r"llama31_8b mini ━+─+ step 120/480 · .* · (evaluation in \d:\d\d|evaluating) · ≤ 0:54 left", line
    )
    assert line.count("━") / (line.count("━") + line.count("─")) == pytest.approx(120 / 480, abs=0.04)


def test_parts_do_not_come_and_go() -> None:
    """A text that grows pushes another out; when it shrinks again the other stays away."""
    line = Line("run")
    seen = []
    for rate in ("9 tok/s", "99,999 tok/s", "9 tok/s"):
        line.show({"step": "step 1/2", "rate": rate, "mfu": "MFU 31%"}, None)
        seen.append(line.fitted(35).plain)
    assert ["MFU" in text for text in seen] == [True, False, False]
    assert "MFU" in line.fitted(36).plain  # the terminal was resized


@pytest.mark.parametrize("width", range(1, 140))
def test_no_width_is_too_small(width: int) -> None:
    line = Line("llama31_8b mini")
    for parts in (
        None,
        {"step": "step 1/480", "loss": "loss 7.625", "evaluation": "evaluating", "left": "≤ 1:12 left"},
    ):
        line.show(parts or {}, 0.5)
        line.parts = parts
        assert line.fitted(width).cell_len <= width
        assert line.fitted(width, ascii_only=True).plain.isascii()


@pytest.mark.parametrize(("workload", "preset"), [("llama31_8b", "official"), ("llama2_70b_lora", "official"),
                                                  ("llama31_8b", "mini"), ("llama31_405b", "official")])  # fmt: skip
def test_the_next_evaluation_is_the_one_that_comes(workload: str, preset: str) -> None:
    """Counted step by step with the rule that the loop asks."""
    config = resolve(workload, preset)
    gbs = config.plan.gbs
    due = [step for step in range(1, 3001) if config.evaluation.due((step - 1) * gbs, step * gbs)]
    assert due
    for step in range(due[-1] + 1):
        assert step + steps_to_evaluation(config, step) == next(point for point in due if point >= step)


def test_elsewhere_it_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "PLAIN_INTERVAL_S", 0.0)
    config = resolve("llama31_8b", "mini")
    shown_to_a_file = display.Display(config, 480)
    for step in (120, 121):
        shown_to_a_file.step(step, 4.91, 0.5, 512, None)
    shown_to_a_file.evaluation(2048, 4.71, False, 0.6)
    shown_to_a_file.close()
    silent = display.Display(config, 480, silent=True)
    silent.step(1, 4.91, 0.5, 512, None)
    silent.say("nothing")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"step 121/480 · loss 4\.910 · 1,024 tok/s · eval.* · ≤ 3:00 left", lines[1])
    assert lines[2] == "evaluation at 2,048 samples: log perplexity 4.7100 (target " + (
        f"{config.evaluation.target:g}), 0.6 s"
    )


def test_clock() -> None:
    assert [clock(s) for s in (0.4, 75.2, 4000, float("nan"))] == ["0:00", "1:15", "1:06:40", "-"]
