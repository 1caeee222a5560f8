"""Batches: which samples a data parallel rank reads at which step, read ahead by one thread.

Step k of a run takes the global positions [k*gbs, (k+1)*gbs) of the order (`order.py`). Rank r of
`dp_size` reads the r-th of `dp_size` equal contiguous parts, cut into micro batches in order. So the
samples of a step, and their sequence over the ranks, are the same at any data parallel size, and
step k needs no step before it: resuming is starting at another position.

One thread and not worker processes: a sample is a slice of a memory-mapped file, microseconds
against a step of milliseconds to seconds, and there is no pool to leave behind after a kill.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from timetrial.data.order import Order
from timetrial.data.samples import IGNORE, Samples
from timetrial.errors import UserError

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class _Step:
    micro_batches: list[Batch]
    indices: np.ndarray


class Loader:
    """Iterates optimizer steps, without end; each is the list of this rank's micro batches.

    A micro batch holds `tokens` and `labels`, int64 [mbs, seq_len]. Errors of reading surface in
    `next()`. Use as a context manager, or call `close()`, to stop the thread.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        seed: int,
        gbs: int,
        mbs: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        start_sample: int = 0,
        ahead: int = 2,
    ) -> None:
        """`start_sample`: training samples consumed so far, over all ranks. `ahead`: steps read in advance."""
        if gbs % (mbs * dp_size):
            raise UserError(
                f"global batch {gbs} is no multiple of micro batch {mbs} x data parallel {dp_size}; change mbs or gbs"
            )
        if start_sample % gbs:
            raise UserError(
                f"{start_sample} consumed samples are no whole number of steps of {gbs}; keep gbs to resume"
            )
        if not len(samples):
            raise UserError("the training set holds no sample: it is shorter than one sequence")
        self.wait_s = 0.0
        """Seconds that the last `next()` waited for data."""
        self.last_indices = np.empty(0, dtype=np.int64)
        """Dataset indices [gbs / dp_size] of the last step on this rank, in reading order."""
        self._samples = samples
        self._order = Order(len(samples), seed)
        self._gbs, self._mbs, self._part = gbs, mbs, gbs // dp_size
        self._offset = dp_rank * self._part
        self._queue: queue.Queue[_Step | BaseException] = queue.Queue(maxsize=ahead)
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(start_sample,), name="data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise RuntimeError("the loader is closed")
        begin = time.perf_counter()
        item = self._queue.get()
        self.wait_s = time.perf_counter() - begin
        if isinstance(item, BaseException):
            self._error = item
            raise item
        self.last_indices = item.indices
        return item.micro_batches

    def close(self) -> None:
        """Stop reading and join the thread. Safe to call twice."""
        self._stop.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()  # the thread may be waiting for room
            self._thread.join(timeout=0.01)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self, start: int) -> None:
        try:
            while not self._stop.is_set():
                self._queue.put(self._read(start + self._offset))
                start += self._gbs
        except BaseException as error:  # handed to the consumer
            self._queue.put(error)

    def _read(self, position: int) -> _Step:
        indices = self._order.indices(position, position + self._part)
        chunks = (indices[i : i + self._mbs] for i in range(0, self._part, self._mbs))
        return _Step([collate([self._samples[int(i)] for i in chunk]) for chunk in chunks], indices)


def collate(samples: list[dict[str, np.ndarray]]) -> Batch:
    """Stack samples of [seq_len] into one batch of int64 tensors [len(samples), seq_len]."""
    return {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}


def eval_batches(
    samples: Samples, count: int, mbs: int, dp_rank: int = 0, dp_size: int = 1, pad: bool = False
) -> Iterator[Batch]:
    """The first `count` held-out samples, a contiguous part for each rank, in batches of up to `mbs`.

    Every rank gets the same number of batches, since a forward pass may hold collectives: a rank
    that has no sample left gets one whose labels are all ignored. With `pad`, every batch is filled
    up to `mbs` with such samples, for pipelines whose shapes are fixed. So average over counted
    tokens, never over batches. Raises UserError when there are fewer than `count` samples.
    """
    if count > len(samples):
        raise UserError(f"evaluation needs {count:,} held-out samples, the data has {len(samples):,}")
    largest = -(-count // dp_size)
    mine = range(count * dp_rank // dp_size, count * (dp_rank + 1) // dp_size)
    for i in range(0, largest, mbs):
        rows = [samples[j] for j in mine[i : i + mbs]]
        short = (mbs if pad else 1) - len(rows)
        rows += [_ignored(samples[0])] * max(0, short)
        yield collate(rows)


def _ignored(sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": sample["tokens"], "labels": np.full_like(sample["labels"], IGNORE)}
