"""The report in a real browser: it loads clean, asks for nothing, and can be read at a desk and on a phone.

A copy of the page is opened in headless Chromium with a probe, a script that the page itself does not
have: it measures what is laid out. The copy stands in two frames, as wide as a desk's window and as a
phone's (Chromium's own window cannot be that narrow), of a page that gathers the measurements into
its document, which Chromium prints.
"""

from __future__ import annotations

import html as escapes
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from report_runs import make
from timetrial.report import html

pytestmark = pytest.mark.chromium

CSS = Path(html.__file__).parent / "templates" / "report.css"
DESK, PHONE = (1100, 2300), (390, 3400)
DARK, LIGHT = 0, 1

PROBE = """
<script>
addEventListener("load", () => {
  const box = element => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const texts = chart => [...chart.querySelectorAll("text")].map(t => [t.textContent, ...box(t)]);
  const shown = [...document.querySelectorAll("svg.chart")].filter(chart => chart.checkVisibility());
  const found = {
    window: innerWidth,
    page: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").map(entry => entry.name),
    charts: shown.map(chart => ({
      name: chart.getAttribute("aria-label"), box: box(chart), texts: texts(chart),
      pixel: chart.getBoundingClientRect().width / chart.viewBox.baseVal.width,
      drawn: [...chart.querySelectorAll("path")].filter(p => box(p)[2] > box(p)[0]).length,
    })),
    boxes: [...document.querySelectorAll("main *")].filter(e => !e.closest("svg, .scroll") && e.checkVisibility())
      .map(e => [e.tagName, ...box(e)]),
    font: Math.min(...[...document.querySelectorAll("p, dd, dt, th, td, li, code, figcaption")]
      .map(e => parseFloat(getComputedStyle(e).fontSize))),
  };
  parent.postMessage(found, "*");
});
</script>
"""


FRAMES = """<!DOCTYPE html><pre id="probe"></pre>
<script>
const found = [];
addEventListener("message", event => {
  found.push(event.data);
  document.getElementById("probe").textContent = JSON.stringify(found);
});
</script>
"""


@dataclass(frozen=True)
class Seen:
    """What one visit to a page gave."""

    console: list[str]
    desk: dict[str, Any]
    phone: dict[str, Any]


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None:
        pytest.fail("chromium is missing: run `make test`, which installs it, or leave it out by -m 'not chromium'")
    return found


def start(
    chromium: str, profile: Path, page: Path, size: tuple[int, int], *options: str
) -> subprocess.CompletedProcess[str]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}",
        f"--window-size={size[0]},{size[1]}",
    ]
    flags += ["--run-all-compositor-stages-before-draw", "--virtual-time-budget=3000", "--enable-logging=stderr"]
    command = [chromium, *flags, *options, page.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=True)


