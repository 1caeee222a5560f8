"""What `timetrial list` shows: every workload at a glance, or one with the source of each value."""

from __future__ import annotations

import json
from typing import Any

from timetrial.config import RunConfig, dump
from timetrial.workloads.workload import Workload, find, names


def as_text(name: str | None = None) -> str:
    """The listing for people."""
    return _one(find(name)) if name else "\n\n".join(_brief(find(n)) for n in names())


def as_json(name: str | None = None) -> str:
    """The listing for programs: a list of workloads, each with both presets resolved."""
    return json.dumps([_record(find(n)) for n in ([name] if name else names())], indent=2)


def _brief(workload: Workload) -> str:
    official, mini = workload.official(workload.rounds[-1], None), workload.mini()
    return "\n".join(
        (
            f"{workload.name}  {workload.title}  (rounds {', '.join(workload.rounds)})",
            f"  official  {_target(official)}; {_size(official)}",
            f"  mini      {_target(mini)}; {_size(mini)}; {workload.mini_note}",
        )
    )


def _target(config: RunConfig) -> str:
    evaluation = config.evaluation
    relation = ">=" if evaluation.higher_is_better else "<="
    return f"{evaluation.metric} {relation} {evaluation.target:g}"


def _size(config: RunConfig) -> str:
    n = config.model.n_params()
    amount = f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.1f} M"
    return f"{amount} parameters, {config.data.seq_len:,} tokens a sample, batch {config.plan.gbs:,}"


def _one(workload: Workload) -> str:
    config = workload.official(workload.rounds[-1], None)
    heading = f"official values of {workload.rounds[-1]} at batch {config.plan.gbs:,}, and their source:"
    lines = [_brief(workload), "", heading]
    width = max(map(len, workload.provenance))
    for key, source in workload.provenance.items():
        lines.append(f"  {key:<{width}}  {_value(config, key)!s:<24}  {source}")
    return "\n".join(lines)


def _value(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = getattr(config, part, None)
    return config


def _record(workload: Workload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "title": workload.title,
        "rounds": list(workload.rounds),
        "official": dump(workload.official(workload.rounds[-1], None)),
        "mini": dump(workload.mini()),
        "mini_note": workload.mini_note,
        "provenance": dict(workload.provenance),
    }
