"""What a prediction's terminal text, JSON and page say: the record's own figures, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from prediction_cases import answered
from timetrial.errors import UserError
from timetrial.predict.answer import named_stack, request_of
from timetrial.predict.memory import GIB
from timetrial.report import prediction_charts as charts
from timetrial.report import prediction_timeline as timeline
from timetrial.report import text as numbers
from timetrial.report.answered import answered as all_of
from timetrial.report.answered import dots
from timetrial.report.prediction import Answered, as_json, page, text, write_page
from timetrial.report.prediction_record import PARTS, shares
from timetrial.report.prediction_sure import sure
from timetrial.report.prediction_svg import log_ticks, ticks
from timetrial.systems.rates import Rates

BOTH = pytest.mark.parametrize("name", ["pipelined", "adapted"])


class Read(HTMLParser):
    """Texts of a page's cells by table id, of its headline by label, and everything that would ask the network."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.headline: dict[str, tuple[str, str]] = {}
        self.refers: list[str] = []
        self.table, self.into, self.terms = "", "", list[str]()
        self.open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "table":
            self.table = given.get("id") or ""
            self.tables.setdefault(self.table, [])
        if tag == "tr":
            self.tables.setdefault(self.table, []).append([])
        if tag in ("td", "th"):
            self.tables[self.table][-1].append("")
        if tag in ("dt", "dd"):
            self.terms.append("")
        self.into = tag
        self.refers += [v for k, v in given.items() if k in ("src", "href", "xlink:href") and v and v != "data:,"]
        self.refers += ["script"] if tag == "script" else []

    def handle_endtag(self, tag: str) -> None:
        self.into = "td" if tag == "span" and self.into == "span" else ""
        if tag == "dl":
            label, value, detail = self.terms
            self.headline[label] = (value, detail)
            self.terms = []

    def handle_data(self, data: str) -> None:
        if self.into in ("td", "th") and self.tables.get(self.table) and self.tables[self.table][-1]:
            self.tables[self.table][-1][-1] += data.strip()
        if self.into in ("dt", "dd"):
            self.terms[-1] += data


# ---- the record ----------------------------------------------------------------------------------


@BOTH
def test_mfu_is_held_against_the_format_of_the_linear_layers(name: str) -> None:
    a = answered(name)
    assert a.peak == ("fp8", a.prediction.system.accelerator.peak_flops["fp8"])
    for precision, fmt in (("bf16", "bf16"), ("mxfp8", "fp8"), ("fp8_block", "fp8"), ("tf32", "tf32")):
        assert with_precision(a, precision).peak[0] == fmt
    assert with_precision(a, "nvfp4").peak[0] == ("fp4" if name == "pipelined" else "fp8")  # H100 has no fp4
    plan, step = a.prediction.request.plan, a.prediction.step
    flops = a.prediction.request.config.flops_per_step
    assert a.mfu == pytest.approx(flops / step.seconds / plan.world_size / a.peak[1])


def with_precision(a: Answered, precision: str) -> Answered:
    asked = dataclasses.replace(a.prediction.request, precision=precision)
    return dataclasses.replace(a, prediction=dataclasses.replace(a.prediction, request=asked))


@pytest.mark.parametrize(
    "parts", [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 5.0, "b": 1e-9}, {"a": 0.333, "b": 0.0, "c": 7.0}, {"a": 0.0}]
)
def test_shares_add_up_to_one_hundred_per_cent(parts: dict[str, float]) -> None:
    found = shares(parts)
    whole = sum(parts.values())
    assert round(sum(found.values()), 9) == (1.0 if whole else 0.0)
    for part, share in found.items():
        assert whole == 0 or abs(share - parts[part] / whole) < 0.001


@BOTH
def test_the_breakdown_is_that_of_the_step(name: str) -> None:
    a = answered(name)
    assert a.breakdown == dict(a.prediction.step.parts)
    assert set(a.breakdown) <= set(PARTS), "a part of the step has no words"
    assert sum(a.breakdown.values()) == pytest.approx(a.prediction.step.seconds)


# ---- text ----------------------------------------------------------------------------------------


