"""Systems: every figure has a source and a sensible value, published names are found, bad files are refused by name."""

import csv
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from timetrial.errors import UserError
from timetrial.systems import system
from timetrial.systems.ranges import RANGES

DOCS = Path(__file__).parent.parent / "docs" / "systems.md"
NAMES = [
    "b200-sxm",
    "b300-sxm",
    "gb200-nvl72",
    "gb300-nvl72",
    "h100-sxm",
    "h200-nvl",
    "h200-sxm",
    "l40s",
    "mi300x",
    "mi325x",
    "mi350x",
    "mi355x",
]

PUBLISHED = {
    "H100-SXM": "h100-sxm",
    "H100 80GB HBM3": "h100-sxm",
    "H200-SXM": "h200-sxm",
    "H200-NVL": "h200-nvl",
    "B200": "b200-sxm",
    "B300": "b300-sxm",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "L40S": "l40s",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI350X": "mi350x",
    "MI355X": "mi355x",
    "DGX-H100": "h100-sxm",
}
"""Part of a published name -> system; longest part that fits decides."""

OTHERS = re.compile(r"TPU|RTX|A100|Gaudi|Radeon|H100-PCIe|H100 NVL", re.I)
"""Published accelerators that have no system here."""


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source_and_a_unit(name):
    found = system.load(name)
    assert found.name == name
    assert set(found.sources) <= set(RANGES)
    assert all(len(text) > 6 for text in found.sources.values())
    assert found.assumed <= set(found.sources)
    # each figure that the dataclasses hold was read, and so had a source
    wanted = {"accelerator.memory_gb_per_s", "node.accelerators", "scale_up.gb_per_s", "scale_out.gb_per_s"}
    assert wanted | {f"accelerator.peak_tflops.{fmt}" for fmt in found.accelerator.peak_flops} <= set(found.sources)
    assert 1e13 < found.accelerator.peak_flops["fp32"] < found.accelerator.peak_flops["bf16"] < 1e16
    assert 4e10 < found.accelerator.memory_bytes < 4e11
    assert 5e11 < found.accelerator.memory_bytes_per_s < 1e13


def test_names_are_the_files():
    assert system.names() == NAMES


def test_dense_rates_and_fabrics_of_the_data_sheets():
    h100, gb200, gb300 = (system.load(n) for n in ("h100-sxm", "gb200-nvl72", "gb300-nvl72"))
    b200, b300, nvl = (system.load(n) for n in ("b200-sxm", "b300-sxm", "h200-nvl"))
    assert h100.accelerator.peak_flops["bf16"] == 989.5e12
    assert h100.accelerator.peak_flops["fp8"] == 1979e12
    assert "fp4" not in h100.accelerator.peak_flops
    assert [b200.accelerator.peak_flops[f] for f in ("bf16", "fp8", "fp4")] == [2250e12, 4500e12, 9000e12]
    assert [gb200.accelerator.peak_flops[f] for f in ("bf16", "fp8", "fp4")] == [2500e12, 5000e12, 10_000e12]
    assert gb300.accelerator.peak_flops["fp4"] == 15_000e12
    assert b300.accelerator.peak_flops["fp4"] == 14_000e12
    assert nvl.accelerator.peak_flops["bf16"] == 835.5e12
    assert (h100.scale_up.bytes_per_s, gb200.scale_up.bytes_per_s) == (450e9, 900e9)
    assert (h100.scale_up.domain, gb200.scale_up.domain, nvl.scale_up.domain) == (8, 72, 4)
    assert (h100.node.accelerators, gb200.node.accelerators) == (8, 4)
    assert (h100.scale_out.bytes_per_s, gb300.scale_out.bytes_per_s) == (50e9, 100e9)
    assert h100.scale_up.in_switch_reduction
    assert not nvl.scale_up.in_switch_reduction
    assert system.load("mi300x").scale_up.peer_bytes_per_s == 64e9
    assert h100.power is not None
    assert h100.power.average_w == 973
    assert gb200.power is None


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("llm_step_times.csv", "accelerator"),
        ("published_results.csv", "accelerator"),
        ("vendor_step_times.csv", "system"),
    ],
)
def test_every_published_accelerator_is_found(shared, table, column):
    with (shared / "facts" / table).open(newline="") as file:
        published = {row[column] for row in csv.DictReader(file)}
    found = 0
    for text in published:
        parts = [part for part in PUBLISHED if part in text]
        if OTHERS.search(text) or not parts:
            assert OTHERS.search(text), text
            with pytest.raises(UserError, match="no system for the accelerator"):
                system.find(text)
            continue
        assert system.find(text).name == PUBLISHED[max(parts, key=len)], text
        found += 1
    assert found >= 6


