"""Logs made from rule data, and what can be broken in them: for the tests of checks.

A log of `made` keeps every rule of its round, benchmark and division; `mutants` change one thing each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timetrial.results import ruleset
from timetrial.results.expressions import Seen, number
from timetrial.results.records import LogEvent, RunLog
from timetrial.results.ruleset import Rule, Ruleset

BATCH = {"llama31_405b": 1152, "deepseekv3_671b": 15360, "flux1": 512, "gpt3": 1536, "qwen35_397b_grpo": 256}
KINDS = {"point": "POINT_IN_TIME", "start": "INTERVAL_START", "end": "INTERVAL_END"}
FRAME = {
    *("submission_benchmark", "submission_division", "cache_clear", "init_start", "init_stop", "run_start", "run_stop"),
    *("block_start", "block_stop", "epoch_start", "epoch_stop", "eval_start", "eval_stop", "eval_accuracy"),
    *("aggregated_eval_accuracy", "averaged_validation_loss"),
}
"""Keys that `made` writes itself."""


def event(key: str, value: Any = None, kind: str = "point", **metadata: Any) -> dict[str, Any]:
    return {"kind": kind, "key": key, "value": value, "metadata": metadata}


def made(rules: Ruleset) -> list[dict[str, Any]]:
    """Events of a run that keeps `rules`."""
    by_key = {rule.key: rule for rule in rules.rules if rule.level == "fail"}
    batch = BATCH.get(rules.benchmark, 64 if rules.benchmark != "dlrmv4" else 8192)
    seen = Seen({"global_batch_size": batch}, {}, {}, rules.division)
    events = [event("submission_division", rules.division), event("submission_benchmark", rules.benchmark)]
    events += [event("cache_clear", True), event("init_start", kind="start"), event("global_batch_size", batch)]
    if "opt_name" in by_key and rules.benchmark == "resnet":
        seen.values["opt_name"] = "sgd"
    later = [key for key in by_key if key in ("opt_learning_rate_decay_steps", "opt_sparse_base_learning_rate")]
    for key in [key for key in by_key if key not in later] + later:
        rule = next((r for r in rules.rules if r.key == key and applies(r, seen)), None)
        if key in FRAME or key == "global_batch_size" or rule is None:
            continue
        value = batch // 16 if key == "num_prompts_per_step" else wanted(rule, seen)
        seen.values[key] = value
        events.append(event(key, value))
    samples, step, reached = evaluations(rules, by_key, seen)
    events += [event("seed", 7)] if "seed" not in seen.values else []
    events += [event("init_stop", kind="end"), event("run_start", kind="start")]
    if "gradient_accumulation_steps" not in seen.values:
        events.insert(4, event("gradient_accumulation_steps", 1))
    for index in range(2):
        here = {"samples_count": samples + index * step, "epoch_num": index + 1}
        events += [event("block_start", kind="start", **here), event("block_stop", kind="end", **here)]
        events.append(event("eval_start", kind="start", **here))
        if rules.benchmark == "stable_diffusion":
            events.append(event("eval_accuracy", 80.0, metric="FID", **here))
            events.append(event("eval_accuracy", 0.2, metric="CLIP", **here))
        else:
            events.append(event("eval_accuracy", reached, **here))
        if "averaged_validation_loss" in by_key:
            events.append(event("averaged_validation_loss", 0.5, **here))
        events.append(event("eval_stop", kind="end", **here))
    return [*events, event("run_stop", kind="end", status="success")]


def applies(rule: Rule, seen: Seen) -> bool:
    return rule.when is None or seen.values.get(rule.when[0]) == rule.when[1]


def wanted(rule: Rule, seen: Seen) -> Any:
    """A value that the rule takes."""
    for check in rule.checks:
        p = check.parameters
        if check.form in ("equals", "near", "proportional", "power_of_two", "multiple_near"):
            return number(p["value"], seen)
        if check.form == "one_of":
            return "sgd" if "sgd" in p["values"] else number(p["values"][0], seen)
        if check.form in ("at_least", "above"):
            return p["value"] + (1 if check.form == "above" else 0)
        if check.form == "range":
            return (number(p["least"], seen) + number(p["most"], seen)) / 2
    return "x" if any(check.form == "not_empty" for check in rule.checks) else 1


def evaluations(rules: Ruleset, by_key: dict[str, Rule], seen: Seen) -> tuple[int, int, float]:
    """(first samples, step, value) of evaluations that the rules take."""
    batch = seen.values["global_batch_size"]
    first, step, value = batch, batch, 1.0
    rule = by_key.get("eval_accuracy")
    for check in (*rule.checks, *rule.first) if rule else ():
        if check.form == "stepping":
            first, step = number(check.parameters["first"], seen), number(check.parameters["step"], seen)
        if check.form == "multiple_of":
            step = number(check.parameters["value"], seen)
        if check in rule.first:
            first = number(check.parameters["value"], seen)
    for check in rule.reached if rule else ():
        bound = check.parameters.get("value", 0)
        value = {"at_most": bound, "at_least": bound, "above": min(1.0, bound + 0.1), "below": bound * 0.9}[check.form]
        if check.form in ("at_most", "at_least") or len(rule.reached) == 1:
            break
    return first, step, value


# ---- what can be broken ------------------------------------------------------------------------------------


def mutants(events: list[dict[str, Any]], rules: Ruleset) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(what was done, events): each key removed, changed, doubled, moved; each metadata taken away."""
    keys = list(dict.fromkeys(e["key"] for e in events))
    for key in keys:
        yield f"no {key}", [e for e in events if e["key"] != key]
        index = next(i for i, e in enumerate(events) if e["key"] == key)
        one = events[index]
        for other in changed(one["value"]):
            yield f"{key} = {other!r}", [{**e, "value": other} if e["key"] == key else e for e in events]
        yield f"{key} twice", [*events[:index], one, one, *events[index + 1 :]]
        if one["value"] is not None:
            yield f"{key} with two values", [*events[:index], one, {**one, "value": "other"}, *events[index + 1 :]]
        yield f"{key} first", [one, *events[:index], *events[index + 1 :]]
        yield f"{key} last", [*events[:index], *events[index + 1 :], one]
        for name in one["metadata"]:
            lacking = {k: v for k, v in one["metadata"].items() if k != name}
            yield f"{key} without {name}", [*events[:index], {**one, "metadata": lacking}, *events[index + 1 :]]
    stop = events[-1]
    yield "aborted", [*events[:-1], {**stop, "metadata": {"status": "aborted"}}]


