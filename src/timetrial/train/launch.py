"""Starting many ranks: on this machine directly, elsewhere by the lines that `launch` prints.

Nothing but PyTorch's own launcher is needed on a cluster: one torchrun per node, which meet at the
first node's port. No container plug-in, no wrapper.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from timetrial.config import RunConfig

RENDEZVOUS_PORT = 29_500
GRACE_S = 5.0
"""How long the other ranks may take to end by themselves when one has failed."""


LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether a launcher has given this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class Cluster:
    """Where a job runs."""

    nodes: int
    ranks_per_node: int
    minutes: int = 240
    """Wall-clock limit asked of the scheduler."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_local(ranks: int, arguments: list[str]) -> int:
    """`timetrial ARGUMENTS` on `ranks` ranks of this machine; the job's exit code.

    torchrun would do for success, but ends a usage error in pages of its own report and exit code 1, and
    outlives a SIGTERM to this process. Here rank 0 speaks for the job; SIGTERM and Ctrl-C reach every
    rank, which finish their step, save and end; when one rank fails the others are ended.
    """
    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="timetrial-ranks-") as directory:
        said = [Path(directory) / f"rank-{rank}" for rank in range(ranks)]
        processes = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, **{key: str(value) for key, value in place.items()}, **address}
            words = [sys.executable, "-m", "timetrial", *arguments]
            with said[rank].open("wb") as quiet:
                heard = None if rank == 0 else quiet
                processes.append(subprocess.Popen(words, env=environment, stdout=heard, stderr=heard))
        return _outcome(_wait(processes), said)


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """The exit codes of all ranks, in rank order; a signal's number negative."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:  # a terminal sends Ctrl-C to the ranks by itself
            for process in processes:
                process.send_signal(number)

    previous = [(number, signal.signal(number, pass_on)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        failed_at: float | None = None
        while any(process.poll() is None for process in processes):
            if failed_at is None and any(process.returncode for process in processes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
                for process in processes:
                    process.kill()  # waits for a rank that is gone; its checkpoints are whole
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in previous:
            signal.signal(number, handler)
    return [process.returncode for process in processes]


def _outcome(codes: list[int], said: list[Path]) -> int:
    """The job's exit code; a rank that failed where rank 0 had nothing to say is named."""
    if codes[0] in (1, 2):
        return codes[0]  # rank 0 has said what is wrong
    for rank, code in enumerate(codes):
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            lines = said[rank].read_text(errors="replace").strip().splitlines()
            last = f": {lines[-1].removeprefix('error: ')}" if lines else ""
            print(f"error: rank {rank} {how}{last}; --resume goes on from the last checkpoint", file=sys.stderr)
            return code if code in (1, 2) else 1
    return 0


def torchrun_line(cluster: Cluster, arguments: list[str], head: str = "$HEAD_NODE") -> str:
    """The line to run on every node."""
    words = f"torchrun --nnodes={cluster.nodes} --nproc-per-node={cluster.ranks_per_node}"
    if cluster.nodes > 1:
        words += f" --rdzv-backend=c10d --rdzv-id=timetrial --rdzv-endpoint={head}:{RENDEZVOUS_PORT}"
    else:
        words += " --standalone"
    return f"{words} -m timetrial {shlex.join(arguments)}"


def sbatch_script(cluster: Cluster, arguments: list[str], name: str) -> str:
    """A whole sbatch script; `sbatch FILE` starts the job."""
    hours, minutes = divmod(cluster.minutes, 60)
    line = torchrun_line(cluster, arguments, head='"$HEAD_NODE"').replace('"$HEAD_NODE"', "$HEAD_NODE")
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={cluster.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={cluster.ranks_per_node}
#SBATCH --exclusive
#SBATCH --time={hours:02d}:{minutes:02d}:00
#SBATCH --output={name}-%j.out
set -euo pipefail
export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c {shlex.quote(line)}
"""


def missing(config: RunConfig) -> list[str]:
    """What the job needs and was not told, as comments to stand above its lines."""
    notes = []
    if config.official and config.data.path is None:
        notes.append("# add --data DIR: the token files that `timetrial data build` makes")
    if config.init.kind == "hf" and config.init.path is None:
        notes.append("# add --set init.path=DIR: the pretrained weights as Hugging Face safetensors")
    return notes


def describe(cluster: Cluster, arguments: list[str], config: RunConfig) -> str:
    """Both ways to start the job, as `timetrial launch` prints them."""
    return "\n".join(
        (
            *missing(config),
            f"# on every one of the {cluster.nodes} nodes ({cluster.ranks} ranks); HEAD_NODE names the first:"
            if cluster.nodes > 1
            else "# on the node:",
            torchrun_line(cluster, arguments),
            "",
            "# or save what follows and `sbatch` it:",
            sbatch_script(cluster, arguments, config.workload).rstrip(),
        )
    )
