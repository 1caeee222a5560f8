"""The claims of announcements: the document is what the command prints, and predictions have the claims' signs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from timetrial.predict import claims, claims_list, claims_run
from timetrial.predict.claims_list import Claim
from timetrial.predict.claims_run import GPU_TIME, THROUGHPUT, TIME, Compared, changed, entry, published, run
from timetrial.systems import stack as stacks

DOCUMENT = Path(__file__).parents[1] / "docs" / "claims.md"


@pytest.fixture(scope="module")
def made() -> dict[str, Claim]:
    return {make.__name__: make() for make in claims_list.CLAIMS}


def test_the_document_is_what_the_command_prints(made: dict[str, Claim]) -> None:
    printed = claims.document(made.values())
    assert DOCUMENT.read_text(encoding="utf-8") == printed, f"stale; run: {claims.COMMAND}"


def test_nothing_is_slower_that_is_claimed_to_be_faster(made: dict[str, Claim]) -> None:
    for name in ("generations", "order", "graphs", "four_bits", "domains", "collectives"):
        assert made[name].compared
        for c in made[name].compared:
            assert c.ratio >= 1 - 1e-9, (name, c.before.label, c.after.label)


def test_gb200_beats_h100_by_about_what_was_published(made: dict[str, Claim]) -> None:
    time, throughput = made["generations"].compared[:2]
    assert time.measure is TIME
    assert time.published == pytest.approx(2.222, abs=0.001)
    assert throughput.published == pytest.approx(55.14332 * 896 / (19.27797 * 1152))
    for c in (time, throughput):
        assert c.published is not None
        low, high, pairs = c.range
        assert 1 < low < c.ratio < high
        assert low < c.published < high
        assert pairs >= claims_run.PAIRS


def test_scaling_loses_and_the_split_adds_up(made: dict[str, Claim]) -> None:
    claim = made["scaling"]
    assert claim.split is not None
    assert claim.split.measure is GPU_TIME
    assert claim.split.ratio < 1
    assert claim.split.published == pytest.approx(0.909, abs=0.001)
    rows = [line.split("|")[1:-1] for line in claims.split(claim.split)[4:]]
    hours = [float(cells[1].replace(",", "")) for cells in rows]
    assert sum(hours[:-1]) == pytest.approx(hours[-1], abs=0.05 * len(hours))
    share = float(rows[-1][2].split()[0]) / 100
    assert share == pytest.approx(1 - claim.split.ratio, abs=6e-4)


def test_data_parallel_last_keeps_the_pipeline_in_the_domain(made: dict[str, Claim]) -> None:
    c = made["order"].compared[0]
    assert c.after.prediction.request.plan.order == "tp-cp-pp-dp"
    assert "pipeline neighbours inside one domain" in claims_run.lies(c.after)
    assert "pipeline neighbours 1 of 2 ranks" in claims_run.lies(c.before)
    assert "gradients inside one domain" in claims_run.lies(c.before)


def test_graphs_count_where_kernels_are_short(made: dict[str, Claim]) -> None:
    gains = {c.after.label: c.ratio for c in made["graphs"].compared}
    assert gains["8B on 512 GB200, graph"] > 1.2
    assert gains["405B on 512 GB200, graph"] < 1.01


def test_adapters_gain_by_chip_and_by_plan(made: dict[str, Claim]) -> None:
    both, _, _, chip, plan, _ = made["adapters"].compared
    assert both.published == pytest.approx(2.506, abs=0.001)
    assert chip.ratio > 1
    assert plan.ratio > 1
    assert "out of memory" in made["adapters"].runs[-1].verdict


def test_a_sensitivity_is_what_a_stack_file_can_say(tmp_path: Path) -> None:
    for values in claims_list.SWITCHES.values():
        path = tmp_path / "mine.toml"
        lines = [f'like = "{claims_list.GENERIC}"', "[constants]", *(f"{k} = {v}" for k, v in values.items())]
        path.write_text("\n".join(lines))
        stacks.load.cache_clear()
        assert stacks.load(str(path)).constants == values
    row = entry("v5.0", "llama31_405b", claims_list.GB200_512)
    assert run("file", row, stack=stacks.load(str(path))).seconds < run("fitted", row).seconds


def test_what_is_not_validated_says_so(made: dict[str, Claim]) -> None:
    text = "\n".join(line for name in ("collectives", "experts") for line in claims.section(made[name]))
    assert "**Not validated" in text
    assert "**Not predicted.**" in text
    assert all(c.published is None for c in made["collectives"].compared)


def test_parts_add_up_and_name_the_difference(made: dict[str, Claim]) -> None:
    for claim in made.values():
        for c in claim.compared:
            assert math.fsum(c.after.parts.values()) == pytest.approx(c.after.gpu_s)
    assert "matrix products -" in claims.why(made["generations"].compared[1])
    same = made["generations"].runs[0]
    assert "no part of the step changes" in claims.why(Compared(same, same, THROUGHPUT))


def test_a_changed_row_has_no_publication() -> None:
    row = entry("v5.0", "llama31_405b", claims_list.H100_512)
    other = run("other", changed(row, gbs="896"))
    assert other.published_s is None
    assert other.published_min is None
    assert other.source == ""
    assert run("as published", row).published_s == pytest.approx(55.14332)
    with pytest.raises(ValueError, match="no column batch"):
        changed(row, batch="896")
    with pytest.raises(ValueError, match="exactly one"):
        published(round="v5.0")


def test_a_smaller_domain_is_the_same_machine() -> None:
    row = entry("v5.0", "llama31_405b", claims_list.GB200_512)
    four = run("four", changed(row), domain=4).prediction.system
    whole = run("whole", row).prediction.system
    assert (four.scale_up.domain, four.node.accelerators) == (4, 4)
    assert four.accelerator == whole.accelerator
    assert four.scale_out == whole.scale_out
