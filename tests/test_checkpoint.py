"""Checkpoints: exact, whole or not there, damaged ones noticed, any number of ranks."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint_worker import flat, load_mode, make, save_mode, train
from timetrial.errors import RunFailed, UserError
from timetrial.train import checkpoint as checkpoint_module
from timetrial.train import manifest as manifests
from timetrial.train.checkpoint import Checkpointer, Restored
from timetrial.train.state import load_model_state, model_state

WORKER = Path(__file__).with_name("checkpoint_worker.py")


def worker(root: Path, jobs: list[list[Any]], ranks: int = 1) -> list[list[dict[str, Any]]]:
    """What each rank of a worker process printed: one result for each job."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(WORKER), json.dumps(jobs, default=str)]
    places = [[str(rank), str(ranks), str(root / "rendezvous")] if ranks > 1 else [] for rank in range(ranks)]
    processes = [
        subprocess.Popen([*command, *place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for place in places
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(text) for text, _ in outputs]


def filled(directory: Path, steps: tuple[int, ...] = (1, 2, 3), keep: int = 3) -> None:
    """A directory with small checkpoints whose tensor is their step."""
    with Checkpointer(directory, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"model": {"w": torch.full((1000,), float(step))}}, {"samples": step * 8})


def restore(directory: Path) -> tuple[int, list[str], Tensor]:
    state = {"model": {"w": torch.zeros(1000)}}
    with Checkpointer(directory, keep=3) as checkpoints:
        restored = checkpoints.restore_newest(state)
    assert restored is not None
    assert restored.extra == {"samples": restored.step * 8}
    return restored.step, restored.skipped, state["model"]["w"]


def read(directory: Path) -> Restored:
    """What a reader finds; it leaves no trace."""
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    with Checkpointer(directory, read_only=True) as checkpoints:
        restored = checkpoints.restore_newest({"model": {"w": torch.zeros(1000)}})
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    assert restored is not None
    return restored


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


# ---- damage --------------------------------------------------------------------------------------


def truncate(path: Path) -> str:
    data = next(path.glob("*.distcp"))
    size = data.stat().st_size
    os.truncate(data, size // 2)
    return f"{data.name} has {size // 2:,} bytes instead of {size:,}"


def flip(path: Path) -> str:
    data = next(path.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    return f"{data.name} has another sha256"


def flip_metadata(path: Path) -> str:
    content = bytearray((path / ".metadata").read_bytes())
    content[-20] ^= 1
    (path / ".metadata").write_bytes(content)
    return ".metadata has another sha256"


def no_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "manifest.json is missing"


def torn_manifest(path: Path) -> str:
    os.truncate(path / "manifest.json", 100)
    return "manifest.json is no JSON"


def changed_manifest(path: Path) -> str:
    text = (path / "manifest.json").read_text()
    assert '"samples": 24' in text
    (path / "manifest.json").write_text(text.replace('"samples": 24', '"samples": 25'))
    return "manifest.json was changed"


def foreign_manifest(path: Path) -> str:
    (path / "manifest.json").write_text('{"format": "other 2", "files": {}}')
    return "manifest.json has the format 'other 2'"


def no_file(path: Path) -> str:
    next(path.glob("*.distcp")).unlink()
    return "__0_0.distcp is missing"


def empty(path: Path) -> str:
    shutil.rmtree(path)
    path.mkdir()
    return "manifest.json is missing"


DAMAGES = [
    truncate, flip, flip_metadata, no_manifest, torn_manifest, changed_manifest, foreign_manifest, no_file, empty,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, damage: Any) -> None:
    filled(tmp_path)
    what = damage(tmp_path / "step-00000003")
    assert read(tmp_path).extra == {"samples": 16}
    step, skipped, w = restore(tmp_path)
    assert step == 2
    assert torch.equal(w, torch.full((1000,), 2.0))
    assert len(skipped) == 1
    assert "step-00000003" in skipped[0]
    assert "using step-00000002" in skipped[0]
    assert what in skipped[0]
    assert sorted(p.name for p in tmp_path.glob("*step*")) == [
        "damaged-step-00000003", "step-00000001", "step-00000002"
    ]  # fmt: skip


def test_two_damaged_ones_and_then_going_on(tmp_path: Path) -> None:
    filled(tmp_path)
    flip(tmp_path / "step-00000003")
    no_file(tmp_path / "step-00000002")
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        state = {"model": {"w": torch.zeros(1000)}}
        restored = checkpoints.restore_newest(state)
        assert restored is not None
        assert restored.step == 1
        assert [message.split(" is damaged")[0] for message in restored.skipped] == [
            "checkpoint step-00000003", "checkpoint step-00000002"
        ]  # fmt: skip
        for step in (2, 3):
            checkpoints.save(step, {"model": {"w": torch.full((1000,), float(step))}}, {"samples": step * 8})
    assert restore(tmp_path)[:2] == (3, [])
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]


def test_none_intact_stops_and_touches_nothing(tmp_path: Path) -> None:
    filled(tmp_path, (1, 2))
    flip(tmp_path / "step-00000001")
    no_manifest(tmp_path / "step-00000002")
    for _ in range(2):  # a second try must not take the empty directory for a new run
        with (
            Checkpointer(tmp_path) as checkpoints,
            pytest.raises(RunFailed, match=r"no checkpoint is intact.*step-00000002.*step-00000001"),
        ):
            checkpoints.restore_newest({"model": {"w": torch.zeros(1000)}})
    with pytest.raises(RunFailed, match=r"no checkpoint is intact: .*step-00000002.*step-00000001"):
        read(tmp_path)


def test_an_empty_directory_has_nothing_to_restore(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "new") as checkpoints:
        assert checkpoints.restore_newest({"w": torch.zeros(1)}) is None
        assert checkpoints.newest is None
    with Checkpointer(tmp_path / "nowhere", read_only=True) as checkpoints:
        assert checkpoints.restore_newest({"w": torch.zeros(1)}) is None
    assert not (tmp_path / "nowhere").exists()


# ---- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model": {"w": torch.zeros(1000), "v": torch.zeros(1)}}, "it has no model.v"),
        ({"model": {"w": torch.zeros(999)}}, r"its model.w is \(1000,\), here it is \(999,\)"),
        ({"model": {"w": torch.zeros(1000, dtype=torch.bfloat16)}}, "its model.w is torch.float32, here it is"),
        ({"model": {"v": torch.zeros(1)}}, r"it has no model.v \(and 1 more\)"),
        ({"model": {"w": torch.zeros(1000)}, "optimizer": {"lr": 0.1}}, "it has no optimizer.lr"),
    ],
)
def test_another_model_is_refused_not_half_loaded(tmp_path: Path, state: dict[str, Any], words: str) -> None:
    filled(tmp_path)
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(UserError, match=words):
        checkpoints.restore_newest(state)
    assert sorted(p.name for p in tmp_path.glob("step-*"))[-1] == "step-00000003"


