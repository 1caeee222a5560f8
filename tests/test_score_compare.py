"""Results side by side: the tables of the public announcements, each row named, and what they leave out."""

import dataclasses
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from timetrial.errors import UserError
from timetrial.report import compare_text
from timetrial.results.comparison import DOUBTFUL, Comparison, Pair, compare, parse, scaling_table
from timetrial.results.lookup import one, published, table
from timetrial.results.records import Convergence, Result, Run, RunTime
from timetrial.results.sides import side

H100_405B = "published:v5.0/NVIDIA/llama31_405b/eos-dfw_n64_ngc25.01_nemo"
GB200_405B = "published:v5.0/CoreWeave*/llama31_405b/carina_ngpu512_ngc25.04_nemo"
GB200_405B_2496 = "published:v5.0/CoreWeave*/llama31_405b/carina_ngpu2496_ngc25.04_nemo"
H100_LORA = "published:v4.1/NVIDIA/llama2_70b_lora/eos_ngc24.09_nemo"
GB200_LORA = "published:v5.0/NVIDIA/llama2_70b_lora/tyche_ngpu8_ngc25.04_nemo"
H100_SD = "published:v4.1/NVIDIA/stable_diffusion/eos_ngc24.09_nemo"
GB200_SD = "published:v5.0/NVIDIA/stable_diffusion/tyche_ngpu8_ngc25.04_nemo"
H100_RGAT = "published:v4.1/NVIDIA/gnn/eos_ngc24.09_dgl"
GB200_RGAT = "published:v5.0/NVIDIA/rgat/tyche_ngpu8_ngc25.03_dgl"


def both(*queries: str) -> Comparison:
    return compare([one(query) for query in queries])


def pair(*queries: str) -> Pair:
    (found,) = both(*queries).pairs
    return found


@pytest.mark.parametrize(
    ("base", "own", "minutes", "announced", "equal_batch"),
    [
        (H100_405B, GB200_405B, (269.1216, 121.0926), "2.2", "2.2"),
        (H100_LORA, GB200_LORA, (27.9284, 11.1446), "2.5", "2.5"),
        (H100_SD, GB200_SD, (33.9671, 12.8558), "2.6", "2.6"),
        (H100_RGAT, GB200_RGAT, (11.183, 4.975), "2.2", "2.5"),  # batch 16,384 against 32,768
    ],
)
def test_speedups_announced_with_v5_0(
    base: str, own: str, minutes: tuple[float, float], announced: str, equal_batch: str
) -> None:
    """Blackwell against Hopper on as many accelerators, NVIDIA's announcement of MLPerf Training v5.0 (June 2025)."""
    found = pair(base, own)
    assert (one(base).score_min, one(own).score_min) == minutes
    assert one(base).accelerators == one(own).accelerators
    assert f"{found.speedup:.1f}" == f"{found.per_accelerator:.1f}" == announced
    assert f"{found.equal_batch_per_accelerator:.1f}" == equal_batch
    assert found.efficiency is None  # different accelerators do not scale


def test_only_gb200_gives_the_announced_stable_diffusion() -> None:
    """Of NVIDIA's entries of v5.0 with 8 accelerators; the other two figures B200 would give as well."""
    found = {
        base: f"{pair(base, own).speedup:.1f}"
        for base, own in (
            (H100_LORA, "v5.0/NVIDIA/llama2_70b_lora/nyx_n1_*"),
            (H100_SD, "v5.0/NVIDIA/stable_diffusion/nyx_n1_*"),
            (H100_RGAT, "v5.0/NVIDIA/rgat/nyx_n1_*"),
        )
    }
    assert list(found.values()) == ["2.5", "2.4", "2.2"]


