"""The pages of scores and comparisons in a real browser: they load clean, ask for nothing, and can be read at a desk
and on a phone. The same visit as that of a prediction's page."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from score_runs import benchmark_directory
from test_report_browser import look, start
from timetrial.report import compare_page, score_page
from timetrial.results import Result, compare, published, score
from timetrial.results.records import RunTime

pytestmark = pytest.mark.chromium

DESK, PHONE = (1400, 3600), (390, 5400)
PROBE = """<script>
addEventListener("load", () => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const seen = e => e.checkVisibility();
  const inside = e => { for (let p = e.parentElement; p; p = p.parentElement)
    if (getComputedStyle(p).overflowX !== "visible") return false; return true; };
  const all = [...document.querySelectorAll("body *")].filter(seen);
  parent.postMessage({
    window: innerWidth,
    page: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
    boxes: all.filter(inside).filter(e => getComputedStyle(e).position !== "absolute")
      .map(e => [e.tagName + "." + e.className, ...box(e)]),
    font: Math.min(...all.filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
      .map(e => parseFloat(getComputedStyle(e).fontSize))),
    dots: all.filter(e => e.matches(".runs .dot")).map(e => [e.className, ...box(e), ...box(e.parentElement)]),
    stacks: all.filter(e => e.matches(".stack")).map(e => [...e.children].map(c => c.getBoundingClientRect().width)),
    figures: all.filter(e => e.matches("#sides td.number")).map(e => [e.dataset.label, ...box(e)]),
    words: all.filter(e => e.matches(".rows .words")).map(e => box(e)),
    fills: all.filter(e => e.matches(".fill")).map(e => e.getBoundingClientRect().width),
  }, "*");
});
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is missing: install the Debian package chromium")
    return found


def result(directory: Path, **changed: Any) -> Result:
    """Ten runs with times; long names where they have to wrap."""
    minutes = [60.0 + 3 * i for i in range(10)]
    (made,) = score(benchmark_directory(directory / "v5.1" / "llama31_8b", minutes, [200_000] * 10))
    runs = tuple(
        dataclasses.replace(run, time=_time(60 * (run.time_min or 1)), keys={"opt_adamw_epsilon": 1e-5})
        for run in made.runs
    )
    long = "a_system_with_a_name_that_has_no_place_to_break_ngpu2496_ngc25.04_nemo"
    return dataclasses.replace(made, runs=runs, **{"system": long, "official": ("FAILED: " + "x" * 200,), **changed})


def _time(total: float) -> RunTime:
    return RunTime(
        30.0, 0.8 * total, 0.15 * total, 0.05 * total, 900, 2.0, 1.9, 2.2, "logged steps", 4.0, 16.0, 800.0, 0.4,
        "dense bf16 peak", total_s=total,
    )  # fmt: skip


def visit(chromium: str, source: str, tmp_path: Path) -> dict[int, dict[str, Any]]:
    """What the probe measured, by width of the window; nothing may stand on the console."""
    console, found = look(chromium, source, PROBE, tmp_path, (DESK, PHONE))
    assert console == []
    assert set(found) == {DESK[0], PHONE[0]}
    for width, probe in found.items():
        assert probe["requests"] == []
        assert probe["page"] <= width, "the page scrolls sideways"
        assert probe["font"] >= 12
        for tag, left, _, right, _ in probe["boxes"]:
            assert left >= -0.5, tag
            assert right <= width + 0.5, tag
    return found


def test_one_result_is_laid_out_to_be_read(chromium: str, tmp_path: Path) -> None:
    for probe in visit(chromium, score_page.page([result(tmp_path)]), tmp_path).values():
        assert [name for name, *_ in probe["dots"]].count("dot full") == 8
        assert [name for name, *_ in probe["dots"]].count("dot hollow") == 2
        lefts = [dot[1] for dot in probe["dots"]]
        assert lefts == sorted(lefts), "each run took longer than the one before"
        for _, left, top, right, bottom, a, _, b, _ in probe["dots"]:
            assert right - left == pytest.approx(bottom - top, abs=0.5)
            assert a - 1 <= left
            assert right <= b + 1
        assert len(probe["stacks"]) == 10
        for train, evaluation, gap in probe["stacks"]:
            assert train > evaluation > gap > 0
            assert train / evaluation == pytest.approx(0.8 / 0.15, rel=0.08)


def test_many_results_are_laid_out_to_be_read(chromium: str, tmp_path: Path) -> None:
    one = result(tmp_path)
    many = [dataclasses.replace(one, verdict=verdict) for verdict in ("stands", "fails", "mini", "unread")] * 5
    found = visit(chromium, score_page.page(many), tmp_path)
    assert len(found[DESK[0]]["dots"]) >= 50, "those that fail stand open"
    found = visit(chromium, score_page.page(many * 10), tmp_path)
    assert found[DESK[0]]["dots"] == [], "two hundred are too many to stand open"
    assert found[PHONE[0]]["page"] <= PHONE[0]


def test_a_comparison_is_laid_out_to_be_read(chromium: str, tmp_path: Path) -> None:
    sides = published("v5.0/NVIDIA/llama31_405b/eos-dfw_n64*") + published("v5.0/CoreWeave*/llama31_405b")
    found = visit(chromium, compare_page.page(compare(sides)), tmp_path)
    assert len(found[PHONE[0]]["fills"]) == 5 * (len(sides) - 1)
    assert max(found[DESK[0]]["fills"]) > 100
    for width, probe in found.items():  # no figure is left out, and none stands outside of the window
        assert [label for label, *_ in probe["figures"]] == [*compare_page.COLUMNS] * len(sides)
        assert all(0 <= left < right <= width and bottom > top for _, left, top, right, bottom in probe["figures"])
        assert len(probe["words"]) == len(found[DESK[0]]["words"]) > 0
    lines = [top for _, _, top, _, _ in found[PHONE[0]]["figures"]]
    assert lines == sorted(set(lines)), "one below the other"


@pytest.mark.parametrize(
    ("scheme", "colors"),
    [("light", ("3b7be0", "c77700", "2563c9", "c0262d")), ("dark", ("75acff", "ffc145", "75acff", "ff7b7b"))],
)
def test_runs_and_parts_are_painted_in_the_colours_of_the_scheme(
    chromium: str, tmp_path: Path, scheme: str, colors: tuple[str, ...]
) -> None:
    path, shot = tmp_path / "page.html", tmp_path / "shot.png"
    path.write_text(score_page.page([result(tmp_path)]), encoding="utf-8")
    setting = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    done = start(chromium, tmp_path / "profile", path, (1400, 8000), setting, f"--screenshot={shot}")
    assert re.findall(r":CONSOLE.*", done.stderr) == []
    pixels = np.rint(matplotlib.image.imread(shot)[..., :3] * 255).astype(int)
    for color in colors:  # training, evaluation, dots, a level of failure
        wanted = [int(color[i : i + 2], 16) for i in (0, 2, 4)]
        assert int((np.abs(pixels - wanted).max(axis=-1) <= 2).sum()) > 50, color
