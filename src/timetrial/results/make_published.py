"""Make the tables of published results: `python -m timetrial.results.make_published PUBLISHED REFERENCE`.

PUBLISHED is the facts' published_results.csv, REFERENCE their reference_convergence.csv; both name the source of each
row. Written are `data/published.csv` (one row a result), `data/reference.csv` (one row a reference convergence point)
and `data/targets.csv` (what the rounds ask of a benchmark).
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

from timetrial.errors import UserError

HERE = Path(__file__).parent / "data"

PUBLISHED = (
    "round",
    "submitter",
    "directory",
    "system",
    "system_name",
    "division",
    "accelerator",
    "accelerators",
    "nodes",
    "benchmark",
    "score_min",
    "unscaled_min",
    "scale",
    "run_min",
    "run_max",
    "runs",
    "not_converged",
    "gbs",
    "samples",
    "unit",
    "steps",
    "step_s",
    "samples_per_s",
    "rate_source",
    "eval_s",
    "init_s",
    "precision",
    "plan",
    "tflops",
    "energy_j",
    "power_w",
    "basis",
    "source",
)

NAMES = {
    "org_dir": "directory",
    "system_id": "system",
    "ttt_min": "score_min",
    "ttt_olympic_unscaled_min": "unscaled_min",
    "rcp_scaling_factor": "scale",
    "ttt_run_min": "run_min",
    "ttt_run_max": "run_max",
    "runs_nonconverged": "not_converged",
    "global_batch_size": "gbs",
    "converge_mean": "samples",
    "converge_unit": "unit",
    "steps_to_converge": "steps",
    "step_time_s": "step_s",
    "step_time_source": "rate_source",
    "eval_s_per_run": "eval_s",
    "avg_power_w": "power_w",
    "ttt_basis": "basis",
}
"""Columns that have another name here."""

TFLOP_PER_SAMPLE = {"llama31_405b": 21508.0, "llama31_8b": 421.59, "llama2_70b_lora": 2598.0, "deepseekv3_671b": 1068.0}
"""MODEL_TFLOP_PER_SAMPLE in NVIDIA's configurations (training_results_v5.1 llama31_405b, config_common_8b.sh,
llama2_70b_lora config_common.sh; v6.0 deepseekv3_671b config_common.sh): facts, training_rounds.md section 0."""

FORMATS = re.compile(r"(bf16|fp8|mxfp8|nvfp4|mxfp4)\b.*")
"""Other precisions in the facts are command lines of data loaders."""

SHORTER = {
    "recomputed from result logs: olympic mean of run_stop-run_start x scaling.json factor": "result logs",
    "derived: GBS/logged throughput": "logged throughput",
    "derived: GBS/logged throughput (throughput may include eval)": "logged throughput, evaluation perhaps in it",
    "log:per-step train_step_time": "logged steps",
    "log:train_step_timing": "logged steps",
    "log:block train_step_time": "logged blocks",
    "derived: block duration/steps in block": "block time over steps",
}
"""Words of the facts, and ours for them."""

DEGREES = (("tp", "TP"), ("cp", "CP"), ("pp", "PP"), ("vp", "VP"), ("ep", "EP"), ("dp", "DP"), ("mbs", "micro_batch"))

EVALUATED = {
    ("llama31_405b", "v5.0"): "46,080 sequences",
    ("llama31_405b", "v5.1"): "18,432 sequences; skip first floor(0.0026*GBS+12) evals",
    ("llama31_405b", "v6.0"): "18,432 sequences; skip first floor(0.0026*GBS+12) evals",
    ("deepseekv3_671b", "v6.0"): "every step",
    ("deepseekv3_671b", "v6.1"): "every step; first eval at step floor(42+24576/GBS)",
}
"""Where the facts tell several rounds in one line: training_policies training_rules.adoc (facts, training_rounds.md
section 4) and mlperf-logging 4.1.68 compliance_checker/training_6.1.0."""


def published(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of `published.csv`, by round, benchmark, accelerators and directory."""
    made = []
    for row in rows:
        out = {NAMES.get(name, name): value.strip() for name, value in row.items() if value is not None}
        out["precision"] = out["precision"] if FORMATS.fullmatch(out["precision"]) else ""
        out["plan"] = _plan(row)
        out["basis"] = SHORTER.get(out["basis"], out["basis"])
        out["rate_source"] = SHORTER.get(out["rate_source"], out["rate_source"])
        if out["benchmark"] == "unet3d":
            out["unit"] = "samples"  # the table says epochs, but its figures count images, 168 to an epoch
        out["tflops"] = ""
        flop = TFLOP_PER_SAMPLE.get(row["benchmark"])
        if flop and row["samples_per_s"]:
            out["tflops"] = f"{float(row['samples_per_s']) * flop / int(row['accelerators']):.0f}"
        made.append({name: out[name] for name in PUBLISHED})
    return sorted(
        made,
        key=lambda r: (r["round"], r["benchmark"], int(r["accelerators"]), r["directory"].lower(), r["system"].lower()),
    )


def _plan(row: dict[str, str]) -> str:
    if not row["TP"]:
        return ""
    return " ".join(f"{short}{row[name]}" for short, name in DEGREES if row[name] not in ("", "null"))


def reference(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of `reference.csv`: points of the pruned set, which the checker interpolates in, from v4.0 on."""
    made = []
    for row in rows:
        if _round(row) >= "v4.0" and row["in_pruned_set"] == "yes":
            made.append(
                {
                    "round": _round(row),
                    "benchmark": row["benchmark"],
                    "gbs": row["gbs"],
                    "mean": row["converge_mean_olympic"],
                    "unit": "samples" if row["benchmark"] == "unet3d" else row["converge_unit"],
                    "runs": row["n_runs"],
                    "source": row["source"],
                }
            )
    return sorted(made, key=lambda r: (r["round"], r["benchmark"], int(r["gbs"])))


def targets(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of `targets.csv`: one a benchmark and round, from v4.0 on."""
    made: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        key = (row["benchmark"], _round(row))
        if key[1] < "v4.0":
            continue
        made[key] = {
            "round": key[1],
            "benchmark": key[0],
            "metric": row["target_metric"],
            "target": row["target"],
            "evaluation": EVALUATED.get(key, row["eval_every"]),
            "offline": "yes" if "(offline)" in row["eval_every"] else "no",
            "source": "mlcommons/training_policies training_rules.adoc",
        }
    return sorted(made.values(), key=lambda r: (r["round"], r["benchmark"]))


def _round(row: dict[str, str]) -> str:
    return "v" + row["rules_version"].rpartition(".")[0]


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table. Raises UserError where it cannot be read."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a table of the facts") from error


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """The rows as a table with the first row's columns."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: list[str]) -> None:
    """Write the three tables."""
    if len(arguments) != 2:
        raise UserError("usage: python -m timetrial.results.make_published published_results.csv CONVERGENCE.csv")
    results, points = read(Path(arguments[0])), read(Path(arguments[1]))
    write(HERE / "published.csv", published(results))
    write(HERE / "reference.csv", reference(points))
    write(HERE / "targets.csv", targets(points))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