def test_scaling_announced_with_v5_0() -> None:
    """90 % from 512 to 2,496 GB200: the scores give 90.9 %, which the announcement cuts, not rounds."""
    found = pair(GB200_405B, GB200_405B_2496)
    assert found.efficiency == pytest.approx(121.0926 * 512 / (27.3347 * 2496))
    assert math.floor(100 * found.efficiency) == 90
    assert f"{100 * found.efficiency:.1f}" == "90.9"
    # batch sizes 896 and 1,248: at equal batch size, and throughput alone
    assert f"{100 * found.equal_batch_efficiency:.1f}" == "92.2"
    assert f"{100 * found.throughput:.1f}" == "94.6"
    assert any("different batch sizes, 896 and 1,248" in warning for warning in found.warnings)


def test_speedups_announced_with_v5_1() -> None:
    """More than 4x over H100 on 512; 45 % faster than the 2,496 before (announcement of v5.1, November 2025)."""
    ultra = pair(H100_405B, "published:v5.1/NVIDIA/llama31_405b/theia_ngpu512*")
    assert ultra.speedup == pytest.approx(269.1216 / 64.6051)
    assert ultra.speedup > 4
    larger = pair(GB200_405B_2496, "published:v5.1/NVIDIA/llama31_405b/hsg_ngpu2560*")
    assert f"{100 * (larger.speedup - 1):.0f}" == "45"
    assert larger.per_accelerator < larger.speedup
    assert larger.efficiency is None  # two rounds: software and format have changed
    assert any("46,080" in warning and "18,432" in warning for warning in larger.warnings)
    assert any("327,360 at batch size 1,248 in v5.0, 317,952 in v5.1" in warning for warning in larger.warnings)


def test_the_announced_405b_mixes_batches_that_the_scaling_factor_makes_alike() -> None:
    found, sides = pair(H100_405B, GB200_405B), both(H100_405B, GB200_405B).sides
    assert [one_side.result.gbs for one_side in sides] == [1152, 896]
    assert [one_side.figures.samples for one_side in sides] == [276_480, 279_552]
    assert [round(one_side.scored_samples) for one_side in sides] == [322_560, 322_560]
    assert found.convergence == pytest.approx(1, abs=1e-5)
    assert found.throughput == pytest.approx(46.478 / 20.891, rel=1e-4)


def test_stable_diffusion_won_a_fifth_by_fewer_samples() -> None:
    found, sides = pair(H100_SD, GB200_SD), both(H100_SD, GB200_SD).sides
    assert f"{found.throughput:.1f}" == "2.1"
    assert found.convergence == pytest.approx(2_240_000 / 1_792_000)
    assert f"{found.equal_samples_per_accelerator:.1f}" == "2.1"
    assert [one_side.eval_share for one_side in sides] == [None, None]
    assert sides[0].eval_note == "evaluated outside of the clock"
    assert any("2,048,000 at batch size 256 in v4.1, 1,706,667 in v5.0" in warning for warning in found.warnings)


def test_factors_multiply_to_the_whole() -> None:
    rows = [result for result in table() if result.benchmark == "llama2_70b_lora" and result.score_min is not None]
    compared = compare(rows)
    whole = 0
    for found in compared.pairs:
        if None not in (found.throughput, found.convergence):
            whole += 1
            assert found.per_accelerator == pytest.approx(found.throughput * found.convergence * found.other)
    assert whole > 90


def test_evaluation_share() -> None:
    assert side(one(H100_405B)).eval_share == pytest.approx(594.93 / 60 / 230.6756)
    shares = [side(result).eval_share for result in table()]
    assert all(share is None or 0 <= share <= 1 for share in shares)
    assert sum(share is not None for share in shares) > 500


def test_throughput_that_does_not_make_up_the_time_is_doubted() -> None:
    found = pair("v5.1/University-of-Florida/retinanet?accelerators=8", "v5.1/University-of-Florida/retinanet?nodes=2")
    assert any("make 41% of its time; throughput is doubtful" in warning for warning in found.warnings)
    assert not any("doubtful" in warning for warning in pair(H100_405B, GB200_405B).warnings)
    far = [r for r in table() if abs((side(r).explained or 1) - 1) > DOUBTFUL]
    assert len(far) == 19
    assert sum(result.benchmark == "dlrm_dcnv2" for result in far) == 11