def test_a_part_of_the_state_can_be_read_alone(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 1, 2)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, model_state(model, optimizer))
    other, _ = make()
    state = model_state(other)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_newest(state) is not None
    load_model_state(other, None, state)
    assert torch.equal(other.get_parameter("up.weight"), model.get_parameter("up.weight"))


def test_an_earlier_runs_checkpoints_are_not_overwritten(tmp_path: Path) -> None:
    filled(tmp_path, (1, 2))
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.newest == 2
        for step in (1, 2, 3):
            with pytest.raises(UserError, match=r"earlier run, the newest of step 2.*--resume"):
                checkpoints.save(step, {"w": torch.zeros(1)})
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002"]


def test_the_same_step_is_written_once_and_steps_do_not_go_back(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(4, {"w": torch.zeros(1)}, {"first": True})
        checkpoints.save(4, {"w": torch.zeros(1)}, {"first": False})
        with pytest.raises(ValueError, match="step 3 after that of step 4"):
            checkpoints.save(3, {"w": torch.zeros(1)})
    assert manifests.read(tmp_path / "step-00000004").extra == {"first": True}


def test_state_that_cannot_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match=r"a\.b is neither tensor nor JSON"):
            checkpoints.save(1, {"a": {"b": object()}})
        with pytest.raises(TypeError, match=r"state key 0"):
            checkpoints.save(1, {"a": {0: 1}})
        with pytest.raises(TypeError):
            checkpoints.save(1, {}, {"extra": object()})
        assert checkpoints.wait() is None


