"""Checkpoints: exact, whole or not there, damaged ones noticed, any number of ranks."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint_files import filled, restore, worker
from checkpoint_worker import flat, load_mode, make, save_mode, train
from timetrial.train import checkpoint as checkpoint_module
from timetrial.train import manifest as manifests
from timetrial.train.checkpoint import Checkpointer
from timetrial.train.state import load_model_state, model_state

# ---- training goes on exactly --------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_a_restored_run_repeats_the_undisturbed_one_bit_for_bit(tmp_path: Path, fused: bool) -> None:
    model, optimizer = make(fused=fused)
    whole_run = train(model, optimizer, 1, 10)
    end = flat(model, optimizer)

    model, optimizer = make(fused=fused)
    first = train(model, optimizer, 1, 5)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, model_state(model, optimizer), {"samples": 40})

    model, optimizer = make(fused=fused)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    state = model_state(model, optimizer)
    with Checkpointer(tmp_path) as checkpoints:
        restored = checkpoints.restore_newest(state)
    assert restored is not None
    assert (restored.step, restored.extra, restored.skipped) == (5, {"samples": 40}, [])
    load_model_state(model, optimizer, state)
    group = optimizer.param_groups[0]
    assert group["lr"] == 1e-2 / (1.0 + 0.1 * 5)
    assert group["betas"] == (0.9, 0.95)
    assert group["fused"] is fused
    assert all(float(values["step"]) == 5.0 for values in optimizer.state.values())
    assert first + train(model, optimizer, 6, 10) == whole_run
    mine = flat(model, optimizer)
    assert mine.keys() == end.keys()
    assert all(torch.equal(mine[name], end[name]) for name in end)


def test_taking_the_state_of_a_fresh_optimizer_changes_nothing() -> None:
    """torch's own helper leaves `step` at 1, which shifts Adam's bias correction."""
    model, optimizer = make()
    undisturbed = train(model, optimizer, 1, 4)
    model, optimizer = make()
    model_state(model, optimizer)
    assert train(model, optimizer, 1, 4) == undisturbed


def test_gradients_survive_taking_the_state() -> None:
    model, optimizer = make()
    model(torch.ones(2, 32)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    state = model_state(model, optimizer)
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(before) == 7
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert float(state["optimizer"]["state"]["up.weight"]["step"]) == 0.0


def test_save_copies_before_it_returns_and_reuses_its_buffers(tmp_path: Path) -> None:
    w = torch.full((300_000,), 1.0)
    with Checkpointer(tmp_path, keep=3) as checkpoints:
        copies = []
        real = checkpoints._stager.stage

        def stage(tensors: dict[str, Any]) -> dict[str, Any]:
            copies.append(real(tensors))
            return copies[-1]

        checkpoints._stager.stage = stage  # type: ignore[method-assign]
        for step in (1, 2, 3):
            w.fill_(float(step))
            checkpoints.save(step, {"w": w})
            w.fill_(-1.0)
        checkpoints.wait()
    pointers = {copy["w"].data_ptr() for copy in copies}
    assert len(pointers) == 1
    assert w.data_ptr() not in pointers
    for step in (1, 2, 3):
        shutil.rmtree(tmp_path / f"step-0000000{step + 1}", ignore_errors=True)
    state = {"w": torch.zeros(300_000)}
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_newest(state) is not None
    assert torch.equal(state["w"], torch.full((300_000,), 1.0))


class Adapted(nn.Module):
    """A frozen matrix with a trained low-rank update."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(16, 2))
        self.b = nn.Parameter(torch.randn(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a @ self.b


def test_trainable_only_leaves_the_base_alone(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = Adapted(0)
    optimizer = torch.optim.AdamW([model.a, model.b], lr=1e-2)
    step(model, optimizer)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model_state(model, optimizer, trainable_only=True))
    other = Adapted(1)
    base = other.base.weight.clone()
    optimizer_2 = torch.optim.AdamW([other.a, other.b], lr=1e-2)
    state = model_state(other, optimizer_2, trainable_only=True)
    assert sorted(state["model"]) == ["a", "b"]
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_newest(state) is not None
    load_model_state(other, optimizer_2, state, trainable_only=True)
    assert torch.equal(other.base.weight, base)
    assert not torch.equal(other.base.weight, model.base.weight)
    assert torch.equal(other.a, model.a)
    with torch.no_grad():
        other.base.weight.copy_(model.base.weight)
    step(model, optimizer)
    step(other, optimizer_2)
    assert torch.equal(other.a, model.a)
    assert torch.equal(other.b, model.b)


def test_names_are_those_of_the_plain_model(tmp_path: Path) -> None:
    """A checkpoint of a compiled and recomputing model fits the plain one."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, _ = make()
    plain = set(model_state(model)["model"])
    model.up = checkpoint_wrapper(model.up)  # type: ignore[assignment]
    model.down = torch.compile(model.down)  # type: ignore[assignment]
    assert set(model_state(model)["model"]) == plain
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model_state(model))
    other, _ = make()
    state = model_state(other)
    for tensor in state["model"].values():
        tensor.zero_()
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_newest(state) is not None
    assert torch.equal(other.get_parameter("up.weight"), model.get_parameter("up._checkpoint_wrapped_module.weight"))


# ---- several ranks -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TwoRanks:
    """What two processes did, by job; each result is that of both ranks."""

    root: Path
    saved: dict[str, list[dict[str, Any]]]
    loaded: dict[str, list[dict[str, Any]]]
    loaded_from_one: dict[str, list[dict[str, Any]]]
    failed: list[list[dict[str, Any]]]


LAYOUTS = ["fsdp", "tp"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """Two gloo ranks save, load their own and load what one rank saved, under each layout."""
    root = tmp_path_factory.mktemp("two")
    save_mode("one", str(root / "one"), str(root / "one.pt"))
    jobs: list[list[Any]] = []
    for layout in LAYOUTS:
        jobs += [
            ["save", layout, root / layout, root / f"{layout}.pt"],
            ["load", layout, root / layout, f"{root / layout}.pt"],
        ]
        jobs += [["load", layout, root / "one", root / "one.pt"]]
    jobs += [["failing", root / "failing-0", 0], ["failing", root / "failing-1", 1]]
    found = [list(pair) for pair in zip(*worker(root, jobs, ranks=2), strict=True)]
    by_kind = [dict(zip(LAYOUTS, found[kind:6:3], strict=True)) for kind in range(3)]
    return TwoRanks(root, *by_kind, found[6:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_repeat_the_undisturbed_run(two_ranks: TwoRanks, layout: str) -> None:
    assert len(list((two_ranks.root / layout / "step-00000005").glob("*.distcp"))) == 2
    for saved, loaded in zip(two_ranks.saved[layout], two_ranks.loaded[layout], strict=True):
        assert loaded["equal"]
        assert (loaded["step"], loaded["extra"], loaded["skipped"]) == (5, {"sample": 40}, [])
        assert float.fromhex(loaded["lr"]) == 1e-2 / (1.0 + 0.1 * 5)
        assert loaded["losses"] == saved["losses"]  # bit for bit


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_loads_what_two_saved(two_ranks: TwoRanks, layout: str) -> None:
    found = load_mode("one", str(two_ranks.root / layout), str(two_ranks.root / f"{layout}.pt"))
    assert found["equal"]
    assert (found["step"], found["extra"], found["skipped"]) == (5, {"sample": 40}, [])
    losses, theirs = (
        [float.fromhex(x) for x in loss] for loss in (found["losses"], two_ranks.saved[layout][0]["losses"])
    )
    assert losses == pytest.approx(theirs, rel=1e-5)  # another order of sums


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_load_what_one_saved(two_ranks: TwoRanks, layout: str) -> None:
    for found in two_ranks.loaded_from_one[layout]:
        assert found["equal"]
        assert (found["step"], found["extra"]) == (5, {"sample": 40})


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_is_full_for_one_rank_fails_on_all(two_ranks: TwoRanks, failing: int) -> None:
    found = two_ranks.failed[failing]
    assert found[0] == found[1]
    assert found[0]["newest"] == 1
    assert "disk full" in found[0]["message"]
    assert "that of step 1 is intact" in found[0]["message"]
    names = sorted(p.name for p in (two_ranks.root / f"failing-{failing}").iterdir())
    assert names == [".lock", "step-00000001"]


# ---- kill -9 -------------------------------------------------------------------------------------


def test_killed_at_any_moment_a_whole_checkpoint_is_there(tmp_path: Path) -> None:
    result = worker(tmp_path, [["kill", tmp_path / "c", 12, 2024]])[0][0]
    steps = [found["step"] for found in result["found"]]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]
    for found in result["found"]:
        assert found["skipped"] == []
        assert found["step"] == 0 or (found["equal"] and found["extra"])
    assert result["in_flight"] > 0  # some kills did fall into the writing


def test_leftovers_are_removed_at_the_start_and_do_not_count(tmp_path: Path) -> None:
    filled(tmp_path, (1,))
    for name in (".step-00000002.tmp", ".step-00000099.tmp"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    (tmp_path / ".step-00000002.tmp" / manifests.NAME).unlink()
    step, skipped, _ = restore(tmp_path)
    assert (step, skipped) == (1, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000001"]


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill test cannot see a missing fsync; the order of the calls can."""
    synced: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        real_fsync(fd)
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    at_rename: dict[str, Any] = {}

    def rename(source: Any, target: Any) -> None:
        real_rename(source, target)
        if Path(target).name == "step-00000002":
            at_rename.update(synced=list(synced), old_there=(tmp_path / "step-00000001").exists())

    filled(tmp_path, (1,))
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.restore_newest({})
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)
        checkpoints.save(2, {"w": torch.ones(10)})
        checkpoints.wait()
    temporary = tmp_path / ".step-00000002.tmp"
    files = {p.name for p in (tmp_path / "step-00000002").iterdir()}
    assert files == {".metadata", "__0_0.distcp", "manifest.json"}
    names = {re.sub(r"^\.(manifest\.json|metadata)\.tmp$", r".\1", Path(p).name) for p in at_rename["synced"]}
    assert {".metadata", "__0_0.distcp", ".manifest.json", temporary.name} <= names
    assert str(temporary) == at_rename["synced"][-1]  # the directory itself last
    assert at_rename["old_there"]
    assert synced[len(at_rename["synced"])] == str(tmp_path)  # then the new name
    assert not (tmp_path / "step-00000001").exists()


# ---- files ---------------------------------------------------------------------------------------


def test_old_ones_go_and_exactly_keep_stay(tmp_path: Path) -> None:
    filled(tmp_path, (1, 2, 3, 4, 5), keep=2)
    assert sorted(p.name for p in tmp_path.glob("*step*")) == ["step-00000004", "step-00000005"]


def test_hashes_are_those_of_sha256sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashed on the way to the disk, compared with another program's reading of the files."""
    monkeypatch.setattr(checkpoint_module, "_FILE_BYTES", 1 << 20)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {f"w{i}": torch.randn(100_000 + i) for i in range(10)})
    path = tmp_path / "step-00000001"
    entries = {name: dataclasses.astuple(entry) for name, entry in manifests.read(path).files.items()}
    assert sorted(entries) == [".metadata", "__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    listed = subprocess.run(["sha256sum", *sorted(entries)], cwd=path, capture_output=True, text=True, check=True)
    sums = dict(reversed(line.split()) for line in listed.stdout.splitlines())  # type: ignore[misc]
    assert {name: digest for name, (_, digest) in entries.items()} == sums
    assert {name: size for name, (size, _) in entries.items()} == {
        name: (path / name).stat().st_size for name in entries
    }


def test_torch_reads_a_checkpoint_without_us(tmp_path: Path) -> None:
    """The directory is a plain torch.distributed.checkpoint; its own tool converts it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model, optimizer = make()
    train(model, optimizer, 1, 2)
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(2, model_state(model, optimizer))
    dcp_to_torch_save(tmp_path / "c" / "step-00000002", tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    assert torch.equal(state["model"]["up.weight"], model.get_parameter("up.weight"))
    moments = state["optimizer"]["state"]["up.weight"]
    assert torch.equal(moments["exp_avg"], optimizer.state[model.get_parameter("up.weight")]["exp_avg"])
