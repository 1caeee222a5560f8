"""The run report: what it reads, what it says, and that its figures are the run's."""

from __future__ import annotations

import errno
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from report_runs import make, read_lines, write, write_lines
from timetrial.errors import UserError
from timetrial.report import html, run, summary, text, thin

CSS = Path(html.__file__).parent / "templates" / "report.css"


class Page(HTMLParser):
    """Elements, attributes and visible words of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._words: list[str] = []
        self._hidden = 0
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._hidden += tag in ("style", "svg", "script")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "svg", "script")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self._words).replace("\u2060", "").split())

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}


def page(run_dir: Path) -> Page:
    return Page(html.write(run_dir).read_text(encoding="utf-8"))


# ---- what the page says --------------------------------------------------------------------------


def test_a_finished_run_shows_its_verdict_and_figures(tmp_path: Path) -> None:
    words = page(make(tmp_path)).words
    rows, evaluations = read_lines(tmp_path / "metrics.jsonl"), read_lines(tmp_path / "evaluations.jsonl")
    times = [row["step_time_s"] * 1000 for row in rows]
    whole = evaluations[-1]["elapsed_s"]
    assert f"Target reached in {int(whole // 60)} min {round(whole) % 60} s" in words
    assert "mini preset: not an MLPerf result" in words
    assert "rules of MLPerf Training v5.1" in words
    assert f"Final quality {evaluations[-1]['value']:.3f} log perplexity; target 3.3 or lower" in words
    assert "Samples 4,800 in 300 optimizer steps" in words
    assert "Tokens per second 12,346" in words
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    assert (
        f"Step time {statistics.median(times):.0f} ms median; p10\u2013p90 {tenths[0]:.0f}\u2013{tenths[8]:.0f} ms"
        in words
    )
    assert "MFU 35.2 % of 1.11 TFLOP/s, this machine\u2019s measured matrix-multiply rate" in words
    assert "Waiting for data 1.4 % of step time" in words
    assert f"Evaluation {100 * 1.9 * 6 / whole:.1f} % of the run; 6 evaluations" in words


def test_plan_configuration_environment_and_command_are_there(tmp_path: Path) -> None:
    shown = page(make(tmp_path))
    for expected in (
        "TP 1 \u00b7 CP 1 \u00b7 DP 2 \u00b7 PP 1 2 ranks: tensor 1, context 1, data 2, pipeline 1",
        "tp-cp-dp-pp axes from the fastest",
        "16 samples 2 micro batch \u00d7 4 accumulated \u00d7 2 data parallel",
        "optim.clip_norm 1.0",
        "evaluation.higher_is_better false",
        "Processor A Processor",
        "Memory 23.6 GiB",
        "Accelerators 2 \u00d7 An Accelerator (141 GiB)",
        "tokenizers not recorded",
        "Date 2026-01-31 17:05 UTC",
        "timetrial train llama31_8b --preset mini --plan dp=2 --seed 1",
        "At git revision 0123456789abcdef0123456789abcdef01234567 , with changes that were not committed",
    ):
        assert expected in shown.words
    assert "details" in shown.tags()


def test_sections_stand_in_their_order(tmp_path: Path) -> None:
    words = page(make(tmp_path)).words
    order = ["Target reached", "not an MLPerf result", "Time to train", "Loss against samples", "Throughput over time"]
    order += ["Where the time goes", "The whole run", "Evaluations", "Learning rate", "Plan and configuration"]
    places = [words.index(heading) for heading in [*order, "Environment", "Run it again"]]
    assert places == sorted(places)


def test_evaluations_are_listed_with_their_distance_to_the_target(tmp_path: Path) -> None:
    words = page(make(tmp_path, status=None)).words
    for row in read_lines(tmp_path / "evaluations.jsonl"):
        gap = text.significant(row["value"] - 3.3).replace("-", "\u2212")
        gap = gap if gap.startswith("\u2212") else "+" + gap
        assert f"{row['step']} {row['samples']:,} {row['value']:.3f} {gap} 1.90 s" in words


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("aborted", "Target not reached The run ended after 40 steps and"),
        ("stopped", "Target not reached Stopped as asked after 40 steps and"),
        (None, "Unfinished No result yet after 40 steps"),
    ],
)
def test_other_ends_are_told_apart(tmp_path: Path, status: str | None, words: str) -> None:
    shown = page(make(tmp_path, steps=40, every=20, status=status, target=1.0)).words
    assert words in shown
    assert "Target reached" not in shown
    assert f"Time to train {text.NONE} {'target not reached' if status else 'unfinished'}; ran" in shown
    assert "None of 2 evaluations met the target of 1 (log perplexity); the nearest was" in shown


def test_a_run_without_result_gets_its_figures_from_its_steps(tmp_path: Path) -> None:
    words = page(make(tmp_path, status=None)).words
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert f"Tokens per second {statistics.median(row['tokens_per_s'] for row in rows):,.0f}" in words
    assert f"MFU {100 * statistics.median(row['mfu'] for row in rows):.1f} %" in words
    waited = sum(row["phases"]["data"] for row in rows) / sum(row["step_time_s"] for row in rows)
    assert f"Waiting for data {100 * waited:.1f} %" in words


def test_an_mfu_above_one_is_doubted(tmp_path: Path) -> None:
    make(tmp_path, steps=4, every=2)
    result = json.loads((tmp_path / "result.json").read_text())
    write(tmp_path / "result.json", {**result, "mfu": 5.75, "matmul_flops_per_s": 1.4e9})
    words = page(tmp_path).words
    assert "MFU 575 % of 1.40 GFLOP/s, this machine\u2019s measured matrix-multiply rate; above 100 %" in words


def test_one_step_and_no_evaluation(tmp_path: Path) -> None:
    words = page(make(tmp_path, steps=1, every=0, status=None)).words
    assert "Samples 16 in 1 optimizer step Tokens" in words
    assert "No evaluation was made" in words
    assert "Evaluations None was made. Recipe" in words


def test_a_diverged_run_says_where(tmp_path: Path) -> None:
    source = html.write(make(tmp_path, nan_from=201, steps=220, status="aborted", target=1.0)).read_text()
    words = Page(source).words
    assert "Target not reached The loss was no longer finite at step 201." in words
    assert "It was not finite in 20 steps, first at step 201." in words
    assert "loss not finite" in words
    assert "nan" not in "".join(re.findall(r' (?:d|x|y|viewBox)="[^"]*"', source)).lower()


def test_losses_that_were_never_finite(tmp_path: Path) -> None:
    make(tmp_path, steps=5, every=5, nan_from=1, status="aborted")
    words = page(tmp_path).words
    assert "No training loss was finite." in words
    assert "The loss was no longer finite at step 1." in words


def test_a_run_that_was_not_mini_carries_no_notice(tmp_path: Path) -> None:
    words = page(make(tmp_path, preset="official", status=None)).words
    assert "not an MLPerf result" not in words
    assert "official preset" in words


def test_a_metric_on_its_own_scale_gets_its_own_axis(tmp_path: Path) -> None:
    source = html.write(make(tmp_path, metric="accuracy", higher=True, target=0.75)).read_text()
    assert "target 0.75 or higher" in Page(source).words
    chart = re.search(r'<div class="wide"><svg.*?</svg>', source, re.DOTALL)
    assert chart is not None
    drawn = re.findall(r"<text[^>]*>([^<]*)<", chart[0])
    assert {"training loss", "quality", "target 0.75", "0.55", "8"} <= set(drawn)


def test_a_spike_makes_the_loss_axis_logarithmic(tmp_path: Path) -> None:
    drawn = re.findall(r"<text[^>]*>([^<]*)<", html.write(make(tmp_path, spike=40_000.0)).read_text())
    assert {"10", "100", "1,000", "10,000"} <= set(drawn)


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    path = html.write(make(tmp_path, steps=100_000, every=100, target=1.0, status="stopped"))
    assert path.stat().st_size < 2_000_000
    words = Page(path.read_text()).words
    assert "in 100,000 optimizer steps" in words
    assert "334 of 1000 are shown, evaluations.jsonl has all" in words
    assert " 100,000 1,600,000 " in words  # the last evaluation is always among them


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    make(tmp_path, steps=4, every=0, status=None)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0, "samples": 16, "step_time_s": 0.5, "mfu": None}])
    write(tmp_path / "environment.json", {})
    words = page(tmp_path).words
    for missing in ("Throughput", "Step time by phase", "The learning rate", "The gradient norm"):
        assert f"{missing} was not recorded." in words
    assert "The command was not recorded." in words
    assert f"Waiting for data {text.NONE}" in words


# ---- safe and self-contained ---------------------------------------------------------------------


def test_the_page_asks_for_nothing_and_runs_nothing(tmp_path: Path) -> None:
    shown = page(make(tmp_path))
    assert not shown.tags() & {"script", "img", "iframe", "object", "embed", "base"}
    for tag, attributes in shown.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                assert value is not None
                assert value.startswith(("#", "data:")), (tag, name, value)
    assert "url(" not in CSS.read_text()
    assert "@import" not in CSS.read_text()


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> $\\frac{1}{$"
    make(tmp_path, workload=evil, metric=f"loss {evil}", status=None)
    write(tmp_path / "environment.json", {"command": evil, "date": evil, "processor": {evil: evil}, "revision": evil})
    shown = page(tmp_path)
    assert not shown.tags() & {"script", "img"}
    assert not [name for _, attributes in shown.elements for name in attributes if name.startswith("on")]
    assert " ".join(evil.split()) in shown.words


def test_ids_are_unique_and_references_resolve(tmp_path: Path) -> None:
    source = html.write(make(tmp_path)).read_text()
    ids = [attributes["id"] for _, attributes in Page(source).elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#|labelledby=")([^")]+)', source)) <= set(ids)


def test_charts_take_every_colour_from_the_page(tmp_path: Path) -> None:
    source = html.write(make(tmp_path, nan_from=290, target=1.0, status="aborted")).read_text()
    charts = "".join(re.findall(r"<svg.*?</svg>", source, re.DOTALL))
    assert not re.findall(r"#[0-9a-fA-F]{6}\b", charts)
    defined = set(re.findall(r"--([a-z]+):", CSS.read_text()))
    assert set(re.findall(r"var\(--([a-z]+)\)", source)) <= defined


def test_each_chart_has_a_description(tmp_path: Path) -> None:
    charts = [attributes for tag, attributes in page(make(tmp_path)).elements if tag == "svg"]
    assert len(charts) == 8
    assert all(chart["role"] == "img" and len(chart["aria-label"] or "") > 20 for chart in charts)


def luminance(color: str) -> float:
    """WCAG 2.2, relative luminance."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_in_light_dark_and_print() -> None:
    schemes = re.findall(r":root \{(.*?)\}", CSS.read_text(), re.DOTALL)
    assert len(schemes) == 3
    for scheme in schemes:
        colors = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", scheme))

        def contrast(a: str, b: str, colors: dict[str, str] = colors) -> float:
            dark, light = sorted((luminance(colors[a]), luminance(colors[b])))
            return (light + 0.05) / (dark + 0.05)

        for words in ("ink", "muted", "target", "bad", "open"):
            assert min(contrast(words, "surface"), contrast(words, "page")) >= 4.5, (words, colors)
        for drawn in ("loss", "evaluation", *run.PHASES):
            assert contrast(drawn, "surface") >= 3.0, (drawn, colors)


