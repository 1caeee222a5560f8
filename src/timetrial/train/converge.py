"""Samples to converge: the mini preset trained to its target for several batch sizes and seeds.

What reference convergence points are to the official workloads, this table is to the minis: how many
samples a correct run needs at a batch size, and how much that varies. The learning rate follows the
square root of the batch size (Hoffer et al. 2017, arXiv:1705.08741, section 4), warm-up and decay keep their samples.

Each finished run is a row of the CSV at once, a run that broke too (status `failed`). Rows that are there are
not run again, if they are of this configuration: a row tells by a hash which one it is of. Rows of another
one stay in the file, and count for nothing here.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from timetrial.check import check
from timetrial.config import RunConfig, Submission, dump, parse, replace
from timetrial.errors import RunFailed, UserError
from timetrial.parallel.plan import validate
from timetrial.train.durable import write_atomic
from timetrial.workloads.workload import Workload, find

COLUMNS = (
    "workload", "gbs", "seed", "config", "status", "samples", "steps", "value", "target", "time_to_train_s",
    "tokens_per_s",
)  # fmt: skip
Row = dict[str, Any]

UNSCORED = ("lanes", "plan.zero", "plan.shard", "plan.graph", "plan.async_tp")
"""Fields that a recipe's hash leaves out, because they change how a run is laid out and nothing that it scores."""


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


def recipe_hash(workload: Workload) -> str:
    """Eight hexadecimal digits of the mini's configuration, and of its base's where it starts from one.

    Left out is what differs from row to row (batch size, seed), and what changes no number that a run
    scores: threads (but for rounding), checkpoints, who submits and switches of layout (`UNSCORED`).
    """
    mini = workload.mini()
    configs = [mini]
    if mini.init.kind == "base":
        start = find(mini.init.base) if mini.init.base else workload
        configs += [start.mini_base()] if start.mini_base else []
    same: dict[str, Any] = {"seed": 1, "threads": None, "checkpoint_every": 0, "keep_checkpoints": 1}
    unified = (
        replace(config, plan=replace(config.plan, gbs=1, mbs=1), submission=Submission(), **same) for config in configs
    )
    return hashlib.sha256("".join(map(_scored, unified)).encode()).hexdigest()[:8]


def _scored(config: RunConfig) -> str:
    """`config` as JSON text, without what changes no score."""
    values = dump(config)
    for key in UNSCORED:
        group, _, name = key.rpartition(".")
        del (values[group] if group else values)[name]
    return json.dumps(values, indent=2) + "\n"


def measure(workload: str, batch_sizes: str | None, seeds: int, out: Path, threads: int | None = None) -> None:
    """Train every (batch size, seed) that `out` does not hold yet; print the table at the end.

    Raises UserError, before anything is trained, when `out` cannot be read or written.
    """
    found = find(workload)
    mini, recipe = found.mini(), recipe_hash(found)
    sizes = _sizes(batch_sizes, mini.plan.gbs)
    for gbs in sizes:
        config = at_batch_size(mini, gbs)
        check(config)
        validate(config.plan, config, 1)
    rows = _read(out)
    _write(out, rows)  # whether it can be written shows now, and not after the first run
    if others := sum(row["workload"] == workload and row["config"] != recipe for row in rows):
        print(f"{out}: {others} rows of {workload} are of another configuration than {recipe}; they do not count")
    done = {key(row) for row in rows}
    todo = [(gbs, seed) for gbs in sizes for seed in range(1, seeds + 1)]
    todo = [(gbs, seed) for gbs, seed in todo if (workload, gbs, seed, recipe) not in done]
    if todo:
        mini = _prepared(mini, threads)
    for number, (gbs, seed) in enumerate(todo, 1):
        print(f"{workload} batch {gbs} seed {seed} ({number} of {len(todo)})", flush=True)
        result = _train(replace(at_batch_size(mini, gbs), seed=seed, checkpoint_every=0))
        if result["status"] == "stopped":
            raise UserError("interrupted; run the same command again to go on")
        named = {"workload": workload, "gbs": gbs, "config": recipe}
        rows.append({**{column: result.get(column) for column in COLUMNS}, **named})
        _write(out, rows)
    print(summary_table([row for row in rows if row["workload"] == workload and row["config"] == recipe]))


def key(row: Row) -> tuple[str, int, int, str]:
    """What a row is of: workload, batch size, seed, configuration."""
    return row["workload"], int(row["gbs"]), int(row["seed"]), row["config"]


def _prepared(mini: RunConfig, threads: int | None) -> RunConfig:
    """`mini` with the threads of all runs, settled while nothing of ours is running; its base is made."""
    from timetrial.train import process
    from timetrial.train import threads as free_threads
    from timetrial.train.base import initial_weights

    initial_weights(mini)
    return free_threads.settle(replace(mini, threads=threads), process.start())


def _train(config: RunConfig) -> Row:
    """The result of one run; what is known of one that failed."""
    from timetrial.results.summary import read_lines, summarize
    from timetrial.train.run import train_run
    from timetrial.train.rundir import RunDir

    with tempfile.TemporaryDirectory() as directory:
        run = RunDir(Path(directory) / "run")
        try:
            quiet = not sys.stderr.isatty()
            return train_run(config, run.path, resume=False, command="converge", quiet=quiet)
        except RunFailed as error:
            print(f"failed: {error}", file=sys.stderr)
            return summarize(config, read_lines(run.metrics), read_lines(run.evaluations), "failed")


def summary_table(rows: list[Row]) -> str:
    """Per batch size: runs that converged, mean and spread of their samples, mean time."""
    head = f"{'batch':>6} {'converged':>10} {'samples, mean':>14} {'min':>8} {'max':>8} {'stdev':>8} {'time, mean':>11}"
    lines = [head]
    for gbs in sorted({int(row["gbs"]) for row in rows}):
        runs = [row for row in rows if int(row["gbs"]) == gbs]
        good = [row for row in runs if row["status"] == "success"]
        samples = [int(row["samples"]) for row in good]
        if not samples:
            lines.append(f"{gbs:>6} {f'0 of {len(runs)}':>10}")
            continue
        seconds = statistics.mean(float(row["time_to_train_s"]) for row in good)
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


def _read(path: Path) -> list[Row]:
    """The rows of `path`, none where there is no file. Raises UserError for a file of other columns."""
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            rows = [dict(row) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as a convergence table ({error}); choose another --out") from None
    if columns == set(COLUMNS) - {"config"}:
        raise UserError(f"{path}: is of an older version, whose rows do not tell their config; choose another --out")
    if columns != set(COLUMNS):
        raise UserError(f"{path}: is not a convergence table (columns {', '.join(COLUMNS)}); choose another --out")
    for number, row in enumerate(rows, 2):
        try:
            key(row)
        except (TypeError, ValueError):
            raise UserError(f"{path} line {number}: gbs or seed is no whole number; remove the line") from None
    return rows


def _write(path: Path, rows: list[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())
