"""A whole step as one CUDA graph: its launches are recorded once and from then on replayed by one.

What is recorded are kernels with their addresses and their scalars, never Python. So the work

- reads what changes between calls from tensors that stay where they are, and writes its results to such;
- makes no tensor out of host values and reads none back;
- starts and ends without gradients: those made inside live in the graph's own memory.

It draws random numbers from the device's default generator, which a graph reads anew at each replay:
seeding that before a call gives the numbers that the same work draws outside of a graph.

The first calls run as they are, on the stream that is recorded later: kernels are chosen, communicators
and optimizer states made. Megatron-Core's `full_cuda_graph.py` and torchtitan's `cudagraph.py` do the same
for forward and backward; here clipping and optimizer are inside as well, as nothing of them needs the host.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UP = 3
"""Calls before the recording; the optimizer makes its state in the first, FSDP settles by the second."""


class Recorder(Protocol):
    """What records work and runs it again. `CudaGraph`, or a stand-in on machines without a GPU."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run `work` where it will be recorded."""

    def record(self, work: Callable[[], None]) -> None:
        """Write down what `work` does to tensors, without doing it."""

    def replay(self) -> None:
        """Do what was recorded."""

    def close(self) -> None:
        """Forget it: before the process group goes, whose communicators the recording holds."""


class CudaGraph:
    """`torch.cuda.CUDAGraph` on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, work: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        current.wait_stream(self.stream)

    def record(self, work: Callable[[], None]) -> None:
        # thread_local: NCCL's watchdog and the checkpoint's writer may call CUDA from their threads meanwhile
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            work()

    def replay(self) -> None:
        self.graph.replay()

    def close(self) -> None:
        torch.cuda.synchronize(self.stream.device)
        self.graph.reset()


class Graphed:
    """`work` run as it is WARM_UP times, then recorded and replayed."""

    def __init__(self, work: Callable[[], None], recorder: Recorder, warm_up: int = WARM_UP) -> None:
        self.work, self.recorder, self.warm_up = work, recorder, warm_up
        self.calls = 0

    def __call__(self) -> None:
        if self.calls < self.warm_up:
            self.recorder.warm_up(self.work)
        else:
            if self.calls == self.warm_up:
                self.recorder.record(self.work)
            self.recorder.replay()
        self.calls += 1

    def close(self) -> None:
        """Let go of the recording; a later call would start anew with the warm-up."""
        self.recorder.close()
        self.calls = 0