def test_unknown_name_says_which_there_are():
    with pytest.raises(UserError, match=r"unknown system 'h100-smx' \(did you mean h100-sxm\?\); there are b200-sxm"):
        system.load("h100-smx")
    with pytest.raises(UserError, match="cannot be read"):
        system.load("nowhere.toml")


def example() -> str:
    """The user's file as docs/systems.md shows it."""
    return re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)[0]


def test_the_documented_file_of_a_users_own_loads(tmp_path):
    text = example()
    assert len(text.strip().splitlines()) <= 12
    path = tmp_path / "mine.toml"
    path.write_text(text)
    mine, base = system.load(path), system.load("h100-sxm")
    assert mine.name == "our-cluster"
    assert mine.scale_out.bytes_per_s == 12.5e9
    assert mine.scale_out.rails == 2
    assert mine.scale_out.kind == "ethernet"
    assert mine.accelerator == base.accelerator
    assert mine.rates == base.rates
    assert mine.aliases == ()
    assert mine.sources["scale_out.gb_per_s"] != base.sources["scale_out.gb_per_s"]
    assert mine.sources["accelerator.sms"] == base.sources["accelerator.sms"]


WHOLE = """
name = "own"
title = "t"
rates = "h100-sxm"
[accelerator]
name = "x"
generation = "hopper"
memory_gib = 80
memory_gb_per_s = 3350
sms = 132
tdp_w = 700
[accelerator.peak_tflops]
fp32 = 67
bf16 = 989
fp8 = 1979
[node]
accelerators = 8
[scale_up]
kind = "nvlink"
domain = 8
gb_per_s = 450
latency_us = 3
in_switch_reduction = true
[scale_out]
kind = "infiniband"
gb_per_s = 50
rails = 8
latency_us = 14
[host]
launch_us = 5
[sources]
accelerator = "sheet"
node = "sheet"
scale_up = "sheet"
scale_out = "guess; assumed"
host = "timed"
"""


