"""The page of scores: what stands in it, for one result and for two hundred, whole and broken."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from score_runs import LOGS, benchmark_directory, needs_logs, write
from timetrial.report import compare_page
from timetrial.report.score_page import page, write_page
from timetrial.results import Result, compare, published, score

EXTERNAL = re.compile(
    r"""(?:src|href)=["'](?!#|data:)|url\((?!#|['"]?data:)|@import|<script|<iframe|<link rel="style"""
)


def made(directory: Path, **options: object) -> Result:
    """A result of ten runs, two of them left out."""
    minutes = [60.0 + i for i in range(10)]
    (result,) = score(benchmark_directory(directory / "v5.1" / "llama31_8b", minutes, [200_000] * 10, **options))  # type: ignore[arg-type]
    return result


def test_one_result(tmp_path: Path) -> None:
    result = made(tmp_path)
    html = page([result])
    assert not EXTERNAL.search(html)
    assert "Content-Security-Policy" in html
    assert html.count('class="dot full"') == 8
    assert html.count('class="dot hollow"') == 2
    assert 'title="result_0.txt: 60.0000 min, fastest, left out"' in html
    assert "does not stand" in html  # the logs of this test lack most keys
    assert html.count('class="level fail"') == sum(
        1 for _ in {(f.rule, f.asked, f.change) for run in result.runs for f in run.findings if f.level == "fail"}
    ) + sum(f.level == "fail" for f in result.findings)
    assert "<details class" not in html


def test_two_hundred_results(tmp_path: Path) -> None:
    result = made(tmp_path)
    results = [dataclasses.replace(result, system=f"system{i}") for i in range(200)]
    html = page(results)
    assert not EXTERNAL.search(html)
    assert "200 results" in html
    assert html.count('<details class="result"') == 200
    assert " open>" not in html, "too many to stand open"
    assert " open>" in page(results[:3])
    assert len(set(re.findall(r' id="(r\d+)"', html))) == 200
    assert set(re.findall(r'href="#(r\d+)"', html)) == set(re.findall(r' id="(r\d+)"', html))
    assert len(html) < 20_000_000


def test_what_a_log_says_is_escaped(tmp_path: Path) -> None:
    evil = '<img src=x onerror=alert(1)>"&\u202e'
    lines = []
    result = made(tmp_path)
    for log in sorted(result.path.glob("result_*.txt")):
        lines = [line.replace('"Nobody"', '"<b>Nobody</b>"') for line in log.read_text().splitlines()]
        write(log, lines)
    html = page(
        [dataclasses.replace(made_again(result.path), system=evil, official=(f"9 of 10 {evil}", f"FAILED {evil}"))]
    )
    assert "<img" not in html
    assert "<b>Nobody" not in html
    assert "&lt;b&gt;Nobody&lt;/b&gt;" in html
    assert "\u202e" not in html


def made_again(path: Path) -> Result:
    return score(path)[0]


def test_runs_without_times_and_nothing_at_all(tmp_path: Path) -> None:
    benchmark_directory(tmp_path / "v5.1" / "llama31_8b", [60.0] * 2, status=None)
    write(tmp_path / "v5.1" / "other" / "result_0.txt", [""])
    results = score(tmp_path)
    for html in (page(results), *(page([result]) for result in results)):
        assert "NaN" not in html
        assert "None" not in html
    assert "could not be read" in page([results[1]])


def test_it_is_written_whole_or_not(tmp_path: Path) -> None:
    from timetrial.errors import UserError

    path = write_page([made(tmp_path)], tmp_path / "page.html")
    assert path.read_text().rstrip().endswith("</html>")
    with pytest.raises(UserError, match="cannot be written"):
        write_page([made(tmp_path)], tmp_path / "nowhere" / "page.html")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["page.html"]


@needs_logs
def test_published_logs(tmp_path: Path) -> None:
    results = score(LOGS)
    html = page(results)
    assert html.count('<details class="result"') == 12
    green = page([r for r in results if r.system == "tinybox_green"])
    assert "803.5947 min" in green
    assert "no run_stop; counted as the slowest" in green
    assert green.count('class="stack') == 4  # the fifth has no time
    assert "evaluation: 5\u00a0h\u00a057\u00a0min, 44.5\u00a0%" in green


def test_a_comparison() -> None:
    sides = published("published:v5.0/NVIDIA/llama31_405b/eos-dfw_n64*") + published("v5.0/CoreWeave*/llama31_405b")
    html = compare_page.page(compare(sides))
    assert not EXTERNAL.search(html)
    assert "B over A" in html
    assert "2.222x" in html
    assert html.count('class="factors"') == len(sides) - 1
    other = compare_page.page(compare([sides[0], published("v5.0/*/rgat")[0]]))
    assert "Nothing to compare: different benchmarks" in other