def test_the_library_loads_plots_only_when_a_page_is_made(tmp_path: Path) -> None:
    code = (
        "import sys; import timetrial.report.html as html; from pathlib import Path\n"
        "early = {'matplotlib', 'jinja2', 'torch'} & set(sys.modules)\n"
        "html.write(Path(sys.argv[1]))\n"
        "late = {'matplotlib.pyplot', 'torch'} & set(sys.modules)\n"
        "import matplotlib; print(early, late, matplotlib.rcParams['svg.fonttype'])"
    )
    command = [sys.executable, "-c", code, str(make(tmp_path, steps=3))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "set()", "path"]


# ---- files that are not as they should be --------------------------------------------------------


def test_a_line_cut_off_by_a_kill_is_left_out_and_said(tmp_path: Path) -> None:
    make(tmp_path, steps=20, every=10, status=None)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-30])
    words = page(tmp_path).words
    assert "in 19 optimizer steps" in words
    assert "A last line that was cut off while being written is left out." in words


def test_the_later_record_of_a_step_counts(tmp_path: Path) -> None:
    make(tmp_path, steps=20, every=10, status=None)
    rows = read_lines(tmp_path / "metrics.jsonl")
    again = [{**row, "loss": 1.25, "elapsed_s": row["step"] * 0.1} for row in rows[10:15]]
    write_lines(tmp_path / "metrics.jsonl", [*rows[:15], *again])
    read = run.read(tmp_path)
    assert read.steps.loss.tolist() == [*(row["loss"] for row in rows[:10]), *[1.25] * 5]
    assert "5 steps were recorded twice" in page(tmp_path).words
    np.testing.assert_allclose(run.clock(read), np.cumsum([row["step_time_s"] for row in rows[:15]]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json: missing"),
        ("config.json", b"{", "config.json: not JSON at line 1"),
        ("config.json", b"[]", "config.json: holds no JSON object"),
        ("config.json", b"{}", "config.json: has no workload"),
        (
            "config.json",
            b'{"workload": "w", "preset": "mini", "round": "v5.1"}',
            "config.json: has no group evaluation",
        ),
        ("environment.json", None, "environment.json: missing"),
        ("environment.json", b"\xff\xfe", "environment.json: not UTF-8"),
        ("metrics.jsonl", None, "metrics.jsonl: missing"),
        ("metrics.jsonl", b"", "metrics.jsonl: no step recorded"),
        ("metrics.jsonl", b'{"step": 1\n{}\n', "metrics.jsonl line 1: not JSON"),
        ("metrics.jsonl", b"3\n", "metrics.jsonl line 1: holds no JSON object"),
        ("metrics.jsonl", b'{"loss": 1}\n', "metrics.jsonl line 1: step is not a number"),
        ("metrics.jsonl", b'{"step": 1, "loss": "x"}\n', "metrics.jsonl line 1: loss is 'x', not a number"),
        ("metrics.jsonl", b'{"step": 1, "loss": true}\n', "metrics.jsonl line 1: loss is 'True', not a number"),
        ("metrics.jsonl", b'{"step": 1, "loss": 1, "samples": 8}\n', "line 1: step_time_s is not a number"),
        ("metrics.jsonl", b'{"step": 1, "phases": 3}\n', "metrics.jsonl line 1: phases is no JSON object"),
        ("metrics.jsonl", b'{"step": 1, "phases": {"data": []}}\n', "line 1: phases.data is '[]', not a number"),
        ("metrics.jsonl", b'{"step": 1' + b"0" * 400 + b"}\n", "line 1: step is '1000"),
        ("evaluations.jsonl", b"{]\n", "evaluations.jsonl line 1: not JSON"),
        ("evaluations.jsonl", b'{"step": null, "samples": 1}\n', "evaluations.jsonl line 1: step is not a number"),
        ("evaluations.jsonl", b'{"step": 1, "samples": 1, "value": "good"}\n', "line 1: value is 'good', not a number"),
        ("result.json", b"", "result.json: not JSON"),
        ("result.json", b'{"status": "won"}', "result.json: status is 'won'"),
        ("result.json", b'{"status": "success", "mfu": {}}', "result.json: mfu is '{}', not a number"),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    make(tmp_path, steps=4, every=2)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        html.write(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run directory"):
        html.write(tmp_path / "nowhere")


def test_a_full_disk_leaves_the_page_before_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = html.write(make(tmp_path, steps=4))
    before, files = path.read_text(), sorted(tmp_path.iterdir())

    def full(self: Path, *_: object, **__: object) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"report\.html: cannot be written: No space left on device"):
        html.write(tmp_path)
    assert path.read_text() == before
    assert sorted(tmp_path.iterdir()) == files


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    first = html.write(make(tmp_path)).read_bytes()
    assert html.write(tmp_path).read_bytes() == first


# ---- the numbers behind it -----------------------------------------------------------------------


def test_thinning_keeps_means_and_extremes() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(1.0, 1004.0), rng.normal(size=1003)
    y[[5, 400]] = np.nan
    y[500:540] = np.inf
    curve = thin.curve(x, y, 50)
    first = [i * 1003 // 50 for i in range(50)] + [1003]
    for i, (start, end) in enumerate(itertools.pairwise(first)):
        kept = [value for value in y[start:end] if math.isfinite(value)]
        assert curve.x[i] == pytest.approx(statistics.mean(x[start:end]))
        if not kept:
            assert math.isnan(curve.mean[i])
            continue
        assert curve.mean[i] == pytest.approx(statistics.mean(kept))
        assert (curve.low[i], curve.high[i]) == (min(kept), max(kept))
    assert curve.thinned
    assert np.isnan(curve.mean).any()


def test_few_points_are_drawn_as_they_are() -> None:
    curve = thin.curve(np.arange(3.0), np.array([1.0, np.inf, 3.0]), 50)
    np.testing.assert_array_equal(curve.mean, [1.0, np.nan, 3.0])
    assert not curve.thinned


def test_bin_means_hold_every_step() -> None:
    y = np.arange(1000.0) ** 2
    means, last = thin.means(y, 7)
    lengths = np.diff(np.concatenate([[-1], last]))
    assert lengths.sum() == 1000
    assert (means * lengths).sum() == pytest.approx(y.sum())


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    make(tmp_path)
    rows = read_lines(tmp_path / "metrics.jsonl")
    for row in rows:
        row["phases"]["other"] = 0.0  # as if the trainer had not noticed this part
    write_lines(tmp_path / "metrics.jsonl", rows)
    parts = summary.phases(run.read(tmp_path))
    assert sum(part.seconds for part in parts) == pytest.approx(statistics.mean(row["step_time_s"] for row in rows))
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    forward = next(part for part in parts if part.name == "forward")
    assert forward.seconds == pytest.approx(statistics.mean(row["phases"]["forward"] for row in rows))


def test_the_whole_run_is_training_evaluation_and_the_rest(tmp_path: Path) -> None:
    whole = summary.whole_run(run.read(make(tmp_path)))
    assert [part.name for part in whole] == ["training", "evaluation", "other"]
    assert [part.seconds for part in whole[1:]] == pytest.approx([6 * 1.9, 2.4])
    assert sum(part.share for part in whole) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.00085, "850 \u00b5s"),
        (0.0123, "12.3 ms"),
        (0.99951, "1.00 s"),
        (4.2, "4.20 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (221.4, "3 min 41 s"),
        (3599.7, "1 h 0 min"),
        (7500.0, "2 h 5 min"),
        (-2.0, "-2.00 s"),
        (math.nan, "\u2013"),
        (math.inf, "\u221e"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert text.duration(seconds).replace("\u00a0", " ") == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.012345, "0.0123"),
        (4.567, "4.57"),
        (12_345.0, "12,300"),
        (99.96, "100"),
        (0.0, "0"),
        (2e-5, "2e-5"),
        (-3.3, "-3.30"),
    ],
)
def test_significant_digits(value: float, words: str) -> None:
    assert text.significant(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(950, "950"), (12_500, "12,500"), (450_000, "450 k"), (1_600_000, "1.6 M"), (8.03e9, "8.03 B"), (0.25, "0.25")],
)
def test_compact_numbers(value: float, words: str) -> None:
    assert text.compact(value).replace("\u00a0", " ") == words