@BOTH
def test_text_says_the_records_figures(name: str) -> None:
    a = answered(name)
    p, found = a.prediction, text(a)
    plain = re.sub(r"\s+", " ", found)
    lines = found.splitlines()
    assert 25 <= len(lines) <= 38
    assert max(map(len, lines)) <= 100
    assert numbers.duration(p.step.seconds).replace(numbers.NBSP, " ") in plain
    assert f"{numbers.significant(p.tokens_per_s_per_gpu, 4)} tokens/s per GPU" in plain
    assert f"{numbers.significant(p.flops_per_s_per_gpu / 1e12, 4)} model TFLOP/s per GPU" in plain
    assert f"MFU {100 * a.mfu:.1f} % of dense fp8" in plain
    assert a.time is not None
    assert a.energy is not None
    assert f"Time to train {numbers.significant(a.time.minutes)} min" in plain
    assert f"{numbers.significant(a.energy.kwh)} kWh" in plain
    assert f"of {numbers.duration(a.time.evaluation_s)})".replace(numbers.NBSP, " ") in plain
    assert f"{numbers.count(a.time.samples_low)} to {numbers.count(a.time.samples_high)}" in plain
    assert "1 micro batches" not in plain
    assert "1 evaluations" not in plain
    assert a.memory is not None
    assert f"Memory {a.memory.peak.total / GIB:.1f} of" in plain
    assert a.interval.basis in plain
    for note in a.notes:
        assert note in plain
    bars = [line.rsplit(None, 2) for line in lines if line.startswith("  ") and re.search(r"\d +\d+\.\d$", line)]
    assert round(sum(float(share) for *_, share in bars), 6) == 100.0
    assert sum(float(s) for _, s, _ in bars) == pytest.approx(p.step.seconds, abs=0.0006 * len(bars))


def test_text_without_what_is_not_known() -> None:
    a = dataclasses.replace(answered("adapted"), memory=None, time=None, energy=None, notes=(), fits=True, reason="")
    found = text(a)
    assert "Time to train  none" in found
    assert "Memory  " not in found
    assert "Energy" not in found
    many = dataclasses.replace(answered("adapted"), notes=tuple(f"note {i}" for i in range(9)))
    assert "and 5 more notes" in text(many)


def test_a_run_that_does_not_fit_says_so() -> None:
    a = dataclasses.replace(answered("adapted"), fits=False, reason="out of memory by 3.0 GiB")
    assert "NO: out of memory by 3.0 GiB" in text(a)
    assert as_json(a)["fits"] is False
    assert "Does not fit" in page(a)


# ---- JSON ----------------------------------------------------------------------------------------


@BOTH
def test_json_has_every_figure_under_a_key_with_its_unit(name: str) -> None:
    a = answered(name)
    p = a.prediction
    found = json.loads(json.dumps(as_json(a), allow_nan=False))
    assert found["step_time_s"] == p.step.seconds
    interval = found["interval"]
    assert (interval["low_s"], interval["high_s"]) == (a.interval.low_s, a.interval.high_s)
    assert (interval["basis"], interval["outside_validated"]) == (a.interval.basis, False)
    assert found["tokens_per_s_per_gpu"] == p.tokens_per_s_per_gpu
    assert found["model_tflops_per_gpu"] == p.flops_per_s_per_gpu / 1e12
    assert found["mfu"] == a.mfu
    assert found["breakdown_s"] == dict(p.step.parts)
    assert a.memory is not None
    memory = found["memory_gib"]
    assert memory["peak"] == a.memory.peak.total / GIB
    assert sum(memory["by_kind"].values()) == pytest.approx(memory["peak"])
    assert [stage["total"] for stage in memory["by_stage"]] == [rank.total / GIB for rank in a.memory.ranks]
    assert a.time is not None
    assert found["time_to_train_min"]["expected"] == a.time.minutes
    assert found["time_to_train_min"]["low"] < a.time.minutes < found["time_to_train_min"]["high"]
    assert found["time_to_train_min"]["evaluation_s"] == p.step.evaluation_s
    needed = [found["time_to_train_min"][key] for key in ("samples_low", "samples", "samples_high")]
    assert needed == sorted(needed)
    assert found["plan"] == dataclasses.asdict(p.request.plan)
    assert found["system"]["name"] == p.system.name
    assert found["stack"]["name"] == p.stack.name
    assert found["sources"]["system"] == dict(p.system.sources)
    assert found["notes"] == list(a.notes)
    assert any("constants" in words for words in found["sources"]["measured"] + found["assumed"])