def refused(tmp_path: Path, old: str, new: str) -> str:
    assert old in WHOLE
    path = tmp_path / "own.toml"
    path.write_text(WHOLE.replace(old, new))
    with pytest.raises(UserError) as caught:
        system.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_file_without_like_loads(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(WHOLE)
    own = system.load(str(path))
    assert own.assumed == {"scale_out.gb_per_s", "scale_out.rails", "scale_out.latency_us"}
    assert own.accelerator.memory_bytes == 80 * 2**30
    with pytest.raises(dataclasses.FrozenInstanceError):
        own.name = "other"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "memory_gb_per_s = 3350\n",
            "memory_gb_per_s = 3\n",
            ("accelerator.memory_gb_per_s is 3", "from 5 to 50000 GB/s"),
        ),
        ("memory_gb_per_s = 3350\n", "memory_gb_per_s = -1\n", ("accelerator.memory_gb_per_s is -1", "from 5")),
        ("memory_gb_per_s = 3350\n", "memory_gb_per_s = nan\n", ("accelerator.memory_gb_per_s is nan", "from 5")),
        ("memory_gb_per_s = 3350\n", "memory_gb_per_s = inf\n", ("accelerator.memory_gb_per_s is inf", "from 5")),
        ("memory_gb_per_s = 3350\n", 'memory_gb_per_s = "3.35T"\n', ("accelerator.memory_gb_per_s is '3.35T'",)),
        ("memory_gb_per_s = 3350\n", "memory_gb_per_s = true\n", ("accelerator.memory_gb_per_s is True",)),
        ("memory_gb_per_s = 3350\n", "", ("accelerator.memory_gb_per_s is missing", "from 5 to 50000 GB/s")),
        (
            "memory_gb_per_s = 3350\n",
            "memory_gbs = 3350\n",
            ("unknown figure 'accelerator.memory_gbs'", "did you mean"),
        ),
        ("memory_gib = 80\n", "memory_gib = 4096\n", ("accelerator.memory_gib is 4096", "to 2000 GiB")),
        ("memory_gib = 80\n", "memory_gib = 80\nmemory_gb = 80\n", ("memory is twice",)),
        ("memory_gib = 80\n", "", ("memory is missing",)),
        ("bf16 = 989\n", "bf16 = 989e12\n", ("accelerator.peak_tflops.bf16", "TFLOP/s, dense")),
        ("bf16 = 989\n", "bf16 = 3958\n", ("peak_tflops.fp8 is below bf16", "dense")),
        ("bf16 = 989\n", "bf16 = 0\n", ("accelerator.peak_tflops.bf16 is 0",)),
        ("bf16 = 989\n", "", ("accelerator.peak_tflops.bf16 is missing",)),
        ("fp8 = 1979\n", "fp9 = 1979\n", ("unknown figure 'accelerator.peak_tflops.fp9'",)),
        ("sms = 132\n", "sms = 132.5\n", ("accelerator.sms is 132.5", "a whole number")),
        ("accelerators = 8\n", "accelerators = 0\n", ("node.accelerators is 0", "from 1")),
        ("domain = 8\n", "domain = 12\n", ("scale_up.domain is 12", "multiple")),
        (
            "in_switch_reduction = true\n",
            "in_switch_reduction = 1\n",
            ("scale_up.in_switch_reduction is 1", "true or false"),
        ),
        ('kind = "infiniband"\n', 'kind = "infinband"\n', ("scale_out.kind is 'infinband'", "ethernet")),
        ('generation = "hopper"\n', 'generation = "hoppr"\n', ("accelerator.generation is 'hoppr'",)),
        ('host = "timed"\n', "", ("host.launch_us has no source", "[sources]")),
        ('host = "timed"\n', 'hosts = "timed"\n', ("sources names 'hosts'", "no figure")),
        ('name = "own"\n', 'name = "own"\nlike = "h100"\n', ("like = 'h100' is no system",)),
        ('name = "own"\n', 'name = "own\n', ("is no TOML",)),
        ('title = "t"\n', 'title = ""\n', ("title is ''",)),
        ('title = "t"\n', 'title = "t"\naliases = "x"\n', ("aliases is 'x'",)),
    ],
)
def test_bad_figures_are_refused_by_name_with_the_range(tmp_path, old, new, says):
    message = refused(tmp_path, old, new)
    for part in says:
        assert part in message


def test_a_machine_without_a_network(tmp_path):
    path = tmp_path / "alone.toml"
    path.write_text('name = "alone"\ntitle = "one node"\nlike = "h100-sxm"\n[scale_out]\nkind = "none"\n')
    alone = system.load(path)
    assert alone.scale_out == system.ScaleOut(0.0, 0.0, "none", 0)
    assert alone.power is not None


def test_power_measured_on_another_accelerator_is_not_inherited(tmp_path):
    path = tmp_path / "big.toml"
    path.write_text(
        'name = "big"\ntitle = "more memory"\nlike = "h100-sxm"\n'
        '[accelerator]\nmemory_gb = 96\n[sources]\naccelerator = "sheet"\n'
    )
    big = system.load(path)
    assert big.power is None
    assert big.accelerator.memory_bytes == 96_000_000_000
    assert "power.average_w" not in big.sources


def test_reading_systems_needs_no_torch_and_no_numpy():
    code = (
        "import sys; from timetrial.systems import system; system.find('NVIDIA GB300');"
        "assert not {'torch', 'numpy', 'scipy', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
