"""A prediction as plain JSON values: every figure under a key that names its unit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import timetrial
from timetrial.predict.memory import GIB
from timetrial.report.prediction_record import Answered
from timetrial.report.prediction_sure import sure
from timetrial.report.prediction_text import kinds_of


def as_json(answered: Answered) -> dict[str, Any]:
    """What `json.dumps` takes. Figures that are not known are null; none is infinite or no number."""
    p = answered.prediction
    fmt, peak = answered.peak
    found = sure(answered)
    values = {
        "timetrial": timetrial.__version__,
        "model": p.request.model,
        "workload": p.request.config.workload,
        "round": p.request.round or p.request.config.round,
        "gpus": p.request.plan.world_size,
        "step_time_s": p.step.seconds,
        "interval": {
            "low_s": answered.interval.low_s,
            "high_s": answered.interval.high_s,
            "basis": answered.interval.basis,
            "outside_validated": answered.interval.outside,
        },
        "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
        "model_tflops_per_gpu": p.flops_per_s_per_gpu / 1e12,
        "mfu": answered.mfu,
        "mfu_of": {"format": fmt, "dense_peak_tflops": peak / 1e12},
        "micro_batches": p.step.micro_batches,
        "evaluation_s": p.step.evaluation_s,
        "breakdown_s": answered.breakdown,
        "memory_gib": _memory(answered),
        "fits": answered.fits,
        "fits_as_planned": answered.reason == "fits",
        "fits_reason": answered.reason,
        "time_to_train_min": _time(answered),
        "energy_kwh": _energy(answered),
        "scaling": [point._asdict() for point in answered.scaling],
        "published": [run._asdict() for run in answered.published],
        "mapping": {group: _plain(lies) | {"inside": lies.inside} for group, lies in answered.groups.items()},
        "plan": _plain(p.request.plan),
        "precision": p.request.recipe,
        "attention_precision": p.request.attention,
        "seq_len_tokens": p.request.seq_len,
        "system": {
            "name": p.system.name,
            "title": p.system.title,
            "accelerator": p.system.accelerator.name,
            "domain_gpus": p.system.scale_up.domain,
            "node_gpus": p.system.node.accelerators,
        },
        "stack": {"name": p.stack.name, "title": p.stack.title},
        "sources": {
            "system": dict(p.system.sources),
            "stack": dict(p.stack.sources),
            "measured": list(found.measured),
            "published": list(found.published),
        },
        "assumed": list(found.assumed),
        "notes": list(answered.notes),
    }  # fmt: skip
    return {key: finite(value) for key, value in values.items()}


def _memory(answered: Answered) -> dict[str, Any] | None:
    if (memory := answered.memory) is None:
        return None
    return {
        "peak": memory.peak.total / GIB,
        "capacity": answered.prediction.system.accelerator.memory_bytes / GIB,
        "fullest_rank": memory.fullest,
        "by_kind": {kind: size / GIB for kind, size in kinds_of(memory.peak).items()},
        "by_stage": [
            {"rank": r, "total": rank.total / GIB} | {kind: size / GIB for kind, size in kinds_of(rank).items()}
            for r, rank in enumerate(memory.ranks)
        ],
    }


def _time(answered: Answered) -> dict[str, Any] | None:
    if (t := answered.time) is None:
        return None
    return {
        "expected": t.minutes,
        "low": t.low,
        "high": t.high,
        "samples": t.samples,
        "samples_low": t.samples_low,
        "samples_high": t.samples_high,
        "steps": t.steps,
        "evaluations": t.evaluations,
        "evaluation_s": t.evaluation_s,
        "outside": t.outside,
        "basis": t.basis,
    }


def _energy(answered: Answered) -> dict[str, Any] | None:
    if (e := answered.energy) is None:
        return None
    return {
        "expected": e.kwh,
        "low": e.low / 3.6e6,
        "high": e.high / 3.6e6,
        "average_w_per_gpu": e.average_w,
        "measured": e.measured,
        "basis": e.basis,
    }


def _plain(record: Any) -> dict[str, Any]:
    return dataclasses.asdict(record)


def finite(value: Any) -> Any:
    """`value` with null in place of what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