def test_odd_values_come_back_exactly(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "bf16": torch.randn(17, dtype=torch.bfloat16),
        "int": torch.arange(5),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "lr": 0.1 + 0.2,
        "tiny": 5e-324,
        "betas": (0.9, 0.999),
        "none": None,
        "big": 2**70,
    }
    expected = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"s": state}, {"10": 1, "9": {"x": [1, 2]}, "text": "Ä"})
    for key, value in state.items():
        state[key] = torch.zeros_like(value) if isinstance(value, Tensor) else (() if key == "betas" else 0)
    with Checkpointer(tmp_path) as checkpoints:
        restored = checkpoints.restore_newest({"s": state})
    assert restored is not None
    assert restored.extra == {"10": 1, "9": {"x": [1, 2]}, "text": "Ä"}
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert state[key].contiguous().view(-1).view(torch.uint8).tolist() == (
                value.contiguous().view(-1).view(torch.uint8).tolist()
            ), key
        else:
            assert state[key] == value
            assert type(state[key]) is type(value)


# ---- disks ---------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 8 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_is_foreseen_and_the_old_checkpoint_stays(small_disk: Path) -> None:
    filled(small_disk / "c", (1,))
    with Checkpointer(small_disk / "c") as checkpoints:
        checkpoints.restore_newest({})
        checkpoints.save(2, {"w": torch.zeros(3_000_000)})
        with pytest.raises(RunFailed) as caught:
            checkpoints.wait()
        message = str(caught.value)
        assert "12,000,000 bytes are needed" in message
        assert re.search(r"[78],\d{3},\d{3} bytes are free", message)
        assert "that of step 1 is intact" in message
        assert "\n" not in message
        checkpoints.save(3, {"model": {"w": torch.full((1000,), 3.0)}}, {"samples": 24})  # a smaller one still fits
    assert restore(small_disk / "c")[:2] == (3, [])


@pytest.mark.parametrize("files", [1, 4])
def test_a_disk_that_fills_up_while_writing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], files: int
) -> None:
    """Others take the space after it was counted; several writing threads must not lose the error."""
    monkeypatch.setattr(checkpoint_module, "free_bytes", lambda path: 1 << 40)
    monkeypatch.setattr(checkpoint_module, "_FILE_BYTES", 12_000_000 // files)
    filled(small_disk / "c", (1,))
    with Checkpointer(small_disk / "c") as checkpoints:
        checkpoints.restore_newest({})
        checkpoints.save(2, {f"w{i}": torch.zeros(300_000) for i in range(10)})
        with pytest.raises(RunFailed, match="disk full: 12,000,000 bytes are needed"):
            checkpoints.wait()
        assert checkpoints.newest == 1
    assert sorted(p.name for p in (small_disk / "c").iterdir()) == [".lock", "step-00000001"]
    assert capfd.readouterr().err == ""
    assert restore(small_disk / "c")[:2] == (1, [])


def test_a_file_size_limit_met_while_writing(tmp_path: Path) -> None:
    filled(tmp_path, (1,))
    found = worker(tmp_path, [["limited", tmp_path, 1_000_000]])[0][0]
    assert "ulimit -f" in found["message"]
    assert "4,000,000 bytes are needed" in found["message"]
    assert found["newest"] == 1
    assert restore(tmp_path)[:2] == (1, [])


def test_an_error_surfaces_at_the_next_save_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(manifests.Manifest, "write", broken)
            checkpoints.save(1, {"w": torch.zeros(1)})
            with pytest.raises(RunFailed, match=r"there is none before it.*Input/output error"):
                checkpoints.save(2, {"w": torch.zeros(1)})
        assert checkpoints.poll() is None
        checkpoints.save(2, {"w": torch.zeros(1)})
        assert checkpoints.wait() == 2


def test_the_training_error_is_shown_before_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifests.Manifest, "write", broken)

    def run() -> None:
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, {"w": torch.zeros(1)})
            raise RunFailed("loss is nan")

    with pytest.raises(RunFailed, match="loss is nan") as caught:
        run()
    assert "Input/output error" in caught.value.__notes__[0]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match=r"checkpoints: cannot write there"):
        Checkpointer(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="at least one"):
        Checkpointer(tmp_path / "other", keep=0)


