"""Published results by name, and the tables they come from."""

import csv
import importlib.resources
from pathlib import Path

import pytest

from timetrial.errors import UserError
from timetrial.results import make_published
from timetrial.results.lookup import one, published, rows, table
from timetrial.results.reference import reference_samples, target

FACTS = Path(__file__).parents[2] / "shared" / "facts"
needs_facts = pytest.mark.skipif(not FACTS.is_dir(), reason="the facts are not here")


@needs_facts
def test_the_tables_are_made_from_the_facts_by_the_script(tmp_path: Path) -> None:
    results = make_published.read(FACTS / "published_results.csv")
    points = make_published.read(FACTS / "reference_convergence.csv")
    for name, made in (
        ("published.csv", make_published.published(results)),
        ("reference.csv", make_published.reference(points)),
        ("targets.csv", make_published.targets(points)),
    ):
        make_published.write(tmp_path / name, made)
        bundled = importlib.resources.files("timetrial.results").joinpath(f"data/{name}").read_bytes()
        assert (tmp_path / name).read_bytes() == bundled, name


@needs_facts
def test_every_row_of_the_facts_has_its_score_and_source() -> None:
    with (FACTS / "published_results.csv").open(encoding="utf-8", newline="") as file:
        facts = {
            (row["round"], row["org_dir"], row["benchmark"], row["system_id"]): row for row in csv.DictReader(file)
        }
    assert len(table()) == len(facts) == 676
    for result in table():
        row = facts[(result.round, result.path.parts[1], result.benchmark, result.system)]
        assert result.score_min == (float(row["ttt_min"]) if row["ttt_min"] else None)
        assert result.source == row["source"] != ""
        assert str(result.accelerators) == row["accelerators"]
        assert not result.unverified
        assert result.verdict == ("stands" if row["ttt_min"] else "unread")


def test_the_table_is_small() -> None:
    data = importlib.resources.files("timetrial.results").joinpath("data/published.csv").read_bytes()
    assert len(data) < 250_000


def test_a_row_keeps_what_is_known_of_it() -> None:
    found = one("published:v5.0/NVIDIA/llama31_405b/eos-dfw_n64_ngc25.01_nemo")
    assert (found.score_min, found.accelerators, found.nodes, found.gbs) == (269.1216, 512, 64, 1152)
    assert found.system_name == "Eos-dfw (64x NVIDIA HGX H100)"
    figures = found.figures
    assert figures is not None
    assert (figures.samples, figures.steps, figures.step_s, figures.runs) == (276_480, 240, 55.14332, 3)
    assert (figures.precision, figures.plan) == ("fp8", "tp8 cp2 pp8 vp8 dp4 mbs1")
    assert figures.tflops_per_accelerator == pytest.approx(881, abs=5)  # facts, ground_truth.md
    assert found.energy is None
    assert found.source == "mlcommons/training_results_v5.0:NVIDIA/results/eos-dfw_n64_ngc25.01_nemo/llama31_405b/"


def test_missing_figures_are_none_and_a_score_from_elsewhere_says_so() -> None:
    single = one("v6.0/NVIDIA/llama31_405b")
    assert single.score_min is None
    assert single.verdict == "unread"
    assert single.findings[0].level == "warn"
    assert "NOT the official" in single.findings[0].found
    press = one("v6.0/azure/llama31_405b")
    assert press.score_min == 7.07
    assert press.unscaled_min is None
    assert "press" in press.findings[0].found
    assert single.figures is not None
    assert single.figures.eval_s is None


@pytest.mark.parametrize(
    ("query", "number"),
    [
        ("published:v5.0/NVIDIA/llama31_405b", 3),
        ("v5.0/NVIDIA/llama31_405b", 3),
        ("published:5.0/nvidia/LLAMA31_405B", 3),
        ("published:v5.1/*/llama2_70b_lora?accelerator=B200&accelerators=8", 8),
        ("published:v5.0/*/llama31_405b?accelerator=GB200", 3),
        ("published:*/*/rgat?accelerators=8&accelerator=H100", 13),
        ("published:v4.1/NVIDIA/gnn?accelerator=H100", 3),
        ("published:v5.0/IBM+CoreWeave+NVIDIA/*", 3),
        ("published:v5.0/CoreWeave + IBM + NVIDIA/*", 3),
        ("published:v5.0/*/*/*carina*", 3),
        ("published:v5.0//llama31_405b?accelerators=2,496", 1),
        ("published:v5.0/*/*?system=Carina (39x*", 1),
        ("published:v4.0/smc-dc-power/llama2_70b_lora?nodes=8", 1),
        ("published:v5.1/*/llama31_405b?precision=nvfp4*&gbs=1152", 2),
    ],
)
def test_queries(query: str, number: int) -> None:
    found = published(query)
    assert len(found) == number
    assert [(r.round, r.accelerators) for r in found] == sorted((r.round, r.accelerators) for r in found)