def test_energy() -> None:
    found = pair(
        "published:v4.0/smc-ac-power/llama2_70b_lora?accelerators=64",
        "published:v4.0/smc-ac-power/llama2_70b_lora?accelerators=512",
    )
    assert found.energy == pytest.approx(20_644_275 / 46_574_813)
    assert found.efficiency == pytest.approx(5.4885 * 64 / (2.0148 * 512), rel=1e-6)
    assert found.equal_batch_efficiency == pytest.approx(found.efficiency * 7131.43 / 3178.67, rel=1e-5)
    assert pair(H100_405B, GB200_405B).energy is None


def test_a_batch_above_the_reference_has_no_figure_at_equal_batch() -> None:
    large = dataclasses.replace(one(GB200_405B), gbs=20_000)
    (found,) = compare([one(H100_405B), large]).pairs
    assert found.equal_batch_min is None
    assert "20,000 is above the largest" in found.equal_batch_basis
    assert found.speedup is not None


def test_different_benchmarks_are_not_divided() -> None:
    found = pair(H100_LORA, GB200_SD)
    factors = dataclasses.asdict(found)
    assert all(value is None for name, value in factors.items() if name not in KEPT)
    assert found.warnings == ("different benchmarks, llama2_70b_lora and stable_diffusion: nothing to compare",)


KEPT = ("base", "own", "equal_batch_basis", "warnings")


def test_a_result_without_score_has_no_factors_and_says_so() -> None:
    compared = both(H100_405B, "published:v6.0/NVIDIA/llama31_405b")
    assert compared.pairs[0].speedup is None
    assert compared.pairs[0].equal_batch_min is None
    assert any(warning.endswith("no score") for warning in compared.warnings)
    assert any("NOT the official" in warning for warning in compared.warnings)
    assert compared.pairs[0].throughput == pytest.approx(93.528 / 20.891, rel=1e-3)


def own_result(verdict: str = "stands", **changed: object) -> Result:
    """A result as it is read from logs: three runs of 405B at batch size 1,152."""
    time = RunTime(600.0, 13_235.0, 595.0, 10.0, 240, 55.0, 54.0, 56.0, "logged steps", 3.0, 21.0, 880.0, 0.44, "fp8")
    runs = tuple(
        Run(Path(f"mine/result_{i}.txt"), True, "success", minutes, 276_480, 5.59, 1152, i, dropped, time=time)
        for i, (minutes, dropped) in enumerate([(230.0, "fastest"), (231.0, ""), (235.0, "slowest")])
    )
    made = Result(
        path=Path("mine"),
        round="v5.0",
        organization="us",
        system="ours",
        benchmark="llama31_405b",
        division="closed",
        accelerator="NVIDIA H100-SXM5-80GB",
        accelerators=512,
        nodes=64,
        gbs=1152,
        score_min=269.5,
        unscaled_min=231.0,
        runs=runs,
        convergence=Convergence(
            True, 276_480, 322_560, 0.0, 276_480, "one point", 322_560 / 276_480, "computed", "samples"
        ),
        verdict=verdict,
        findings=(),
    )
    return dataclasses.replace(made, **changed)


def test_our_own_runs_beside_a_published_row() -> None:
    compared = compare([own_result(), one(GB200_405B)])
    (found,) = compared.pairs
    assert found.speedup == pytest.approx(269.5 / 121.0926)
    assert found.throughput == pytest.approx((46.478 / 512) / (21.0 / 512))
    assert found.convergence == pytest.approx(1, abs=1e-5)
    assert compared.sides[0].eval_share == pytest.approx(595 / (60 * 231))
    assert "us ours (512 accelerators): unverified, not reviewed by MLCommons" in compared.warnings[0]
    assert any("is unverified, the other one is published" in warning for warning in found.warnings)
    figures = compared.sides[0].figures
    assert (figures.runs, figures.not_converged, figures.run_min, figures.run_max) == (3, 0, 230.0, 235.0)