def test_json_has_null_where_there_is_no_number() -> None:
    a = answered("adapted")
    odd = dataclasses.replace(
        a, memory=None, time=None, energy=None, interval=dataclasses.replace(a.interval, high_s=math.inf)
    )
    found = json.loads(json.dumps(as_json(odd), allow_nan=False))
    assert [found[key] for key in ("memory_gib", "time_to_train_min", "energy_kwh")] == [None] * 3
    assert found["interval"]["high_s"] is None


def test_launches_that_are_much_of_the_step_are_told_with_what_helps() -> None:
    asked = "llama31_8b", "h100-sxm", 8
    small = ["model.dim=1024", "model.ffn_dim=2048", "data.seq_len=512"]
    for sets, tp, graphs, words in (
        (small, 8, "none", r"--graphs layer: [\d.]+ .?s, --graphs full: "),
        (small, 8, "full", "larger micro batch"),
        ([], 1, "none", None),
    ):
        request = request_of(*asked, plan=f"tp={tp},gbs=32", graphs=graphs, sets=sets)
        notes = all_of(request, named_stack("ngc25.09", request)).notes
        found = [note for note in notes if note.startswith("the host's launches")]
        assert len(found) == (words is not None)
        assert words is None or re.search(words, found[0].replace(numbers.NBSP, " "))


def test_this_machine_is_measured_and_has_cores() -> None:
    a = answered("adapted")
    processor = dataclasses.replace(a.prediction.system.accelerator, generation="cpu")
    system = dataclasses.replace(a.prediction.system, accelerator=processor)
    here = dataclasses.replace(a, prediction=dataclasses.replace(a.prediction, system=system))
    found = sure(here)
    assert any("figures of this machine" in words for words in found.measured)
    assert not any("figures of" in words for words in found.published)
    assert "tokens/s per core" in text(here)
    assert "GPU" not in text(here).replace(here.title, "").replace(a.energy.basis if a.energy else "", "")
    source = page(here)
    assert "Tokens/s per core" in source
    assert "per GPU" not in source


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_dots_are_alike_where_precision_and_batch_are(precision: str) -> None:
    gbs = {"fp8": 896, "nvfp4": 1152}[precision]
    plan = f"tp=4,pp=8,vp=8,cp=2,gbs={gbs}"
    request = request_of("llama31_405b", "gb200-nvl72", 512, plan=plan, precision=precision)
    made = dataclasses.replace(answered("pipelined").prediction, request=request)
    found = dots(made)
    assert any(run.alike for run in found)
    assert any(not run.alike for run in found)
    for run in found:
        assert run.alike == (run.label.endswith(f", {precision}") and run.mapping.endswith(f" gbs{gbs}"))


# ---- page ----------------------------------------------------------------------------------------


@BOTH
def test_the_page_says_the_records_figures(name: str) -> None:
    a = answered(name)
    p = a.prediction
    source = page(a)
    read = Read(source)
    assert read.headline["Step time"][0] == numbers.duration(p.step.seconds)
    assert read.headline["Tokens/s per GPU"][0] == numbers.significant(p.tokens_per_s_per_gpu, 4)
    assert read.headline["Model TFLOP/s per GPU"][0] == numbers.significant(p.flops_per_s_per_gpu / 1e12, 4)
    assert read.headline["MFU"][0] == numbers.percent(a.mfu)
    assert a.time is not None
    assert a.memory is not None
    assert read.headline["Time to train"][0] == f"{numbers.significant(a.time.minutes)}{numbers.NBSP}min"
    assert read.headline["Memory of the fullest GPU"][0] == numbers.size(a.memory.peak.total)
    _, *parts, whole = read.tables["breakdown"]
    wanted = {PARTS[part]: numbers.duration(s) for part, s in p.step.parts.items() if s}
    assert {words: seconds for words, seconds, _ in parts} == wanted
    assert whole[1] == numbers.duration(p.step.seconds)
    assert round(sum(float(share.split(numbers.NBSP)[0]) for *_, share in parts), 6) == 100.0
    assert len(read.tables["scaled"]) == 1 + len(a.scaling)
    assert len(read.tables["published"]) == 1 + len(a.published)
    assert read.tables["published"][0] == ["run", "accelerators", "batch", "plan", "step"]
    assert read.tables["published"][-1][2:4] == ["2,048", "tp4 pp8 vp8 cp2 dp16 mbs1"]
    assert source.count('opacity="0.35"') == 2, "one run of another batch, in the wide and the narrow chart"
    assert "published, another precision or batch" in source
    span = f"{numbers.count(a.time.samples_low)} to {numbers.count(a.time.samples_high)}"
    assert f"The target takes {numbers.count(a.time.samples)} samples, {span} by run" in source
    assert numbers.duration(a.time.evaluation_s) in read.headline["Time to train"][1]
    assert len(read.tables["mapping"]) == 1 + len(a.groups)
    for rank in a.memory.ranks:
        assert numbers.size(rank.total) in source


