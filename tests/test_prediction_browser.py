"""A prediction's page in a real browser: it loads clean, asks for nothing, and can be read at a desk and on a phone.

The same visit as that of the run's report (`test_report_browser.py`): headless Chromium measures what is laid out.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from prediction_cases import answered
from test_report_browser import PROBE, check_labels, look, start
from timetrial.report.prediction import page

pytestmark = pytest.mark.chromium

PROBED = PROBE.replace('querySelectorAll("path")', 'querySelectorAll("path, rect")')
"""These charts draw kernels as rectangles, with words where the pointer rests."""

DESK, PHONE = (1400, 3600), (390, 5400)
CSS = Path(__file__).parents[1] / "src" / "timetrial" / "report" / "templates" / "prediction.css"


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is missing: install the Debian package chromium")
    return found


def visit(chromium: str, source: str, tmp_path: Path) -> tuple[list[str], dict[int, dict[str, Any]]]:
    """Console messages, and what the probe measured by width of the window."""
    return look(chromium, source, PROBED, tmp_path, (DESK, PHONE))


@pytest.mark.parametrize("kind", ["pipelined", "adapted", "bare", "too large"])
def test_the_page_is_laid_out_to_be_read(chromium: str, tmp_path: Path, kind: str) -> None:
    a = answered(kind if kind in ("pipelined", "adapted") else "pipelined")
    charts = {"pipelined": 4, "adapted": 3, "bare": 3, "too large": 4}[kind]
    if kind == "bare":
        a = dataclasses.replace(a, memory=None, time=None, energy=None, notes=(), scaling=(), published=())
    if kind == "too large":
        assert a.memory is not None
        ranks = tuple(dataclasses.replace(r, activations=3 * r.activations) for r in a.memory.ranks)
        a = dataclasses.replace(
            a,
            memory=dataclasses.replace(a.memory, ranks=ranks),
            fits=False,
            reason="out of memory by 58.1 GiB, offloaded activations or not",
        )
    console, seen = visit(chromium, page(a), tmp_path)
    assert console == []
    assert set(seen) == {DESK[0], PHONE[0]}
    for width, probe in seen.items():
        assert probe["requests"] == []
        assert probe["page"] <= width, "the page scrolls sideways"
        for tag, left, _, right, _ in probe["boxes"]:
            assert left >= -0.5, tag
            assert right <= width + 0.5, tag
        assert probe["font"] >= 12
        assert len(probe["charts"]) == charts  # of the two drawings of a chart, one is shown
        for chart in probe["charts"]:
            left, top, right, bottom = chart["box"]
            assert right - left > 300, chart["name"]
            assert bottom - top > 80, chart["name"]
            assert chart["drawn"] >= 2, chart["name"]
            assert chart["pixel"] * 12 >= 10, chart["name"]
            check_labels(chart, width)


@pytest.mark.parametrize(("scheme", "block"), [("light", 0), ("dark", 1)])
def test_parts_are_painted_in_the_colours_of_the_scheme(chromium: str, tmp_path: Path, scheme: str, block: int) -> None:
    blocks = re.findall(r":root \{(.*?)\}", CSS.read_text(), re.DOTALL)
    colors = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", blocks[block]))
    assert len(blocks) == 2
    path, shot = tmp_path / "page.html", tmp_path / "shot.png"
    path.write_text(page(answered("pipelined")), encoding="utf-8")
    setting = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    done = start(chromium, tmp_path / "profile", path, DESK, setting, f"--screenshot={shot}")
    assert re.findall(r":CONSOLE.*", done.stderr) == []
    pixels = np.rint(matplotlib.image.imread(shot)[..., :3] * 255).astype(int)
    for role in ("part-matmul", "part-attention", "part-tp", "part-dp", "mem-activations", "mem-fragmentation", "wait"):
        wanted = [int(colors[role][i : i + 2], 16) for i in (1, 3, 5)]
        assert int((np.abs(pixels - wanted).max(axis=-1) <= 2).sum()) > 50, role
