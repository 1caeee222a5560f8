"""Exporting a run's weights: the right ones, while the run goes on, and without touching it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from conftest import ROOT, timetrial, tiny
from timetrial.config import Lora, load, replace
from timetrial.errors import UserError
from timetrial.models import lora
from timetrial.models.llama.config import LlamaConfig
from timetrial.models.llama.hf_names import hf_name
from timetrial.models.llama.model import Llama
from timetrial.train.build import build_model
from timetrial.train.export import export_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps, checkpoints of the last two fives."""
    run = tmp_path_factory.mktemp("finished") / "run"
    done = timetrial("train", "llama31_8b", "--out", run, "--max-steps", 10, "--threads", 1, *tiny())
    assert done.returncode == 0, done.stderr
    return run


def stored_weights(run: Path, step: int, scratch: Path) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint, as torch's own converter reads them."""
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:08d}", scratch)
    return dict(torch.load(scratch)["model"])


def traces(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}


def test_the_newest_checkpoints_weights_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    before = traces(finished)
    message = export_run(finished, tmp_path / "weights")
    assert "step 10" in message
    found = load_file(tmp_path / "weights" / "model.safetensors")
    expected = stored_weights(finished, 10, tmp_path / "all.pt")
    assert found.keys() == {hf_name(name) for name in expected}
    assert all(torch.equal(found[hf_name(name)], tensor) for name, tensor in expected.items())
    assert traces(finished) == before


def test_adapters_are_merged_into_what_they_stand_on(tmp_path: Path) -> None:
    """The weights that the run began with, made anew, and the adapters that it left beside, multiplied by hand."""
    run = tmp_path / "run"
    sets = tiny("init.kind=random", "optim.base_lr=0.01", "data.seq_len=256")
    done = timetrial("train", "llama2_70b_lora", "--out", run, "--max-steps", 5, "--threads", 1, *sets)
    assert done.returncode == 0, done.stderr
    export_run(run, tmp_path / "weights")
    found = load_file(tmp_path / "weights" / "model.safetensors")
    adapters = load_file(run / "adapters" / "adapter_model.safetensors")
    config = load(json.loads((run / "config.json").read_text()))
    scale = config.lora.alpha / config.lora.rank
    changed = 0
    for name, start in build_model(replace(config, lora=None), None).state_dict().items():
        layer = f"base_model.model.{hf_name(name).removesuffix('.weight')}"
        if f"{layer}.lora_B.weight" in adapters:
            change = scale * adapters[f"{layer}.lora_B.weight"] @ adapters[f"{layer}.lora_A.weight"]
            assert change.abs().max() > 1e-5
            start, changed = start + change, changed + 1
        torch.testing.assert_close(found[hf_name(name)], start, rtol=1e-5, atol=1e-7)
    assert changed == len(adapters) / 2 > 0


def test_a_damaged_checkpoint_is_named_and_left(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "run"
    subprocess.run(["cp", "-r", finished, copied], check=True)
    (copied / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    before = traces(copied)
    assert "step 5" in export_run(copied, tmp_path / "weights")
    assert "step-00000010 is damaged: manifest.json is missing; using step-00000005" in capsys.readouterr().err
    assert traces(copied) == before


def test_while_the_run_goes_on(tmp_path: Path) -> None:
    """The lock is held and checkpoints come and go every few steps; the run must not notice."""
    run = tmp_path / "run"
    words = ["train", "llama31_8b", "--out", run, "--threads", 1, *tiny("evaluation.every_samples=100000")]
    command = [sys.executable, "-m", "timetrial", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not list(run.glob("checkpoints/step-*")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        for attempt in range(3):
            assert "weights of step" in export_run(run, tmp_path / f"weights-{attempt}")
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "checkpoint" not in errors


def test_no_run_and_no_checkpoint(tmp_path: Path) -> None:
    done = timetrial("export", tmp_path / "nowhere", "--out", tmp_path / "there")
    assert done.returncode == 2
    assert "holds no run" in done.stderr
    assert "--resume" not in done.stderr
    run = tmp_path / "run"
    sets = tiny("checkpoint_every=0", "evaluation.max_samples=8")
    assert timetrial("train", "llama31_8b", "--out", run, "--threads", 1, *sets).returncode == 1
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        export_run(run, tmp_path / "there")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o644)])
def test_all_files_have_the_users_mode(finished: Path, tmp_path: Path, mask: int, mode: int) -> None:
    model = Llama(LlamaConfig(vocab_size=32, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=16))
    lora.apply(model, Lora(rank=2), seed=1)
    before = os.umask(mask)
    try:
        export_run(finished, tmp_path / "weights")
        lora.save_adapters(model, tmp_path / "adapters")
    finally:
        os.umask(before)
    files = [path for name in ("weights", "adapters") for path in (tmp_path / name).iterdir()]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == dict.fromkeys(
        ("model.safetensors", "config.json", "adapter_model.safetensors", "adapter_config.json"), mode
    )


def test_every_field_of_the_runs_files_is_documented(finished: Path) -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = [
        json.loads((finished / name).read_text().splitlines()[0]) for name in ("metrics.jsonl", "evaluations.jsonl")
    ]
    fields = {*json.loads((finished / "result.json").read_text()), *rows[0], *rows[0]["phases"], *rows[1]}
    assert [field for field in sorted(fields) if f"`{field}`" not in text] == []