def changed(value: Any) -> list[Any]:
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, str):
        return ["", "nonsense", 3]
    return [value * 1.01 + 1, value * 1.0000001, -1, 0, "text"]


def write(path: Path, events: list[dict[str, Any]], late_ms: int = 0) -> Path:
    """As a log; `late_ms` is added to the time from init_stop on."""
    lines, time_ms = [], 1_700_000_000_000
    for index, e in enumerate(events):
        if e["key"] == "init_stop":
            time_ms += late_ms
        place = {"file": "train.py", "lineno": 10, **e["metadata"]}
        body = {"namespace": "", "time_ms": time_ms + index, "event_type": KINDS[e["kind"]]}
        lines.append(":::MLLOG " + json.dumps({**body, "key": e["key"], "value": e["value"], "metadata": place}))
    path.write_text("\n".join(lines) + "\n")
    return path


def log_of(events: list[dict[str, Any]], path: Path = Path("result_0.txt")) -> RunLog:
    """As a reader gives it."""
    made_events = tuple(
        LogEvent(1_700_000_000_000 + i, e["kind"], e["key"], e["value"], dict(e["metadata"]), i + 1)
        for i, e in enumerate(events)
    )
    return RunLog(path, made_events)


def events_of(log: RunLog, dropped: frozenset[str] = frozenset(("tracked_stats", "weights_initialization"))) -> Any:
    """A log's events as `made` writes them, without keys that no rule knows and repeats from other ranks."""
    kept, before = [], ("", None)
    for e in log.events:
        if e.key not in dropped and not (e.key in ("init_start", "cache_clear") and before == (e.key, e.value)):
            kept.append({"kind": e.kind, "key": e.key, "value": e.value, "metadata": e.metadata})
        before = (e.key, e.value)
    return kept


def every() -> Iterator[Ruleset]:
    """Each round, benchmark and division."""
    for round_ in ruleset.rounds():
        for benchmark in ruleset.benchmarks(round_):
            for division in ruleset.DIVISIONS:
                yield ruleset.load(round_, benchmark, division)


__all__ = ["event", "events_of", "every", "log_of", "made", "mutants", "write"]
