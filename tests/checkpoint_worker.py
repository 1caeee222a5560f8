"""Processes that tests/test_checkpoint.py starts: one or two ranks that train a small model.

What the jobs find is printed as one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from timetrial.errors import RunFailed
from timetrial.train.checkpoint import Checkpointer
from timetrial.train.state import load_model_state, model_state

DIM = 32


class Net(nn.Module):
    """Two linear layers around a GELU, with a norm and a buffer; 7 and 24 divide unevenly over 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)
        self.head = nn.Linear(DIM, 7)
        self.register_buffer("scale", torch.tensor([1.25]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x))))) * self.scale


def make(layout: str = "one", fused: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with the same weights everywhere, laid out, and its optimizer in two groups."""
    torch.manual_seed(7)
    model: nn.Module = Net()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    fused = fused and layout != "tp"  # plain tensors and DTensors in one fused step are not possible
    return model, torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[str]:
    """Steps first..last, each a function of its number; the losses, exactly."""
    losses = []
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, DIM, generator=generator)
        loss = model(x).square().mean()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1.0 + 0.1 * step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers, moments and step counts by name, unsharded, read past the code under test."""
    out = {name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            out[f"{name}/{key}"] = whole(value)
    return out


def save_mode(layout: str, directory: str, out: str) -> dict[str, Any]:
    """Trains 5 steps with a checkpoint of step 3 in flight, saves step 5, trains 5 more."""
    model, optimizer = make(layout)
    with Checkpointer(Path(directory)) as checkpoints:
        train(model, optimizer, 1, 3)
        checkpoints.save(3, model_state(model, optimizer))
        train(model, optimizer, 4, 5)  # collectives of both threads at once
        checkpoints.save(5, model_state(model, optimizer), {"sample": 40})
        state = flat(model, optimizer)
        losses = train(model, optimizer, 6, 10)
    end = flat(model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"state": state, "end": end}, out)
    return {"losses": losses}


def load_mode(layout: str, directory: str, out: str) -> dict[str, Any]:
    """Restores into a new model, compares with what was saved, trains 5 more."""
    model, optimizer = make(layout)
    state = model_state(model, optimizer)
    with Checkpointer(Path(directory)) as checkpoints:
        restored = checkpoints.restore_newest(state)
    assert restored is not None
    load_model_state(model, optimizer, state)
    mine = flat(model, optimizer)
    theirs = torch.load(out)["state"]
    equal = mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    return {
        "step": restored.step,
        "extra": restored.extra,
        "skipped": restored.skipped,
        "equal": equal,
        "lr": optimizer.param_groups[0]["lr"].hex(),
        "losses": train(model, optimizer, 6, 10),
    }


def failing_mode(directory: str, which: int) -> dict[str, Any]:
    """Rank `which` cannot write its shard: every rank must learn it, and the old checkpoint stay."""
    from timetrial.train import manifest

    model, optimizer = make("fsdp")
    train(model, optimizer, 1, 1)
    with Checkpointer(Path(directory)) as checkpoints:
        checkpoints.save(1, model_state(model, optimizer))
        checkpoints.wait()
        real = manifest.write_all

        def full(fd: int, data: Any) -> None:
            if len(data) > 1000:
                raise OSError(28, "No space left on device")
            real(fd, data)

        if dist.get_rank() == which:
            manifest.write_all = full
        checkpoints.save(2, model_state(model, optimizer))
        message = ""
        try:
            checkpoints.wait()
        except RunFailed as error:
            message = str(error)
        finally:
            manifest.write_all = real
        return {"message": message, "newest": checkpoints.newest}


def limited_mode(directory: str, limit: int) -> dict[str, Any]:
    """Saves 4 MB under a file size limit, as on a disk that fills up in the middle of a file."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with Checkpointer(Path(directory)) as checkpoints:
        checkpoints.restore_newest({})
        checkpoints.save(9, {"x": torch.zeros(1_000_000)})
        try:
            checkpoints.wait()
        except RunFailed as error:
            return {"message": str(error), "newest": checkpoints.newest}
    return {"message": "", "newest": 9}


# ---- kill -9 -------------------------------------------------------------------------------------


def tensors_of(step: int) -> dict[str, Tensor]:
    """2 MB whose every element says which step it belongs to."""
    return {f"t{i}": torch.full((64 * 1024,), float(step * 10 + i)) for i in range(8)}


def writer_child(directory: Path, out: int) -> None:
    """Saves without end, changing the tensors in place right after each save; a byte for each save begun."""
    checkpoints = Checkpointer(directory)
    live = {"model": tensors_of(0)}
    restored = checkpoints.restore_newest(live)
    step = restored.step if restored else 0
    while True:
        step += 1
        for name, value in tensors_of(step).items():
            live["model"][name].copy_(value)
        checkpoints.save(step, live, {"step": step, "samples": step * 8})
        os.write(out, b"+")
        for value in live["model"].values():
            value.fill_(-1.0)


def reader_child(directory: Path, out: int) -> None:
    """Restores and reports: step, or what is wrong with it."""
    state = {"model": tensors_of(0)}
    with Checkpointer(directory) as checkpoints:
        restored = checkpoints.restore_newest(state)
    found: dict[str, Any] = {"step": 0, "skipped": []}
    if restored is not None:
        expected = tensors_of(restored.step)
        found = {
            "step": restored.step,
            "skipped": restored.skipped,
            "equal": all(torch.equal(state["model"][name], expected[name]) for name in expected),
            "extra": restored.extra == {"step": restored.step, "samples": restored.step * 8},
        }
    os.write(out, json.dumps(found).encode())


def kill_mode(directory: str, rounds: int, seed: int) -> dict[str, Any]:
    """`rounds` times: a forked child saves, is killed at a random moment, another restores."""
    path = Path(directory)
    draw = random.Random(seed)
    found = []
    in_flight = 0
    for turn in range(rounds):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                writer_child(path, write_end)
            finally:
                os._exit(3)  # it never ends by itself
        os.close(write_end)
        for _ in range(turn % 3):  # the second save begins when the first is durable
            os.read(read_end, 1)
        time.sleep(draw.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.close(read_end)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the writer ended by itself: {os.waitstatus_to_exitcode(status)}"
        in_flight += any(path.glob(".step-*.tmp"))
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                reader_child(path, write_end)
                code = 0
            finally:
                os._exit(code)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        assert status == 0, "the reader failed"
        found.append(json.loads(text))
    return {"found": found, "in_flight": in_flight}


def main() -> None:
    """Jobs as JSON [[mode, argument, ...], ...], then rank, ranks and a rendezvous file when there are several."""
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        rank, size, rendezvous = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    modes = {"save": save_mode, "load": load_mode, "failing": failing_mode, "limited": limited_mode, "kill": kill_mode}
    print(json.dumps([modes[mode](*arguments) for mode, *arguments in json.loads(sys.argv[1])]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
