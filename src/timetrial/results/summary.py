"""What a finished run scored: result.json and the short table at its end."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from timetrial.config import RunConfig
from timetrial.results import mllog

UNVERIFIED_NOTICE = "not verified by MLCommons"
WARM_UP_STEPS = 3
"""Steps left out of the median: first calls allocate and compile."""


MISSED_NOTICE = "target not reached: not an MLPerf result"


def notice(config: RunConfig, status: str) -> str:
    """What must be said wherever this run's numbers are shown."""
    return mllog.notice(config) or (UNVERIFIED_NOTICE if status == "success" else MISSED_NOTICE)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; none when it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summarize(
    config: RunConfig, metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], status: str
) -> dict[str, Any]:
    """The figures of a run that follow from its metrics: see `docs/how-it-works.md` for each field.

    `mlperf_result` says that nothing known speaks against it: the official definition and the whole data
    (`official_data.py`), and the target reached. `tokens_per_s` is that of a step, the median of all but the
    first; `tokens_per_s_overall` all training tokens over the time from the run's start to its last step,
    evaluations and checkpoints included. `elapsed_s` goes to the end of the last step or evaluation, and
    is the time to train where the target was reached.
    """
    steady = metrics[WARM_UP_STEPS:] or metrics
    step_times = [row["step_time_s"] for row in steady]
    median = statistics.median(step_times) if step_times else None
    mfus = [row["mfu"] for row in steady if row["mfu"] is not None]
    total = sum(step_times)
    trained_s = metrics[-1]["elapsed_s"] if metrics else 0.0
    samples = metrics[-1]["samples"] if metrics else 0
    elapsed_s = max(trained_s, evaluations[-1]["elapsed_s"] if evaluations else 0.0)
    success = status == "success"
    return {
        "workload": config.workload,
        "preset": config.preset,
        "round": config.round,
        "mlperf_result": success and mllog.notice(config) is None,
        "notice": notice(config, status),
        "status": status,
        "metric": config.evaluation.metric,
        "target": config.evaluation.target,
        "value": evaluations[-1]["value"] if evaluations else None,
        "steps": metrics[-1]["step"] if metrics else 0,
        "samples": samples,
        "time_to_train_s": elapsed_s if success else None,
        "elapsed_s": elapsed_s,
        "tokens_per_s": config.plan.gbs * config.data.seq_len / median if median else None,
        "tokens_per_s_overall": samples * config.data.seq_len / trained_s if trained_s else None,
        "step_time_s": median,
        "mfu": statistics.median(mfus) if mfus else None,
        "data_wait_share": sum(row["phases"]["data"] for row in steady) / total if total else None,
        "seed": config.seed,
    }


def _mfu(result: dict[str, Any]) -> str:
    mfu, rate = result.get("mfu"), result.get("matmul_flops_per_s")
    if mfu is None or rate is None:
        return "-"
    if mfu > 1.0:
        return f"- (the machine was busy while its rate was measured: {rate / 1e9:,.0f} GFLOP/s)"
    return f"{mfu:.1%} of the measured {rate / 1e9:,.0f} GFLOP/s"


def table(result: dict[str, Any], paths: dict[str, Path]) -> str:
    """The end of a run, as lines for people."""
    verdict = {
        "success": "target reached",
        "aborted": "target NOT reached within the allowed samples",
        "stopped": "stopped before the target",
    }[result["status"]]

    def figure(key: str, pattern: str, scale: float = 1.0) -> str:
        return pattern.format(result[key] * scale) if result.get(key) is not None else "-"

    step_rate = figure("tokens_per_s", "{:,.0f} tokens/s")
    rows = [
        ("result", verdict),
        ("workload", f"{result['workload']} {result['preset']} ({result['notice']})"),
        (result["metric"], f"{figure('value', '{:.4f}')} (target {result['target']:g})"),
        ("time to train" if result["status"] == "success" else "ran for", figure("elapsed_s", "{:.1f} s")),
        ("samples, steps", f"{result['samples']:,} samples in {result['steps']:,} steps"),
        ("throughput", f"{step_rate} in a step (median), {figure('tokens_per_s_overall', '{:,.0f}')} overall"),
        ("step time", figure("step_time_s", "{:.1f} ms (median)", 1e3)),
        ("MFU", _mfu(result)),
        ("waiting for data", figure("data_wait_share", "{:.2%} of the step time")),
    ]
    rows += [(name, str(path)) for name, path in paths.items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