def test_a_read_only_file_system(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match="Read-only file system"):
        Checkpointer(small_disk / "checkpoints")


def test_two_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    program = "import sys, pathlib, timetrial.train.durable as d; d.DirectoryLock(pathlib.Path(sys.argv[1]))"
    other = [sys.executable, "-c", program, str(tmp_path)]
    with Checkpointer(tmp_path):
        done = subprocess.run(other, capture_output=True, text=True)
        assert f"another run (process {os.getpid()}) is using it" in done.stderr
    assert subprocess.run(other, capture_output=True).returncode == 0


# ---- reading beside a run ------------------------------------------------------------------------


def test_a_reader_leaves_the_lock_the_unfinished_and_the_damaged(tmp_path: Path) -> None:
    filled(tmp_path)
    what = flip(tmp_path / "step-00000003")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000004.tmp")
    program = (
        "import sys, pathlib, timetrial.train.durable as d; lock = d.DirectoryLock(pathlib.Path(sys.argv[1])); "
        "print('locked', flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        assert run.stdout.readline() == "locked\n"
        found = read(tmp_path)
        run.stdin.write("\n")
    assert run.returncode == 0
    assert (found.step, found.extra) == (2, {"samples": 16})
    assert [message.partition(": ")[2] for message in found.skipped] == [f"{what} than when it was written; using "
                                                                         "step-00000002"]  # fmt: skip
    assert (tmp_path / ".step-00000004.tmp" / manifests.NAME).exists()
    with Checkpointer(tmp_path, read_only=True) as checkpoints, pytest.raises(ValueError, match="to be read"):
        checkpoints.save(5, {"w": torch.zeros(1)})


@pytest.mark.parametrize("moment", ["verified", "load"])
def test_a_reader_that_the_run_overtakes_takes_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What it was reading is removed meanwhile: before it was checked, or after."""
    filled(tmp_path, (1,))
    real, calls = getattr(Checkpointer, f"_{moment}"), []

    def slow(self: Checkpointer, *arguments: Any) -> Any:
        calls.append(arguments[0].name)
        if len(calls) == 1:
            shutil.copytree(tmp_path / "step-00000001", tmp_path / "later")
            shutil.rmtree(tmp_path / "step-00000001")
            (tmp_path / "later").rename(tmp_path / "step-00000002")
        return real(self, *arguments)

    monkeypatch.setattr(Checkpointer, f"_{moment}", slow)
    state = {"model": {"w": torch.zeros(1000)}}
    with Checkpointer(tmp_path, read_only=True) as checkpoints:
        restored = checkpoints.restore_newest(state)
    assert restored is not None
    assert restored.path.name == "step-00000002"
    assert calls == ["step-00000001", "step-00000002"]
    assert torch.equal(state["model"]["w"], torch.full((1000,), 1.0))


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