def test_b200_is_not_gb200() -> None:
    named = {result.accelerator for result in published("v5.0/*/*?accelerator=B200")}
    assert named == {"NVIDIA Blackwell GPU (B200-SXM-180GB)"}


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("v5.2", "no round v5.2; closest: v5.1"),
        ("v5.0/NVIDA/llama31_405b", "no submitter NVIDA in v5.0; closest: NVIDIA"),
        ("v5.0/NVIDIA/lama31_405b", "no benchmark lama31_405b in v5.0/NVIDIA; closest: llama31_405b"),
        ("v5.0/NVIDIA/llama31_405b?accelerators=500", "there: 512, 2048, 8192"),
        ("v5.0/NVIDIA/llama31_405b?accelerator=B100", "there: NVIDIA H100-SXM5-80GB"),
        ("v5.0/NVIDIA/llama31_405b?accelerators=many", "accelerators=many must be a whole number"),
        ("v5.0/NVIDIA/llama31_405b?gpus=8", "must be key=value with a key of accelerator, accelerators"),
        ("v5.0/NVIDIA/llama31_405b/eos/extra", "must read published:ROUND/SUBMITTER/BENCHMARK/SYSTEM"),
        ("", "must read published:ROUND/SUBMITTER/BENCHMARK/SYSTEM"),
    ],
)
def test_a_query_that_names_nothing_says_what_there_is(query: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        published(f"published:{query}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"published:{query}: ")


def test_one_of_several_is_refused_with_their_names() -> None:
    with pytest.raises(UserError, match=r"names 3 results where one is wanted.*eos-dfw_n256_ngc25.01_nemo \(2048 "):
        one("published:v5.0/NVIDIA/llama31_405b")


def test_paths_of_rows_are_queries_that_name_them() -> None:
    for result in table()[::25]:
        assert one(str(result.path)) == result


def test_scaled_scores_stand_for_the_samples_of_the_reference() -> None:
    """The scaling factor is the reference's samples over the runs' own: an independent check of reference.csv."""
    checked, off = 0, []
    for result in table():
        figures = result.figures
        if figures is None or result.gbs is None or figures.samples is None or not figures.scale or figures.scale <= 1:
            continue
        wanted = reference_samples(result.benchmark, result.round, result.gbs)
        assert wanted is not None
        checked += 1
        if abs(figures.samples * figures.scale / wanted - 1) > 1e-3:
            off.append(str(result.path))
    assert checked == 292
    # its scaling.json has 1.0104 where the checker's points of v4.0 give 1
    assert off == ["published:v4.0/Google/gpt3/cloud-tpu-v5p-3072-maxtext"]


def test_reference_samples() -> None:
    assert reference_samples("llama31_405b", "v5.0", 1152) == 322_560
    assert reference_samples("llama31_405b", "v5.0", 896) == 322_560  # the smallest point counts below it
    assert reference_samples("llama31_405b", "v5.0", 1248) == pytest.approx(322_560 + 96 / 1152 * 57_600)
    assert reference_samples("llama31_405b", "v5.0", 9217) is None
    assert reference_samples("llama31_405b", "v4.1", 1152) is None
    assert reference_samples("gnn", "v4.1", 32768) == reference_samples("rgat", "v5.0", 32768) == 0.93889


def test_targets() -> None:
    first, second = target("llama31_405b", "v5.0"), target("llama31_405b", "v5.1")
    assert first is not None
    assert second is not None
    assert first.target == second.target == "5.6"
    assert first.evaluation.startswith("46,080")
    assert second.evaluation.startswith("18,432")
    sd = target("stable_diffusion", "v5.0")
    assert sd is not None
    assert sd.offline
    assert all(row["target"] for row in rows("targets.csv"))
    assert {(r.round, r.benchmark) for r in table() if target(r.benchmark, r.round) is None} == set()