def test_divisions_failures_and_minis_are_said() -> None:
    (found,) = compare([one(H100_405B), own_result(division="open")]).pairs
    assert "different divisions: closed and open" in found.warnings
    failed = compare([one(H100_405B), own_result("fails")])
    assert any("does not stand by its round's rules" in warning for warning in failed.warnings)
    mini = compare([one(H100_405B), own_result("mini")])
    assert mini.pairs[0].speedup is None
    assert "mini preset has a model, data and target of its own" in mini.pairs[0].warnings[0]
    assert any("mini preset, no MLPerf result" in warning for warning in mini.warnings)
    minis = compare([own_result("mini"), own_result("mini", score_min=100.0)])
    assert minis.pairs[0].speedup == pytest.approx(2.695)


def test_a_mean_over_some_runs_is_none() -> None:
    whole = own_result(convergence=None)
    runs = (*whole.runs, dataclasses.replace(whole.runs[1], samples=None, time=None))
    found = side(dataclasses.replace(whole, runs=runs))
    assert found.figures.samples is None
    assert found.scored_samples is None


def test_scaling_table_of_gb200() -> None:
    found = scaling_table(published("v5.0/*/llama31_405b?accelerator=GB200"))
    assert [row.accelerators for row in found.rows] == [512, 1024, 2496]
    assert [f"{100 * row.efficiency:.1f}" for row in found.rows] == ["100.0", "97.6", "90.9"]
    assert [f"{100 * row.equal_batch:.1f}" for row in found.rows] == ["100.0", "97.6", "92.2"]
    assert [row.ideal for row in found.rows] == [1, 2, 4.875]
    assert found.rows[2].speedup == pytest.approx(121.0926 / 27.3347)
    assert (found.benchmark, found.accelerator) == ("llama31_405b", "NVIDIA Blackwell GPU (GB200)")


def test_scaling_tables_that_cannot_be() -> None:
    with pytest.raises(UserError, match="several accelerators"):
        scaling_table(published("v5.0/NVIDIA/llama2_70b_lora"))
    with pytest.raises(UserError, match="several benchmarks"):
        scaling_table(published("v5.0/NVIDIA/*?accelerator=GB200"))
    with pytest.raises(UserError, match="at least two numbers of accelerators"):
        scaling_table(published(H100_405B))


def test_arguments_are_paths_and_queries(tmp_path: Path) -> None:
    asked = []

    def score(path: Path) -> list[Result]:
        asked.append(path)
        return [own_result()]

    found = parse([str(tmp_path), "published:v5.0/*/llama31_405b?accelerator=GB200"], score)
    assert asked == [tmp_path]
    assert [result.accelerators for result in found] == [512, 512, 1024, 2496]
    assert len(parse(["published:v5.0/NVIDIA/llama31_405b"], score)) == 3  # alone, a query may name several


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", H100_405B], "nowhere: no such path"),
        ([H100_405B, "."], "no result in it"),
        ([H100_405B], "1 result; give at least two"),
        ([], "0 result"),
        (["published:v5.0/NVIDIA/llama31_405b", GB200_405B], "names 3 results where one is wanted"),
        (["published:v5.0/NVIDIA/llama", GB200_405B], "no benchmark llama in v5.0/NVIDIA"),
    ],
)
def test_arguments_that_name_nothing(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(arguments, lambda path: [])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_few_results_and_a_base_that_is_not_there() -> None:
    with pytest.raises(UserError, match="at least two"):
        compare([one(H100_405B)])
    with pytest.raises(UserError, match="base 2 is not there"):
        compare([one(H100_405B), one(GB200_405B)], base=2)


def test_any_side_may_be_the_base() -> None:
    compared = compare([one(H100_405B), one(GB200_405B), one(GB200_405B_2496)], base=1)
    assert [found.own for found in compared.pairs] == [0, 2]
    assert compared.pairs[0].speedup == pytest.approx(121.0926 / 269.1216)


def test_the_document_tells_what_the_comparison_says() -> None:
    """The table of announcements in docs/compare.md, cell by cell."""
    text = (Path(__file__).parent.parent / "docs" / "compare.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `v")]
    assert len(lines) == 5
    for line in lines:
        base, own, announced, *cells = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        found, first, second = pair(base, own), one(base), one(own)
        factor = found.efficiency or found.speedup
        wanted = [
            factor,
            found.equal_batch_efficiency or found.equal_batch_speedup,
            found.throughput,
            found.convergence,
        ]
        assert cells[0] == f"{first.score_min:.4f}, {second.score_min:.4f}"
        assert cells[1] == f"{first.gbs:,}, {second.gbs:,}"
        assert cells[2:] == [f"{figure:.3f}" for figure in wanted]
        if announced.endswith("x"):
            assert f"{factor:.1f}x" == announced
        else:
            assert f"{math.floor(100 * factor)} %" == announced


