"""Starting many ranks: here through torchrun, elsewhere by the lines that `launch` prints.

Nothing but PyTorch's own launcher is needed on a cluster: one torchrun per node, which meet at the
first node's port. No container plug-in, no wrapper.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass

RENDEZVOUS_PORT = 29_500


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
    """`timetrial ARGUMENTS` on `ranks` ranks of this machine; the job's exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    return subprocess.call([*command, "-m", "timetrial", *arguments])


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


def describe(cluster: Cluster, arguments: list[str], name: str) -> str:
    """Both ways to start the job, as `timetrial launch` prints them."""
    return "\n".join(
        (
            f"# on every one of the {cluster.nodes} nodes ({cluster.ranks} ranks); HEAD_NODE names the first:"
            if cluster.nodes > 1
            else "# on the node:",
            torchrun_line(cluster, arguments),
            "",
            "# or save what follows and `sbatch` it:",
            sbatch_script(cluster, arguments, name).rstrip(),
        )
    )