def test_the_page_says_which_groups_are_inside_of_a_domain() -> None:
    rows = {
        words: (ranks, inside[-3:]) for words, ranks, inside, _ in Read(page(answered("pipelined"))).tables["mapping"]
    }
    assert rows["tensor parallel"] == ("4", "yes")
    assert rows["pipeline"] == ("8", "yes")
    assert rows["data parallel"][1].strip() == "no"


@BOTH
def test_the_bar_of_the_breakdown_is_as_long_as_its_parts(name: str) -> None:
    bar = page(answered(name)).split('class="bar tall"')[1].split("</div>")[0]
    lengths = [float(x) for x in re.findall(r"flex: ([\d.]+) 0 0", bar)]
    assert round(sum(lengths), 9) == 1.0


@BOTH
def test_the_page_asks_nothing_of_the_network_and_escapes_what_others_wrote(name: str) -> None:
    source = page(answered(name))
    assert Read(source).refers == []
    assert "url(" not in source
    assert "<Somebody>" not in source
    assert "&lt;Somebody&gt; &amp; sons" in source
    assert "TP &lt;4&gt; with CP 2" in source
    assert len(source) < 1_500_000


def test_the_page_without_what_is_not_known() -> None:
    a = dataclasses.replace(
        answered("pipelined"),
        memory=None,
        time=None,
        energy=None,
        notes=(),
        scaling=(),
        published=(),
        reason="not asked",
    )
    source = page(a)
    assert Read(source).headline["Time to train"][0] == numbers.NONE
    assert "not asked" in source
    assert "No other numbers of accelerators were predicted" in source


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = write_page(answered("adapted"), tmp_path / "page.html")
    assert path.read_text(encoding="utf-8") == page(answered("adapted"))
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(UserError, match="cannot be written"):
        write_page(answered("adapted"), tmp_path / "no" / "page.html")


def test_what_lies_outside_of_the_validated_range_is_told() -> None:
    a = answered("adapted")
    words = "Nothing like it was validated"
    assert words not in page(a)
    assert words in page(dataclasses.replace(a, interval=dataclasses.replace(a.interval, outside=True)))


def test_what_is_assumed_is_told() -> None:
    a = answered("pipelined")
    found = sure(a)
    for figure in a.prediction.system.assumed:
        assert any(figure in words for words in found.assumed)
    assert any(words.startswith("power: ") for words in found.assumed)
    assert any("products in fp8" in words for words in found.measured)
    borrowed = [words for words in found.assumed if words.startswith("curves of a related accelerator")]
    assert "attention.bf16.backward" in Rates.load(a.prediction.system).assumed
    assert len(borrowed) == 1
    assert "attention in bf16 backward" in borrowed[0]
    assert not any("fp32" in words for words in found.measured + found.assumed), "a format that the run has not"
    assert any("samples to train" in words for words in found.assumed)  # GBS 896 is outside
    assert any("samples to train" in words for words in sure(answered("adapted")).published)


# ---- timeline and charts -------------------------------------------------------------------------