def test_warnings_name_their_pair_and_point_to_figures_that_exist() -> None:
    compared = compare(published("v5.0/*/llama31_405b?accelerator=GB200"))
    batches = {found.own: line for found in compared.pairs for line in found.warnings if "batch sizes" in line}
    shown = compare_text.warnings(compared)
    assert len(batches) == 2
    for found in compared.pairs:
        has = any("at equal batch size" in label for label, _, _ in compare_text.figures(found))
        assert ("see the figures at equal batch size" in batches[found.own]) == has
        assert f"{compare_text.letter(found.own)} over A: {batches[found.own]}" in shown
    assert [row.own for row in compared.pairs if row.equal_batch_per_accelerator == row.per_accelerator] == [1]
    large = dataclasses.replace(one(GB200_405B), gbs=20_000)
    (found,) = compare([one(H100_405B), large]).pairs
    assert any("no figures at equal batch size: batch size 20,000 is above" in line for line in found.warnings)
    without = dataclasses.replace(one(GB200_405B_2496), score_min=None)
    (found,) = compare([one(H100_405B), without]).pairs
    assert not any("see the figures" in line for line in found.warnings)


def test_the_same_warning_of_several_is_told_once() -> None:
    compared = compare([one(H100_405B), *[own_result()] * 9])
    told = compare_text.warnings(compared)
    assert "B, C, D, E, F, G and 3 more: unverified, not reviewed by MLCommons" in told
    assert any(line.startswith("all 9 over A: ") and "is unverified" in line for line in told)
    two = compare_text.warnings(compare([one(H100_405B), own_result(), own_result()]))
    assert "B and C: unverified, not reviewed by MLCommons" in two


def test_nothing_to_compare_is_one_line() -> None:
    assert compare_text.nothing(both(H100_LORA, GB200_SD)).startswith("nothing to compare: different benchmarks, ")
    assert compare_text.nothing(both(H100_LORA, GB200_SD, GB200_LORA)) == "", "one of the two can be compared"
    mini = compare_text.nothing(compare([one(H100_405B), own_result("mini")]))
    assert "mini preset" in mini
    assert "\n" not in mini


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_terminal_of_any_width_shows_names_in_whole_words(width: int) -> None:
    compared = compare(published("v5.0/*/llama31_405b?accelerator=GB200"))
    written = io.StringIO()
    to = Console(file=written, width=width, force_terminal=True, color_system=None, highlight=False, markup=False)
    compare_text.show(compared, to)
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for words in ("carina_ngpu2496_ngc25.04_nemo", "llama31_405b", "121.0926", "0.09078", "5.7 %", "A (base)"):
        assert any(words in line for line in lines), words
    assert ("evaluation" in lines[0]) == (width == 200)
