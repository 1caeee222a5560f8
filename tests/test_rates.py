"""Rates: the curves give the measured times, hold physical bounds, and take a user's own points."""

import csv
import json
import math
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from timetrial.errors import UserError
from timetrial.systems import rates, system
from timetrial.systems.collectives import bus_bytes
from timetrial.systems.rates import Rates

DOCS = Path(__file__).parent.parent / "docs" / "systems.md"
SAMPLE = Path(__file__).parent / "golden" / "kernel_times.csv"
MEASURED = ["b200-sxm", "b300-sxm", "gb200-nvl72", "gb300-nvl72", "h100-sxm", "h200-sxm", "l40s"]


def load(name: str) -> Rates:
    return Rates.load(system.load(name))


def sample() -> dict[tuple[str, str], list[dict[str, str]]]:
    """Held-out measured products: (system, format) -> rows."""
    lines = [line for line in SAMPLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in csv.DictReader(lines):
        groups.setdefault((row["system"], row["format"]), []).append(row)
    return groups


@pytest.mark.parametrize(("name", "fmt"), sorted(sample()))
def test_products_that_were_held_out_come_out_as_measured(name, fmt):
    found = load(name)
    off = []
    for row in sample()[name, fmt]:
        shape = [int(row[x]) for x in "mnk"]
        measured = (float(row["microseconds"]) - float(row["cast_us"])) / 1e6
        assert measured > 0
        off.append(found.matmul_s(fmt, *shape) / measured - 1)
    assert len(off) == 25
    assert statistics.median(map(abs, off)) < 0.12
    assert abs(statistics.median(off)) < 0.1
    assert found.spread[f"matmul.{fmt}"] < 0.1 < 2 * found.spread[f"matmul.{fmt}.p90"]
    assert f"matmul.{fmt}" not in found.assumed


@pytest.mark.parametrize("name", system.names())
def test_every_system_has_rates_within_its_peaks(name):
    found, machine = load(name), system.load(name)
    peaks = machine.accelerator.peak_flops
    peak = {"fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4", "fp16": "bf16"}
    for fmt in found.matmul:
        for shape in ((8192, 8192, 8192), (2048, 53248, 16384), (32768, 512, 4096)):
            rate = 2 * math.prod(shape) / found.matmul_s(fmt, *shape)
            assert 0.05 < rate / peaks[peak.get(fmt, fmt)] < 0.95, (fmt, shape)
    for fmt in found.attention:
        for backward in (False, True):
            seconds = found.attention_s(fmt, 1, 32, 8, 8192, 8192, 128, True, backward)
            flops = (10 if backward else 4) * 32 * 8192 * 8192 * 128 / 2
            assert 0.1 < flops / seconds / peaks[peak.get(fmt, fmt)] < 0.9
    gigabyte = found.memory_s(1e9)
    assert 0.7 < 1e9 / gigabyte / machine.accelerator.memory_bytes_per_s < 0.97
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        for ranks in (2, 3, machine.scale_up.domain):
            busbw = found.nccl_busbw(kind, ranks, 2**30)
            # a reduction in the switch sends each byte once, not twice
            most = 1.0 if kind != "all_reduce" else 1.2
            assert 0.2 < busbw / machine.scale_up.bytes_per_s < most or name.startswith(("mi", "h200-nvl")), (
                kind,
                ranks,
            )
            assert busbw < most * machine.scale_up.peer_bytes_per_s * (ranks - 1)
    assert all(0 < error < 1 for error in found.spread.values())
    assert (name in MEASURED) == ("matmul.bf16" not in found.assumed)


def test_published_rates_of_large_shapes():
    """Medians of the same tables as taken by hand: facts/ground_truth.md, facts/gemm_rates.csv."""
    big = [(m, n, k) for m in (4096, 8192, 16384) for n in (4096, 8192) for k in (4096, 8192)]
    for name, fmt, low, high in (
        ("h100-sxm", "bf16", 720, 830),
        ("b200-sxm", "bf16", 1450, 1650),
        ("gb300-nvl72", "bf16", 1800, 2000),
        # the tables' low-precision products include casts of the operands, so these lie above their medians
        ("h100-sxm", "fp8", 1219, 1560),
        ("gb200-nvl72", "nvfp4", 4100, 5900),
    ):
        found = load(name)
        median = statistics.median(2 * math.prod(shape) / found.matmul_s(fmt, *shape) / 1e12 for shape in big)
        assert low < median < high, (name, fmt, median)
    h100 = load("h100-sxm")
    assert h100.nccl_busbw("all_reduce", 8, 512 * 2**20) == pytest.approx(445e9, rel=0.03)
    assert h100.nccl_busbw("all_gather", 8, 512 * 2**20) == pytest.approx(336e9, rel=0.03)
    assert h100.nccl_s("all_reduce", 8, 1024) == pytest.approx(16e-6, rel=0.1)
    assert load("gb200-nvl72").nccl_busbw("all_gather", 4, 512 * 2**20) == pytest.approx(564e9, rel=0.03)


def test_attention_backward_reaches_the_share_of_the_forward_rate_that_the_paper_reports():
    """FlashAttention-3, H100, unmasked, head dimension 128, batch times tokens 16k, 16 heads."""
    found = load("h100-sxm")
    for tokens, forward, backward in ((2048, 625, 501), (4096, 638, 542), (8192, 646, 559), (16384, 648, 561)):
        shape = (16384 // tokens, 16, 16, tokens, tokens, 128)
        ahead = found.attention_s("bf16", *shape, False, False)
        back = found.attention_s("bf16", *shape, False, True)
        assert 2.5 * ahead / back == pytest.approx(backward / forward, rel=0.06)
        assert 4 * 16384 * 16 * tokens * 128 / ahead / 1e12 == pytest.approx(forward, rel=0.15)
    assert "attention.bf16.backward" not in found.assumed
    assert "attention.bf16.backward" in load("b200-sxm").assumed


def test_times_grow_with_every_size():
    found = load("b200-sxm")
    sizes = [512 * 2**i for i in range(8)]
    for fmt in found.matmul:
        for shapes in (
            [(x, 4096, 4096) for x in sizes],
            [(4096, x, 4096) for x in sizes],
            [(4096, 4096, x) for x in sizes],
        ):
            times = [found.matmul_s(fmt, *shape) for shape in shapes]
            assert times == sorted(times), fmt
    assert found.matmul_s("bf16", 1024, 128, 128, batch=64) > found.matmul_s("bf16", 1024, 128, 128)
    assert found.matmul_s("bf16", 1, 1, 1) > 1e-6
    for kind in ("all_gather", "all_reduce"):
        for ranks in (2, 3, 4, 6, 8):
            times = [found.nccl_s(kind, ranks, 2**i) for i in range(8, 34)]
            assert times == sorted(times)
    assert 2e-6 <= found.memory_s(1) < 3e-6
    full = [found.attention_s("bf16", 1, 8, 8, 4096, keys, 128, False, False) for keys in (1024, 4096, 16384)]
    assert full == sorted(full)


def test_wide_domains_keep_the_bandwidth_and_start_later():
    found = load("gb200-nvl72")
    assert found.nccl_busbw("all_gather", 72, 2**33) == pytest.approx(
        found.nccl_busbw("all_gather", 4, 2**33), rel=0.01
    )
    assert found.nccl_s("all_gather", 72, 1024) > found.nccl_s("all_gather", 4, 1024)
    assert "collective.wide" in found.assumed
    with pytest.raises(UserError, match="73 ranks do not lie in one scale-up domain of 72"):
        found.nccl_s("all_gather", 73, 1)
    with pytest.raises(UserError, match="no measured collective 'gather'"):
        found.nccl_s("gather", 8, 1)


def test_formats_that_the_hardware_lacks_are_refused():
    with pytest.raises(UserError, match=r"h100-sxm has no rates of products in 'nvfp4'; it has bf16"):
        load("h100-sxm").matmul_s("nvfp4", 1, 1, 1)
    with pytest.raises(UserError, match="no rates of attention in 'fp4'"):
        load("b200-sxm").attention_s("fp4", 1, 1, 1, 1, 1, 64, True, False)
    assert "mxfp8" not in load("h200-sxm").matmul
    assert "nvfp4" not in load("mi355x").matmul
    assert {"mxfp4", "mxfp8", "fp8"} <= set(load("mi355x").matmul)
    assert {"mxfp8", "nvfp4", "fp8_block"} <= set(load("gb300-nvl72").matmul)


def test_a_users_own_system_takes_its_relatives_efficiency(tmp_path):
    path = tmp_path / "slow.toml"
    path.write_text(
        'name = "slow"\ntitle = "capped"\nlike = "h100-sxm"\n[accelerator.peak_tflops]\nbf16 = 494.75\n'
        '[sources]\naccelerator = "power cap"\n'
    )
    slow, fast = Rates.load(system.load(path)), load("h100-sxm")
    ratio = slow.matmul_s("bf16", 8192, 8192, 8192) / fast.matmul_s("bf16", 8192, 8192, 8192)
    assert ratio == pytest.approx(2, rel=0.05)


POINTS = {
    "matmul": {"fp32": [[512, 512, 512, 3000], [1024, 1024, 1024, 22000], [2048, 512, 512, 11500]]},
    "attention": {"fp32": [[1, 8, 8, 256, 256, 64, 1, 0, 2000], [1, 8, 8, 256, 256, 64, 1, 1, 6000]]},
    "memory": [[1e6, 150], [1e8, 12000], [1e4, 12]],
    "collectives": {"all_reduce": {"2": [[1000, 200], [1e8, 90000]]}},
}


def own(tmp_path: Path, content: object) -> system.System:
    (tmp_path / "here.json").write_text(content if isinstance(content, str) else json.dumps(content))
    path = tmp_path / "here.toml"
    path.write_text(
        'name = "here"\ntitle = "this machine"\nlike = "h100-sxm"\nrates = "here.json"\n'
        '[scale_up]\nkind = "memory"\ngb_per_s = 5\n[sources]\nscale_up = "timed"\n'
    )
    return system.load(path)


def test_rates_from_measured_points(tmp_path):
    found = Rates.load(own(tmp_path, POINTS))
    assert found.matmul_s("fp32", 512, 512, 512) == pytest.approx(3e-3, rel=1e-3)
    assert found.matmul_s("fp32", 700, 700, 700) == pytest.approx(7.6e-3, rel=0.1)
    assert found.attention_s("fp32", 1, 8, 8, 256, 256, 64, True, True) == pytest.approx(6e-3, rel=1e-3)
    whole = found.attention_s("fp32", 1, 8, 8, 256, 256, 64, False, False)
    assert whole == pytest.approx(4e-3, rel=1e-3)
    assert found.memory_s(1) == pytest.approx(12e-6)
    assert found.memory_s(1e9) == pytest.approx(0.12)
    assert found.memory_s(1e7) == pytest.approx(150e-6 * math.sqrt(80), rel=1e-3)
    assert found.nccl_busbw("all_reduce", 2, 1e8) == pytest.approx(1e8 / 0.09)
    assert found.nccl_s("all_reduce", 4, 1e8) > 0.09
    assert 0 < found.spread["matmul.fp32"] < 0.3
    assert found.spread["attention.fp32"] == 1.0
    assert not found.assumed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"matmul": {}}, "has no matmul"),
        ({"memory": []}, "has no memory"),
        ({"matmul": {"fp32": [[1, 2, 3]]}}, r"matmul\.fp32, row 1: .*give 4 numbers"),
        ({"matmul": {"fp32": [[1, 2, -3, 4]]}}, r"matmul\.fp32, row 1, column 3: -3; give a number above 0"),
        ({"matmul": {"fp32": [[1, 2, "3", 4]]}}, "row 1, column 3"),
        ({"matmul": {"fp32": [[1, 2, math.nan, 4]]}}, "row 1, column 3: nan"),
        ({"matmul": [1]}, "matmul is no object"),
        ({"attention": {"fp32": [[1, 8, 8, 256, 256, 64, 2, 0, 2000]]}}, "column 7: 2; give 0 or 1"),
        ({"attention": {"fp32": [[1, 8, 8, 256, 256, 64, 1, 1, 2000]]}}, "has no forward kernel"),
        ({"memory": [[1, 2], [1, 3]]}, "holds a size twice"),
        ({"collectives": {"all_reduce": {"one": [[1, 1]]}}}, "over 'one' ranks"),
    ],
)
def test_bad_points_are_refused_by_row(tmp_path, change, says):
    machine = own(tmp_path, {**POINTS, **change})
    with pytest.raises(UserError, match=says) as caught:
        Rates.load(machine)
    assert "\n" not in str(caught.value)


