"""How fast checkpoints are staged, written, checked and read here, and what that costs the training thread.

    python benchmarks/checkpoint_rate.py [--mb 1024] [--directory DIR]

Prints MB/s (10^6 bytes of state a second) and processor seconds a GB of each part, and the rate of a
matrix-multiply loop while a checkpoint is written against the rate without. The disk decides `write`;
give a --directory on the one that matters. Only the processor seconds mean anything on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from timetrial.train import manifest as manifests
from timetrial.train.checkpoint import Checkpointer

TENSOR_BYTES = 64 << 20


def multiply(seconds: float, busy: object = None) -> float:
    """Products of 512 x 512 matrices a second, over `seconds`, or as long as `busy()` holds."""
    a = torch.randn(512, 512)
    began, count = time.perf_counter(), 0
    while busy() if callable(busy) else time.perf_counter() - began < seconds:
        a @ a
        count += 1
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="size of the state, 10^6 bytes")
    parser.add_argument("--directory", type=Path, help="where to write; default: the temporary directory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = max(1, options.mb * 1_000_000 // TENSOR_BYTES)
    state = {"model": {f"t{i}": torch.randn(TENSOR_BYTES // 4) for i in range(count)}}
    size = count * TENSOR_BYTES / 1e6
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    rows: list[str] = []

    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def timed(name: str, began: tuple[float, float]) -> None:
        wall, processor = (after - before for after, before in zip(now(), began, strict=True))
        rows.append(f"{name:40s} {size / wall:8,.0f} MB/s {processor / size * 1e3:6.2f} processor s/GB")

    try:
        with Checkpointer(directory, keep=1) as checkpoints:
            checkpoints.save(1, state)  # makes the staging buffers
            checkpoints.wait()
            began = now()
            checkpoints.save(2, state)
            timed("stage (blocks the training)", began)
            began = now()
            checkpoints.wait()
            timed("write, hash, fsync (in the background)", began)
            alone = multiply(3.0)
            checkpoints.save(3, state)
            beside = multiply(0.0, busy=lambda: checkpoints._thread is not None and checkpoints.poll() != 3)
            path = directory / "step-00000003"
            entries = manifests.read(path).files.items()
            began = now()
            assert not manifests.problems(path, entries)
            timed(f"check sha256 ({len(entries) - 1} files)", began)
            began = now()
            checkpoints.restore_newest(state)
            timed("check and read", began)
        load = os.getloadavg()[0]
        print(f"{size:,.0f} MB of state, {os.cpu_count()} cores (load {load:.1f}), torch {torch.__version__}")
        print("\n".join(rows))
        print(f"matrix products beside the writing: {beside / alone:.0%} of the rate without")
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