@BOTH
def test_the_timeline_is_that_of_the_step(name: str) -> None:
    a = answered(name)
    step = a.prediction.step
    laid = timeline.lay(a)
    assert laid.seconds == pytest.approx(step.seconds, rel=1e-9)
    if step.timeline is not None:
        assert laid.pipeline_s == pytest.approx(step.timeline.seconds, rel=1e-9)
    passes = [i for i in laid.intervals if i.stream == "compute"]
    assert len(passes) == 2 * step.micro_batches * len(step.stages)
    for rank in range(laid.ranks):
        busy = sum(i.end - i.start for i in passes if i.rank == rank)
        idle = sum(end - start for start, end in timeline.waits(laid)[rank])
        assert busy + idle == pytest.approx(laid.pipeline_s)


@BOTH
@pytest.mark.parametrize("kind", ["F", "B", "I", "W"])
def test_kernels_of_a_pass_fill_it_in_order(name: str, kind: str) -> None:
    a = answered(name)
    layers = ("embed", "block", "block", "head")
    pieces = timeline.passes(a, layers, kind)
    for stream in ("compute", "communication"):
        own = [p for p in pieces if p.stream == stream]
        assert all(p.end <= q.start + 1e-12 for p, q in itertools.pairwise(own))
        assert all(0 <= p.start < p.end <= 1 for p in own)
    order = list(dict.fromkeys(p.layer for p in pieces))
    expected = [f"{layer} {i}" for i, layer in enumerate(layers)]
    expected = expected if kind == "F" else expected[::-1]
    assert order == [layer for layer in expected if layer in order]
    phases = {p.kernel.phase for p in pieces}
    assert phases == {"forward"} if kind == "F" else "forward" not in phases
    if kind == "W":
        assert {p.kernel.role for p in pieces} == {"wgrad"}
    if kind in "FB":
        price = timeline.pricing(a)
        kernels = [k for x in layers for k in a.prediction.layers[x].kernels if (k.phase == "forward") == (kind == "F")]
        whole = sum(
            price.pass_s(
                price.totals([k for k in a.prediction.layers[x].kernels if (k.phase == "forward") == (kind == "F")])
            ).total
            for x in layers
        )
        products = [p for p in pieces if p.kernel.kind == "matmul"]
        assert len(products) == sum(k.kind == "matmul" for k in kernels)
        assert 0.3 < sum(p.end - p.start for p in products) < 1
        assert whole > 0


def test_charts_draw_every_pass_or_its_share() -> None:
    few, many = timeline.lay(answered("adapted")), timeline.lay(answered("pipelined"))
    assert charts.readable(few, wide=True)
    assert not charts.readable(many, wide=True)
    drawn = charts.step(few, True, "t")
    passes = sum(d.count("M") for d in re.findall(r'd="([^"]*)" fill="var\(--(?:forward|backward)\)"', drawn))
    assert passes == 2 * answered("adapted").prediction.step.micro_batches
    boxes = [re.findall(r"h([\d.]+)v", d) for d in re.findall(r'd="([^"]*)" fill="var\(--forward\)"', drawn)]
    forward_s = sum(i.end - i.start for i in few.intervals if i.kind == "F")
    width = sum(float(w) for found in boxes for w in found)
    assert width == pytest.approx(forward_s / few.seconds * (charts.WIDE - 70), rel=0.02)
    assert len(charts.step(many, True, "t")) < 200_000
    assert 0 < charts.start_s(many) < many.seconds
    assert charts.drawn(8) == list(range(8))
    assert len(charts.drawn(64)) == charts.MOST_RANKS


def test_ticks_are_round_and_inside() -> None:
    assert ticks(18.9, 8) == [0, 2.5, 5, 7.5, 10, 12.5, 15, 17.5]
    assert ticks(0.0, 8) == [0.0]
    assert log_ticks(4.0, 40.0, 7) == pytest.approx([5, 7, 10, 15, 20, 30])
    for low, high in ((0.9, 1.1), (1e-4, 3.0), (3.0, 3.4)):
        found = log_ticks(low, high, 7)
        assert found == sorted(found)
        assert 1 <= len(found) <= 7
        assert all(low <= x <= high for x in found)


def test_the_text_and_json_need_no_torch_and_no_plots() -> None:
    code = (
        "import sys, timetrial.report.prediction, timetrial.report.perfetto;"
        "print([m for m in ('torch', 'matplotlib', 'jinja2', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