def test_unusable_rates_files_and_names_are_refused(tmp_path):
    with pytest.raises(UserError, match="is no JSON"):
        Rates.load(own(tmp_path, "{"))
    with pytest.raises(UserError, match="holds no object"):
        Rates.load(own(tmp_path, "[]"))
    machine = own(tmp_path, POINTS)
    (tmp_path / "here.json").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        Rates.load(machine)
    path = tmp_path / "lost.toml"
    path.write_text('name = "lost"\ntitle = "t"\nlike = "h100-sxm"\nrates = "h1000"\n')
    with pytest.raises(UserError, match="'h1000' is no machine with known kernels; there are b200-sxm"):
        Rates.load(system.load(path))


def test_the_curves_name_their_source_and_are_small():
    here = Path(rates.__file__).parent
    text = (here / "kernels.json").read_text(encoding="utf-8")
    assert "aiconfigurator-core 0.12.0" in text
    assert "Apache License 2.0" in text
    assert len(text) < 40_000
    assert rates.machines() == system.names()
    assert SAMPLE.read_text(encoding="utf-8").startswith("# Parameters of curves")


def test_loading_and_evaluating_are_quick():
    """Generous bounds for a busy machine; the aims are 30 ms and 20 microseconds."""
    code = (
        "import time; from timetrial.systems import system; from timetrial.systems.rates import Rates;"
        "start = time.perf_counter(); Rates.load(system.load('gb300-nvl72')); print(time.perf_counter() - start);"
        "import sys; assert not {'torch', 'numpy', 'scipy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert float(done.stdout) < 0.1
    found = load("h100-sxm")
    start = time.process_time()
    for i in range(2000):
        found.matmul_s("fp8", 8192 + i, 8192, 8192)
    assert (time.process_time() - start) / 2000 < 50e-6


def test_the_documented_errors_are_those_of_the_curves():
    text = DOCS.read_text(encoding="utf-8")
    machines = json.loads((Path(rates.__file__).parent / "kernels.json").read_text(encoding="utf-8"))["machines"]
    for name, machine in machines.items():
        for kind in ("matmul", "attention"):
            for fmt, fit in machine[kind].items():
                error = f"{fit['error']['median'] * 100:.1f} % | {fit['error']['p90'] * 100:.1f} %"
                assert re.search(rf"\| {name} \| {kind} {fmt} \| [\d,]+ \| [\d.]+ \| {error} \|", text), (name, fmt)
                if kind == "matmul":
                    assert abs(fit["bias_8192"]) < 0.06


def test_the_documented_points_load(tmp_path):
    points = re.findall(r"```json\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    found = Rates.load(own(tmp_path, points[0]))
    assert found.matmul_s("bf16", 4096, 4096, 4096) == pytest.approx(182e-6)
    assert found.nccl_s("all_reduce", 8, 1024) == pytest.approx(16e-6)


def test_bus_bytes_are_those_of_nccl_tests():
    assert bus_bytes("all_reduce", 8, 800) == 1400
    assert bus_bytes("all_gather", 8, 800) == 700
