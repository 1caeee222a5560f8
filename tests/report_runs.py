"""Run directories made up for the report's tests: realistic curves, any length, any way of ending."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

from timetrial import config
from timetrial.models.llama.config import LlamaConfig

GBS, SEQ_LEN = 16, 256


def make(
    run_dir: Path,
    steps: int = 300,
    every: int = 50,
    status: str | None = "success",
    target: float = 3.3,
    metric: str = "log perplexity",
    higher: bool = False,
    nan_from: int | None = None,
    spike: float = 0.0,
    **fields: Any,
) -> Path:
    """Writes a run of `steps` steps, evaluated each `every` (0 for never); no result when status is None.

    The loss falls from about 8 to about 3, is NaN from step `nan_from` on, and jumps to `spike` once.
    `fields` replace fields of the configuration.
    """
    rng = random.Random(1)
    run_dir.mkdir(parents=True, exist_ok=True)
    run = config.RunConfig(
        workload="llama31_8b",
        preset="mini",
        round="v5.1",
        model=LlamaConfig(2048, 256, 6, 8, 4, 704),
        data=config.Data("state_of_the_union", seq_len=SEQ_LEN, tokenizer="sotu-2048"),
        optim=config.Optim(warmup_steps=steps // 10, decay_steps=max(steps, 1)),
        evaluation=config.Evaluation(
            metric, target, every_samples=every * GBS, samples=64, max_samples=steps * GBS, higher_is_better=higher
        ),
        plan=config.Plan(dp=2, mbs=2, gbs=GBS),
        checkpoint_every=100,
    )
    (run_dir / "config.json").write_text(config.dumps(config.replace(run, **fields)))
    command = "timetrial train llama31_8b --preset mini --plan dp=2 --seed 1"
    write(run_dir / "environment.json", environment(command))
    elapsed, rows, evaluations = 2.4, [], []
    for step in range(1, steps + 1):
        done = step / steps
        loss = 3.05 + 4.9 * math.exp(-9 * done) + 0.3 * math.exp(-2 * done) + rng.gauss(0, 0.05)
        loss = spike if spike and step == steps // 2 else loss
        phases = {
            "data": 0.004 * rng.expovariate(1),
            "forward": rng.gauss(0.09, 0.003),
            "backward": rng.gauss(0.18, 0.005),
            "optimizer": rng.gauss(0.028, 0.001),
            "checkpoint": 0.2 if step % 100 == 0 else 0.0,
            "other": rng.gauss(0.012, 0.001),
        }
        step_time = sum(phases.values())
        elapsed += step_time
        rows.append(
            {
                "step": step,
                "loss": math.nan if nan_from and step >= nan_from else loss,
                "samples": step * GBS,
                "step_time_s": step_time,
                "lr": 1e-3 * min(1.0, 10 * done) * (1 - 0.9 * done),
                "grad_norm": 0.45 + 2.8 * math.exp(-12 * done) + abs(rng.gauss(0, 0.12)),
                "tokens_per_s": GBS * SEQ_LEN / step_time,
                "mfu": 0.11 / step_time,
                "elapsed_s": elapsed,
                "phases": phases,
            }
        )
        if every and step % every == 0:
            value = 0.5 + 0.3 * done if higher else loss + 0.06
            reached = value >= target if higher else value <= target
            elapsed += 1.9
            evaluations.append(
                {
                    "step": step,
                    "samples": step * GBS,
                    "value": value,
                    "target": target,
                    "reached": reached,
                    "duration_s": 1.9,
                    "elapsed_s": elapsed,
                }
            )
    write_lines(run_dir / "metrics.jsonl", rows)
    if evaluations:
        write_lines(run_dir / "evaluations.jsonl", evaluations)
    if status:
        result = {
            "workload": run.workload,
            "preset": run.preset,
            "round": run.round,
            "mlperf_result": False,
            "notice": "mini preset: not an MLPerf result",
            "status": status,
            "metric": metric,
            "target": target,
            "value": evaluations[-1]["value"] if evaluations else None,
            "steps": steps,
            "samples": steps * GBS,
            "time_to_train_s": elapsed,
            "tokens_per_s": 12_345.6,
            "step_time_s": statistics.median(row["step_time_s"] for row in rows),
            "mfu": 0.352,
            "matmul_flops_per_s": 1.106e12,
            "data_wait_share": 0.0137,
            "seed": 1,
            "started": "2026-01-31T17:05:09Z",
            "command": command,
        }
        write(run_dir / "result.json", result)
    return run_dir


def environment(command: str) -> dict[str, Any]:
    """An environment.json as `train.environment.record` makes them."""
    return {
        "date": "2026-01-31T17:05:09Z",
        "command": command,
        "world_size": 2,
        "versions": {"timetrial": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "tokenizers": None},
        "revision": {"git": "0123456789abcdef0123456789abcdef01234567", "dirty": True},
        "processor": {"name": "A Processor", "cores_available": 2, "threads_per_rank": 1, "cores_used": 2},
        "memory_bytes": 25_325_268_992,
        "accelerators": [{"name": "An Accelerator", "count": 2, "memory_bytes": 141 * 2**30}],
        "os": "An Operating System 12",
    }


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
