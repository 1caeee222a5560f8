"""The page of validated runs: what it says is what `refit` says, and a browser shows it without complaint."""

from __future__ import annotations

import dataclasses
import html as escapes
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from test_report_browser import FRAMES, PROBE, check_labels, start
from timetrial.errors import UserError
from timetrial.predict import fit, refit, sure
from timetrial.predict.sure import Validated
from timetrial.report import html, residual_charts, residuals

DESK, PHONE = (1100, 5200), (390, 7600)
CSS = Path(html.__file__).parent / "templates" / "report.css"


def validated(i: int, error: float, fitted: float | None = None, **changes: Any) -> Validated:
    systems = (("h100-sxm", "hopper"), ("gb200-nvl72", "blackwell"), ("mi300x", "cdna3"))
    name, generation = systems[i % 3]
    one = Validated(
        source="v5.0 Nobody",
        model=("Llama 3.1 405B", "Llama 2 70B")[i % 2],
        system=name,
        generation=generation,
        stack="ngc25.04",
        precision=("fp8", "bf16")[i % 2],
        accelerators=2 ** (3 + i % 7),
        mapping=f"tp8 dp{1 + i} mbs1 gbs{64 + i}",
        published_s=1.5 + i,
        error=error,
        fitted_error=error / 2 if fitted is None else fitted,
    )
    return dataclasses.replace(one, **changes)


RUNS = [validated(i, (-1) ** i * 0.01 * i) for i in range(24)]


def cells(page: str, table: str) -> list[list[str]]:
    body = re.search(rf'<table id="{table}">(.*?)</table>', page, re.DOTALL)
    assert body is not None
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body[1], re.DOTALL)]
    return [[escapes.unescape(cell).replace("\u00a0", " ").replace("\u2212", "-") for cell in row] for row in found]


def test_the_table_is_that_of_the_terminal() -> None:
    """Every line of `refit.table` stands in the page, with the same figures."""
    shown = {
        row[0]: [cell.removesuffix(" %") for cell in row[1:]] for row in cells(residuals.page(RUNS), "summary")[2:]
    }
    lines = refit.table(RUNS).split("\n\nfarthest off:")[0].split("\n")[2:]
    assert len([line for line in lines if line]) == len([label for label, row in shown.items() if row])
    for line in filter(None, lines):
        label = line[:34].strip()
        label = re.sub(rf"^({'|'.join(refit.GROUPS)}) ", "", label)
        assert shown[label] == [figure.removesuffix("%") for figure in line[34:].split()], label


def test_the_list_names_the_farthest_first_with_their_mapping() -> None:
    rows = cells(residuals.page(RUNS), "farthest")[1:]
    assert len(rows) == residuals.FARTHEST
    assert rows[0][0] == "-23.0 %"
    assert rows[1][0] == "+22.0 %"
    assert rows[0][4] == RUNS[23].mapping
    sizes = [abs(float(row[0].split()[0])) for row in rows]
    assert sizes == pytest.approx([float(i) for i in range(23, 23 - len(rows), -1)])


def test_each_chart_has_every_run_twice_and_its_lines() -> None:
    page = residuals.page(RUNS)
    figures = re.findall(r'<figure id="by-(\w+)">(.*?)</figure>', page, re.DOTALL)
    assert [name for name, _ in figures] == list(residuals.BY)
    assert set(residuals.BY) == set(refit.GROUPS)
    for name, figure in figures:
        for drawing in re.findall(r"<svg.*?</svg>", figure, re.DOTALL):
            rings = re.findall(r'<circle[^>]*fill="var\(--surface\)"[^>]*stroke="var\(--evaluation\)"', drawing)
            disks = re.findall(r'<circle[^>]*fill="var\(--loss\)"', drawing)
            assert (len(disks), len(rings)) == (len(RUNS), len(RUNS)), name
            for color in residual_charts.COLORS:
                assert len(re.findall(rf'stroke="var\(--{color}\)"[^>]*stroke-dasharray', drawing)) == 2, name
        words = re.search(r"<figcaption>(.*?)</figcaption>", figure)
        assert words is not None
        assert "median" in words[1]
        assert "90th percentile" in words[1]


def test_words_are_median_and_percentile() -> None:
    found = fit.summary([v.error for v in RUNS])
    wanted = f"median {100 * found['median']:.1f}\u00a0%, 90th percentile {100 * found['p90']:.1f}\u00a0%"
    assert residuals.words_of(RUNS) == wanted
    assert f"All runs: {wanted}." in residuals.page(RUNS)


def test_errors_of_one_kind_are_shown_once() -> None:
    same = [dataclasses.replace(v, fitted_error=v.error) for v in RUNS]
    page = residuals.page(same)
    assert 'stroke="var(--evaluation)"' not in page
    assert "without its system" not in page
    assert len(cells(page, "summary")[0]) == 5