def look(
    chromium: str,
    source: str,
    probe: str,
    tmp_path: Path,
    widths: tuple[tuple[int, int], tuple[int, int]],
    window: tuple[int, int] = (1900, 1000),
) -> tuple[list[str], dict[int, dict[str, Any]]]:
    """Opens a page that carries `probe` in frames of two sizes; console messages, and what was measured by width."""
    source, policies = re.subn(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", source)
    assert policies == 1  # it forbids scripts, so also the probe
    (tmp_path / "probed.html").write_text(source.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    frame = '<iframe src="probed.html" style="width: {}px; height: {}px; border: 0"></iframe>'
    frames = tmp_path / "frames.html"
    frames.write_text(FRAMES + "".join(frame.format(*size) for size in widths), encoding="utf-8")
    done = start(chromium, tmp_path / "profile", frames, window, "--dump-dom")
    measured = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert measured is not None, done.stderr[-2000:]
    found = json.loads(escapes.unescape(measured[1]))
    return re.findall(r":CONSOLE.*", done.stderr), {seen["window"]: seen for seen in found}


def visit(chromium: str, page: Path, tmp_path: Path, extra: str = "") -> Seen:
    """Opens a copy of the page that carries the probe, and `extra` before it, at both widths."""
    source = page.read_text(encoding="utf-8")
    console, by_width = look(chromium, source, extra + PROBE, tmp_path, (DESK, PHONE), (1600, 1000))
    return Seen(console, by_width[DESK[0]], by_width[PHONE[0]])


RUNS: dict[str, dict[str, Any]] = {
    "reached": {},
    "one-step": {"steps": 1, "every": 0, "status": None},
    "diverged": {"steps": 220, "nan_from": 201, "status": "aborted", "target": 1.0},
    "long": {"steps": 20_000, "every": 100, "status": "stopped", "target": 1.0},
    "accuracy": {"metric": "accuracy", "higher": True, "target": 0.75},
    "spike": {"spike": 40_000.0},
}


@pytest.mark.parametrize("kind", RUNS)
def test_the_page_is_laid_out_to_be_read(chromium: str, tmp_path: Path, kind: str) -> None:
    seen = visit(chromium, html.write(make(tmp_path / "run", **RUNS[kind])), tmp_path)
    assert seen.console == []
    for probe in (seen.desk, seen.phone):
        width = probe["window"]
        assert probe["requests"] == []
        assert probe["page"] <= width, "the page scrolls sideways"
        for tag, left, _, right, _ in probe["boxes"]:
            assert left >= -0.5, tag
            assert right <= width + 0.5, tag
        assert probe["font"] >= 12
        assert len(probe["charts"]) == 5  # of the two drawings of a chart, one is shown
        for chart in probe["charts"]:
            check_chart(chart, width)


def check_chart(chart: dict[str, Any], width: int) -> None:
    """A chart has room and something in it, and its labels can be read."""
    left, top, right, bottom = chart["box"]
    assert right - left > 300, chart["name"]
    assert bottom - top > 150, chart["name"]
    assert chart["drawn"] >= 2, chart["name"]
    assert chart["pixel"] * 12 >= 10, f"{chart['name']}: labels of {chart['pixel'] * 12:.1f} px"
    check_labels(chart, width)


def check_labels(chart: dict[str, Any], width: int) -> None:
    """No label of a chart covers another, and none leaves the page."""
    texts = chart["texts"]
    assert len(texts) >= 5
    for i, (words, left, top, right, bottom) in enumerate(texts):
        assert left >= 0, (chart["name"], words)
        assert right <= width, (chart["name"], words)
        for other, left2, top2, right2, bottom2 in texts[i + 1 :]:
            apart = right <= left2 or right2 <= left or bottom - 2 <= top2 or bottom2 - 2 <= top
            assert apart, f"{chart['name']}: {words!r} and {other!r} overlap"


def test_the_probe_notices_errors_and_requests(chromium: str, tmp_path: Path) -> None:
    """What the checks above rest on: the same visit sees a script's error and a foreign image."""
    page = html.write(make(tmp_path / "run", steps=4, every=2))
    fault = (
        '<script>noSuchFunction()</script><img src="http://example.invalid/pixel.png"><p style="width: 3000px">wide</p>'
    )
    seen = visit(chromium, page, tmp_path, fault)
    assert any("noSuchFunction" in line for line in seen.console)
    for probe in (seen.desk, seen.phone):
        assert probe["requests"] == ["http://example.invalid/pixel.png"]
        assert probe["page"] >= 3000


def test_the_page_itself_runs_no_script_put_into_it(chromium: str, tmp_path: Path) -> None:
    page = html.write(make(tmp_path / "run", steps=4, every=2))
    page.write_text(page.read_text().replace("</body>", "<script>document.title = 'taken over'</script></body>"))
    done = start(chromium, tmp_path / "profile", page, DESK, "--dump-dom")
    assert "<title>llama31_8b" in done.stdout
    assert "Content Security Policy" in done.stderr


@pytest.mark.parametrize(("scheme", "index", "size"), [("light", 0, DESK), ("dark", 1, DESK), ("dark", 1, PHONE)])
def test_charts_are_painted_in_the_colours_of_the_scheme(
    chromium: str, tmp_path: Path, scheme: str, index: int, size: tuple[int, int]
) -> None:
    blocks = re.findall(r":root \{(.*?)\}", CSS.read_text(), re.DOTALL)
    colors = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", blocks[index]))
    shot = tmp_path / "shot.png"
    page = html.write(make(tmp_path / "run"))
    setting = f"--blink-settings=preferredColorScheme={LIGHT if scheme == 'light' else DARK}"
    start(chromium, tmp_path / "profile", page, size, setting, f"--screenshot={shot}")
    pixels = np.rint(matplotlib.image.imread(shot)[..., :3] * 255).astype(int)
    assert pixels.shape[1] == size[0]

    def painted(role: str) -> int:
        wanted = [int(colors[role][i : i + 2], 16) for i in (1, 3, 5)]
        return int((np.abs(pixels - wanted).max(axis=-1) <= 2).sum())

    assert painted("page") > 20_000
    assert painted("surface") > 100_000
    for role in ("loss", "evaluation", "target", "data", "forward", "backward", "optimizer", "checkpoint", "other"):
        assert painted(role) > 20, role


def test_print_shows_everything(chromium: str, tmp_path: Path) -> None:
    """On paper the folded configuration is open; its text can only be in the PDF if it was laid out."""
    page = html.write(make(tmp_path / "run"))
    folded, without = tmp_path / "all.pdf", tmp_path / "without.pdf"
    start(chromium, tmp_path / "profile", page, DESK, "--no-pdf-header-footer", f"--print-to-pdf={folded}")
    shorter = tmp_path / "without.html"
    shorter.write_text(re.sub(r"<details>.*</details>", "", page.read_text(), flags=re.DOTALL))
    start(chromium, tmp_path / "profile", shorter, DESK, "--no-pdf-header-footer", f"--print-to-pdf={without}")
    assert pages(folded) > pages(without) >= 2


def pages(pdf: Path) -> int:
    return len(re.findall(rb"/Type ?/Page\b", pdf.read_bytes()))
