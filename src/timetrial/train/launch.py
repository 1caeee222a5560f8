"""Starting many ranks: on this machine directly, elsewhere by the lines that `launch` prints.

Nothing but PyTorch's own launcher is needed on a cluster: one torchrun per node, which meet at the
first node's port. No container plug-in, no wrapper.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from timetrial.config import RunConfig

if TYPE_CHECKING:
    from timetrial.train.pulse import Beat

TIMEOUT_S = 600.0
"""How long a rank may keep the others waiting before the job ends, unless the user says otherwise."""
RENDEZVOUS_PORT = 29_500
RESTARTS = 3
"""How often torchrun starts the ranks again after one died or hung; they take up the run by themselves."""
GRACE_S = 5.0
"""How long the other ranks may take to end by themselves when one has failed."""


LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


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


def run_local(ranks: int, arguments: list[str], restarts: int = 0, timeout_s: float = TIMEOUT_S) -> int:
    """`timetrial ARGUMENTS` on `ranks` ranks of this machine; the job's exit code.

    torchrun would do for success, but ends a usage error in pages of its own report and exit code 1, and
    outlives a SIGTERM to this process. Here rank 0 speaks for the job while it is well; SIGTERM and Ctrl-C
    reach every rank, which finish their step, save and end; when one rank fails the others are ended, and
    this process says which. One that does not end `timeout_s` after another is ended, too. After a rank that
    died or hung the job is started again up to `restarts` times.
    """
    from timetrial.train.watchdog import say

    for attempt in range(restarts + 1):
        code, message, again = start_once(ranks, [sys.executable, "-m", "timetrial", *arguments], attempt, timeout_s)
        if message is not None:
            say(message)
        if not again or attempt == restarts:
            break
        print(f"starting again ({attempt + 1} of {restarts})", file=sys.stderr)
    return code


def start_once(
    ranks: int, command: list[str], attempt: int = 0, timeout_s: float = TIMEOUT_S
) -> tuple[int, str | None, bool]:
    """`command` on all ranks: exit code, what to say where rank 0 did not, and whether starting again may help."""
    from torch._C._distributed_c10d import TCPStore

    from timetrial.train import meeting, watchdog

    # hosted here: it outlives every rank, and tells afterwards what each was doing
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set(watchdog.LAUNCHER_SPEAKS, "")

    def verdict() -> str | None:
        store = meeting.newest(server)
        return watchdog.verdict(store) if store is not None else None

    job = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port,
        "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": attempt,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="timetrial-ranks-") as directory:
        said = [Path(directory) / f"rank-{rank}" for rank in range(ranks)]
        processes = []
        for rank in range(ranks):
            place = {**job, "RANK": rank, "LOCAL_RANK": rank}
            environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
            with said[rank].open("wb") as quiet:
                heard = None if rank == 0 else quiet
                processes.append(subprocess.Popen(command, env=environment, stdout=heard, stderr=heard))
        ended = _wait(processes, lambda: verdict() is not None, timeout_s)
        store = meeting.newest(server)
        beats = watchdog.read_beats(store, ranks) if store is not None else dict.fromkeys(range(ranks))
        return _outcome(ended, said, verdict(), beats)


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int
    """Exit code; a signal's number negative."""
    by_us: bool
    """Whether this process killed it, because others had ended."""


def _wait(processes: list[subprocess.Popen[bytes]], hopeless: Callable[[], bool], timeout_s: float) -> list[Ended]:
    """How all ranks ended, in rank order. `hopeless`: those that are left will not end by themselves."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:  # a terminal sends Ctrl-C to the ranks by itself
            for process in processes:
                process.send_signal(number)

    previous = [(number, signal.signal(number, pass_on)) for number in (signal.SIGTERM, signal.SIGINT)]
    killed: set[int] = set()
    try:
        failed_at: float | None = None
        ended_at: float | None = None
        while None in (codes := [process.poll() for process in processes]):
            if failed_at is None and any(codes):
                failed_at = time.monotonic()
            if ended_at is None and 0 in codes:
                ended_at = time.monotonic()
            late = ended_at is not None and time.monotonic() - ended_at > timeout_s
            if late or (failed_at is not None and (time.monotonic() - failed_at > GRACE_S or hopeless())):
                killed |= _kill(processes)  # waits for a rank that is gone; its checkpoints are whole
            time.sleep(0.05)
    finally:
        killed |= _kill(processes)
        for process in processes:
            process.wait()
        for number, handler in previous:
            signal.signal(number, handler)
    return [Ended(process.returncode, process.pid in killed) for process in processes]


def _kill(processes: list[subprocess.Popen[bytes]]) -> set[int]:
    """SIGKILL, which also ends a process that was stopped; who was still there."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.kill()
    return {process.pid for process in left}


def _outcome(
    ended: list[Ended], said: list[Path], verdict: str | None, beats: Mapping[int, Beat | None]
) -> tuple[int, str | None, bool]:
    """The job's exit code, what to say where rank 0 did not, and whether starting again may help."""
    from timetrial.train.pulse import ranks_text
    from timetrial.train.watchdog import RESUME, last_of

    if verdict is not None:
        return 1, verdict, True
    lost = {rank for rank, beat in beats.items() if beat is not None and beat.state == "lost"}
    for rank, end in enumerate(ended):
        if end.code < 0 and not end.by_us and rank not in lost:
            return 1, f"rank {rank} was killed by signal {-end.code}, {last_of(rank, beats)}; {RESUME}", True
    if ended[0].code in (1, 2) and 0 not in lost:
        return ended[0].code, None, False  # rank 0 has said what is wrong
    for rank, end in enumerate(ended):
        if end.code > 0 and rank not in lost:
            lines = said[rank].read_text(errors="replace").strip().splitlines() if rank else []
            words = lines[-1].removeprefix(f"[rank{rank}]: ").removeprefix("error: ") if lines else ""  # torch's mark
            last = f": {words}" if words else ""
            message = f"rank {rank} ended with exit code {end.code}{last}; {RESUME}"
            return end.code if end.code in (1, 2) else 1, message, False
    if lost:
        return 1, f"{ranks_text(lost)} lost the connection to the others; {RESUME}", True
    late = [rank for rank, end in enumerate(ended) if end.by_us]
    return (1, f"{ranks_text(late)} did not end with the others; {RESUME}", True) if late else (0, None, False)


def torchrun_line(cluster: Cluster, arguments: list[str], head: str = "$HEAD_NODE") -> str:
    """The line to run on every node."""
    words = f"torchrun --nnodes={cluster.nodes} --nproc-per-node={cluster.ranks_per_node} --max-restarts={RESTARTS}"
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
#SBATCH --requeue
#SBATCH --open-mode=append
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
