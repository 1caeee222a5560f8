"""Checkpoints that are damaged, do not fit, or meet a full disk; reading beside a run."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_files import filled, read, restore, worker
from checkpoint_worker import make, train
from timetrial.errors import RunFailed, UserError
from timetrial.train import checkpoint as checkpoint_module
from timetrial.train import manifest as manifests
from timetrial.train.checkpoint import Checkpointer
from timetrial.train.state import load_model_state, model_state

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
