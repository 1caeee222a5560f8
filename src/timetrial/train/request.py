"""From what the user typed to one resolved configuration, or one line that says what is wrong."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

from timetrial.check import IDENTITY, check
from timetrial.config import AXES, Plan, RunConfig, override, parse
from timetrial.errors import UserError
from timetrial.parallel.plan import parse_plan, validate
from timetrial.train.launch import launched
from timetrial.train.rundir import reopen
from timetrial.workloads import workload as workloads


def rank_count(nproc: int | None, plan: str | None, resume_from: Path | None = None) -> int:
    """Ranks of the job: torchrun's word, else --nproc, else what the plan needs, else those of the resumed run."""
    if launched():
        return int(os.environ["WORLD_SIZE"])
    if nproc is None and resume_from is not None and not _names_degree(plan):
        return reopen(resume_from)[1].plan.world_size
    return nproc or math.prod(_setting(plan, axis) or 1 for axis in AXES)


def resolve(
    workload: str,
    preset: str,
    round_: str | None = None,
    plan: str | None = None,
    ranks: int = 1,
    seed: int | None = None,
    max_steps: int | None = None,
    data: Path | None = None,
    sets: list[str] | None = None,
    resume_from: Path | None = None,
    threads: int | None = None,
) -> RunConfig:
    """The configuration of a run. Raises UserError when a name, a value or the plan is wrong.

    A resumed run keeps its own configuration; its plan alone may change.
    """
    if resume_from is not None:
        config = _resumed(workload, resume_from)
        if _names_degree(plan):  # a new mapping, not an addition to the old one
            one_rank = dataclasses.replace(config.plan, tp=1, cp=1, pp=1, vp=1, ep=1, dp=1, shard=0, zero=None)
            config = dataclasses.replace(config, plan=one_rank)
        other_threads = threads is not None and threads != config.threads  # sums would round differently
        if sets or round_ or seed is not None or other_threads:
            raise UserError("--resume keeps the run's configuration; only --plan, --nproc and --max-steps may be given")
    else:
        config = workloads.resolve(workload, preset, round_, _batch_size(plan, sets))
        for text in sets or []:
            dotted, equals, value = text.partition("=")
            if not equals:
                raise UserError(f"--set {text}: write key=value, for example optim.base_lr=3e-4")
            if dotted.strip() in IDENTITY:
                raise UserError(f"--set {dotted.strip()}: is what the run is; give the workload, --preset or --round")
            config = override(config, dotted.strip(), value.strip())
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    if threads is not None:
        config = dataclasses.replace(config, threads=threads)
    if max_steps is not None:
        if max_steps < 1:
            raise UserError(f"--max-steps {max_steps}: must be at least 1")
        config = dataclasses.replace(config, max_steps=max_steps)
    if data is not None and resume_from is not None:
        raise UserError("--resume keeps the run's data; leave --data out")
    if data is not None and preset == "mini":
        raise UserError(f"--data {data}: the mini preset reads the data that is bundled; leave --data out")
    if data is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(data)))
    old_plan = config.plan
    config = dataclasses.replace(config, plan=_plan(plan, config, ranks))
    if resume_from is not None:
        _check_resumed_plan(config.plan, old_plan)
    if resume_from is not None and config.plan.world_size != old_plan.world_size:
        config = dataclasses.replace(config, threads=None, lanes=None)  # other ranks share the cores out anew
    check(config)
    validate(config.plan, config, ranks)
    return config


def _names_degree(plan: str | None) -> bool:
    return any(_setting(plan, axis) is not None for axis in AXES)


def _setting(plan: str | None, name: str) -> int | None:
    """The whole number that the plan's text gives `name`, or None."""
    for part in (plan or "").split(","):
        key, _, value = part.partition("=")
        if key.strip() == name:
            return int(parse(value.strip(), int, f"--plan {name}"))
    return None


def _batch_size(plan: str | None, sets: list[str] | None) -> int | None:
    """The global batch size that the user asks for: official recipes depend on it."""
    for text in sets or []:
        key, _, value = text.partition("=")
        if key.strip() == "plan.gbs":
            return int(parse(value.strip(), int, "--set plan.gbs"))
    return _setting(plan, "gbs")


def _plan(text: str | None, config: RunConfig, ranks: int) -> Plan:
    """The plan in `text`; without one, data parallel over all ranks.

    A micro batch that nobody chose shrinks to fit the share of one data parallel rank, and to fill its pipeline.
    """
    plan = parse_plan(text or "", config.plan, ranks)
    share, rest = divmod(plan.gbs, plan.dp)
    if _setting(text, "mbs") is not None or rest:
        return plan
    sizes = [size for size in range(1, min(plan.mbs, share) + 1) if share % size == 0]
    filling = [size for size in sizes if share // size % plan.pp == 0]
    return dataclasses.replace(plan, mbs=max(filling or sizes or [plan.mbs]))


def _check_resumed_plan(plan: Plan, old: Plan) -> None:
    """A resumed run may be laid out anew, but not train on other batches or in another precision."""
    for name in ("gbs", "precision"):
        if getattr(plan, name) != getattr(old, name):
            raise UserError(
                f"--resume: {name}={getattr(plan, name)}, but the run has {getattr(old, name)}; leave it out"
            )


def _resumed(workload: str, path: Path) -> RunConfig:
    config = reopen(path)[1]
    if config.workload != workload:
        raise UserError(f"--resume: {path} holds a run of {config.workload}, not of {workload}")
    return config


def start_ranks(config: RunConfig, ranks: int, arguments: list[str], out: Path, restarts: int, timeout_s: float) -> int:
    """Start the job's ranks on this machine with the same words; its exit code.

    Rank 0 must not be alone for minutes, so a base that the run needs is made before.
    """
    from timetrial.data.source import open_source
    from timetrial.train.base import check_init, initial_weights
    from timetrial.train.launch import run_local
    from timetrial.train.run import check_fit

    check_init(config)
    check_fit(config, open_source(config.data))
    initial_weights(config)
    words = drop_option(drop_option(arguments, "--nproc"), "--restarts")
    if "--out" not in words and not any(word.startswith("--out=") for word in words):
        words += ["--out", str(out)]
    return run_local(ranks, words, restarts, timeout_s)


def drop_option(arguments: list[str], name: str) -> list[str]:
    """`arguments` without the option `name` and its value, in either spelling."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if skip:
            skip = False
        elif word == name:
            skip = True
        elif not word.startswith(f"{name}="):
            kept.append(word)
    return kept
