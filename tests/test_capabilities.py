"""The table of capabilities: complete, true of the installed torch, and told apart by machine."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys

import pytest

from conftest import ROOT, timetrial
from timetrial.config import Plan
from timetrial.parallel.capabilities import CAPABILITIES, Capability, as_json, as_text

EXPECTED = {
    "matrix products, float32", "matrix products, bfloat16", "attention", "ring attention", "loss",
    "norms, rotations, SwiGLU", "AdamW", "gradient norm and clipping",
    "all-gather and reduce-scatter of parameters and gradients", "pipeline send and receive",
    "whole step as one launch", "compiled blocks", "asynchronous tensor parallelism", "activation recomputation",
    "checkpoint transfer",
}  # fmt: skip


def resolve(name: str) -> object:
    """What a dotted name means: the longest module in it, then attributes."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(name)


def test_the_table_is_complete() -> None:
    names = [c.name for c in CAPABILITIES]
    assert len(set(names)) == len(names)
    assert set(names) >= EXPECTED
    for c in CAPABILITIES:
        for field in dataclasses.fields(c):
            assert getattr(c, field.name) != "" or field.name == "setting", (c.name, field.name)


@pytest.mark.parametrize("c", CAPABILITIES, ids=lambda c: c.name)
def test_what_a_row_names_exists(c: Capability) -> None:
    assert (ROOT / "src" / "timetrial" / c.where).is_file()
    for name in c.torch:
        assert resolve(name) is not None
    settings = re.findall(r"(\w+)[=>]", c.setting)
    known = {f.name for f in dataclasses.fields(Plan)} | {"nproc"}
    assert set(settings) <= known
    assert bool(settings) == bool(c.setting)


def test_a_wrong_name_would_show() -> None:
    with pytest.raises(AttributeError):
        resolve("torch.nn.functional.scaled_dot_product_attentions")


def test_each_machine_has_its_own_mark() -> None:
    text = {device: as_text(device).splitlines() for device in ("cpu", "cuda")}
    count = len(CAPABILITIES)
    for device, other in (("cpu", "GPU"), ("cuda", "CPU")):
        mine = {"cpu": "CPU", "cuda": "GPU"}[device]
        assert sum(line.startswith(f"* {mine}") for line in text[device]) == count
        assert sum(line.startswith(f"  {other}") for line in text[device]) == count
        assert max(map(len, text[device])) <= 100
    rows = {device: json.loads(as_json(device)) for device in ("cpu", "cuda")}
    assert [r["here"] for r in rows["cpu"]["capabilities"]] == [c.cpu for c in CAPABILITIES]
    assert [r["here"] for r in rows["cuda"]["capabilities"]] == [c.gpu for c in CAPABILITIES]


def test_no_gpu_way_claims_to_have_run() -> None:
    """Whoever runs tests/gpu on a GPU sets `run_on_gpu` of the rows that passed, and this test goes."""
    assert not any(c.run_on_gpu for c in CAPABILITIES)
    wrapped = " ".join(as_text("cpu").split())
    assert wrapped.count("(not yet run on a GPU)") == len(CAPABILITIES)


def test_the_page_has_every_row() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    for c in CAPABILITIES:
        setting = f" (`{c.setting}`)" if c.setting else ""
        run = "yes" if c.run_on_gpu else "no"
        assert f"| {c.name} | {c.cpu} | {c.gpu}{setting} | {c.because} | {run} |\n" in page, c.name


def test_the_command_prints_the_table() -> None:
    done = timetrial("capabilities")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") in (as_text("cpu"), as_text("cuda"))
    rows = json.loads(timetrial("capabilities", "--json").stdout)
    assert [row["name"] for row in rows["capabilities"]] == [c.name for c in CAPABILITIES]


def test_the_table_needs_no_torch() -> None:
    code = "import sys; import timetrial.parallel.capabilities; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
