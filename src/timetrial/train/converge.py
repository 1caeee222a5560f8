"""Samples to converge: the mini preset trained to its target for several batch sizes and seeds.

What reference convergence points are to the official workloads, this table is to the minis: how many
samples a correct run needs at a batch size, and how much that varies. The learning rate follows the
square root of the batch size (Hoffer et al. 2017, arXiv:1705.08741, section 4), warm-up and decay keep their samples.

Each finished run is a row of the CSV at once; rows that are there are not run again.
"""

from __future__ import annotations

import csv
import math
import statistics
import tempfile
from pathlib import Path

from timetrial.config import RunConfig, parse, replace
from timetrial.errors import UserError
from timetrial.parallel.plan import validate
from timetrial.workloads.workload import find

COLUMNS = (
    "workload", "gbs", "seed", "status", "samples", "steps", "value", "target", "time_to_train_s", "tokens_per_s",
)  # fmt: skip


def at_batch_size(config: RunConfig, gbs: int) -> RunConfig:
    """`config` with another global batch size and the recipe scaled to it."""
    scale = gbs / config.plan.gbs
    optim, evaluation = config.optim, config.evaluation
    return replace(
        config,
        plan=replace(config.plan, gbs=gbs, mbs=math.gcd(gbs, config.plan.mbs)),
        optim=replace(
            optim,
            base_lr=optim.base_lr * math.sqrt(scale),
            end_lr=optim.end_lr * math.sqrt(scale),
            warmup_steps=max(1, round(optim.warmup_steps / scale)) if optim.warmup_steps else 0,
            decay_steps=max(1, round(optim.decay_steps / scale)),
        ),
        evaluation=replace(evaluation, max_samples=math.ceil(evaluation.max_samples / gbs) * gbs),
    )


def measure(workload: str, batch_sizes: str | None, seeds: int, out: Path, threads: int | None = None) -> None:
    """Train every (batch size, seed) that `out` does not hold yet; print the table at the end."""
    from timetrial.train.run import train_run

    mini = find(workload).mini()
    sizes = _sizes(batch_sizes, mini.plan.gbs)
    rows = _read(out)
    done = {(row["workload"], int(str(row["gbs"])), int(str(row["seed"]))) for row in rows}
    todo = [(gbs, seed) for gbs in sizes for seed in range(1, seeds + 1) if (workload, gbs, seed) not in done]
    for number, (gbs, seed) in enumerate(todo, 1):
        print(f"{workload} batch {gbs} seed {seed} ({number} of {len(todo)})", flush=True)
        config = replace(at_batch_size(mini, gbs), seed=seed, checkpoint_every=0, threads=threads)
        validate(config.plan, config, 1)
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory) / "run"
            result = train_run(config, run, resume=False, command="converge", quiet=True)
        if result["status"] == "stopped":
            raise UserError("interrupted; run the same command again to go on")
        rows.append({"workload": workload, "gbs": gbs, **{key: result[key] for key in COLUMNS if key in result}})
        _write(out, rows)
    print(summary_table([row for row in rows if row["workload"] == workload]))


def summary_table(rows: list[dict[str, object]]) -> str:
    """Per batch size: runs that converged, mean and spread of their samples, mean time."""
    head = f"{'batch':>6} {'converged':>10} {'samples, mean':>14} {'min':>8} {'max':>8} {'stdev':>8} {'time, mean':>11}"
    lines = [head]
    for gbs in sorted({int(str(row["gbs"])) for row in rows}):
        runs = [row for row in rows if int(str(row["gbs"])) == gbs]
        good = [row for row in runs if row["status"] == "success"]
        samples = [int(str(row["samples"])) for row in good]
        if not samples:
            lines.append(f"{gbs:>6} {f'0 of {len(runs)}':>10}")
            continue
        seconds = statistics.mean(float(str(row["time_to_train_s"])) for row in good)
        lines.append(
            f"{gbs:>6} {f'{len(good)} of {len(runs)}':>10} {statistics.mean(samples):>14,.0f} {min(samples):>8,} "
            f"{max(samples):>8,} {statistics.pstdev(samples):>8,.0f} {seconds:>9.1f} s"
        )
    return "\n".join(lines)


def _sizes(text: str | None, default: int) -> list[int]:
    if text is None:
        return [default // 2, default, default * 2]
    sizes = [int(parse(part.strip(), int, "--batch-sizes")) for part in text.split(",")]
    if min(sizes) < 1:
        raise UserError(f"--batch-sizes {text}: each must be at least 1")
    return sizes


def _read(path: Path) -> list[dict[str, object]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or set(reader.fieldnames) != set(COLUMNS):
            raise UserError(f"{path}: is not a convergence table (columns {', '.join(COLUMNS)}); choose another --out")
        return [dict(row) for row in reader]


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    import io

    from timetrial.train.durable import write_atomic

    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())