def test_points_stand_where_their_error_is() -> None:
    """On the axis an error of 5 % lies on its line, and one beyond the axis at its end."""
    lane = residual_charts.Lane("one", "words", [validated(0, 0.05), validated(1, 3.0), validated(2, -3.0)])
    drawing = residual_charts.strips([lane], True, "title", True)
    lines = [float(x) for x in re.findall(r'd="M([\d.]+) [\d.]+L[^"]*"[^>]*stroke="var\(--target\)"', drawing)]
    disks = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"[^>]*fill="var\(--loss\)"', drawing)]
    assert disks[0] == pytest.approx(max(lines), abs=0.02)
    assert disks[1] == pytest.approx(residual_charts.WIDE - 300)
    assert disks[2] == pytest.approx(210)
    assert "+300\u00a0%" in drawing
    assert residual_charts.limit(lane.runs) == residual_charts.MOST
    assert residual_charts.limit([validated(0, 0.001)]) == residual_charts.LEAST


def test_one_run_alone_makes_a_page() -> None:
    assert "1 run)" in residuals.page(RUNS[:1])


def test_text_of_a_table_is_no_markup() -> None:
    page = residuals.page([dataclasses.replace(RUNS[3], source="<script>x</script>", model="a & b")])
    assert "<script" not in page
    assert "a &amp; b" in page


def test_no_runs_and_no_place_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing was validated"):
        residuals.write_page([], tmp_path / "page.html")
    with pytest.raises(UserError, match="cannot be written"):
        residuals.write_page(RUNS, tmp_path / "missing" / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_the_package_needs_no_network_and_no_torch(tmp_path: Path) -> None:
    runs = sure.validated()
    if not runs:
        pytest.skip("no fit has been made")
    code = (
        "import sys; from timetrial.report import residuals; from timetrial.predict import sure;"
        f"print(residuals.write_page(sure.validated(), {str(tmp_path / 'page.html')!r}));"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    page = Path(done.stdout.strip()).read_text(encoding="utf-8")
    assert len(page) < 700_000
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert "url(" not in page


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is missing: install the Debian package chromium")
    return found


@pytest.mark.chromium
@pytest.mark.parametrize("kind", ["package", "made up", "far"])
def test_the_page_is_laid_out_to_be_read(chromium: str, tmp_path: Path, kind: str) -> None:
    runs = {"package": list(sure.validated()), "made up": RUNS, "far": [*RUNS, validated(30, 4.0)]}[kind]
    source, policies = re.subn(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", residuals.page(runs))
    assert policies == 1  # it forbids scripts, so also the probe
    (tmp_path / "probed.html").write_text(source.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    frame = '<iframe src="probed.html" style="width: {}px; height: {}px; border: 0"></iframe>'
    frames = tmp_path / "frames.html"
    frames.write_text(FRAMES + frame.format(*DESK) + frame.format(*PHONE), encoding="utf-8")
    done = start(chromium, tmp_path / "profile", frames, (1600, 1000), "--dump-dom")
    assert re.findall(r":CONSOLE.*", done.stderr) == []
    measured = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert measured is not None, done.stderr[-2000:]
    for probe in json.loads(escapes.unescape(measured[1])):
        width = probe["window"]
        assert probe["requests"] == []
        assert probe["page"] <= width, "the page scrolls sideways"
        for tag, left, _, right, _ in probe["boxes"]:
            assert left >= -0.5, tag
            assert right <= width + 0.5, tag
        assert probe["font"] >= 12
        assert len(probe["charts"]) == len(residuals.BY)  # of the two drawings of a chart, one is shown
        for chart in probe["charts"]:
            assert chart["pixel"] * 12 >= 10, chart["name"]
            check_labels(chart, width)


@pytest.mark.chromium
@pytest.mark.parametrize(("scheme", "block"), [("light", 0), ("dark", 1)])
def test_points_are_painted_in_the_colours_of_the_scheme(
    chromium: str, tmp_path: Path, scheme: str, block: int
) -> None:
    colors = dict(
        re.findall(r"--([a-z]+): (#[0-9a-f]{6})", re.findall(r":root \{(.*?)\}", CSS.read_text(), re.DOTALL)[block])
    )
    path, shot = residuals.write_page(RUNS, tmp_path / "page.html"), tmp_path / "shot.png"
    setting = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    done = start(chromium, tmp_path / "profile", path, (1100, 1600), setting, f"--screenshot={shot}")
    assert re.findall(r":CONSOLE.*", done.stderr) == []
    pixels = np.rint(matplotlib.image.imread(shot)[..., :3] * 255).astype(int)
    for role in ("page", "surface", "loss", "evaluation"):
        wanted = [int(colors[role][i : i + 2], 16) for i in (1, 3, 5)]
        assert int((np.abs(pixels - wanted).max(axis=-1) <= 2).sum()) > 50, role
