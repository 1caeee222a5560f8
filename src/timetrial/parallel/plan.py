"""Read a plan from the command line and refuse one that cannot work, before anything starts.

No torch here: `train --dry-run` and `launch` on a laptop check plans for thousands of ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing

from timetrial.config import AXES, Plan, RunConfig, parse, replace
from timetrial.errors import UserError
from timetrial.workloads.workload import suggest

PRECISIONS = ("fp32", "bf16")
RECOMPUTES = ("none", "selective", "full")
SCHEDULES = ("1f1b", "zb", "zbv")
ZERO = (1, 2, 3)
DEGREES = ("tp", "cp", "pp", "vp", "ep", "dp", "mbs", "gbs")


def parse_plan(text: str, base: Plan, nproc: int, option: str = "--nproc") -> Plan:
    """`base` with the settings of `text`, such as "tp=2,pp=2,gbs=32", for a run of `nproc` ranks.

    `option`: with which one says how many ranks there are.

    The data-parallel degree, unless given, is what the other axes leave of the ranks. Raises UserError
    on unknown keys, values that do not fit and ranks that the other axes cannot share out evenly.
    """
    hints = typing.get_type_hints(Plan)
    known = [f.name for f in dataclasses.fields(Plan)]
    given: dict[str, object] = {}
    for item in (part.strip() for part in text.split(",")):
        if not item:
            continue
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in known:
            raise UserError(f"--plan: no setting {key!r}{suggest(key, known)}; it has {', '.join(known)}")
        if not equals or not value:
            raise UserError(f"--plan: {key} needs a value, as in {key}={getattr(base, key)}")
        if key in given:
            raise UserError(f"--plan: {key} is given twice; keep one")
        given[key] = parse(value, hints[key], f"--plan {key}")
    plan: Plan = replace(base, **given)
    check_degrees(plan)
    if "dp" not in given:
        others = plan.tp * plan.cp * plan.pp
        if nproc % others:
            raise UserError(
                f"tp={plan.tp} x cp={plan.cp} x pp={plan.pp} = {others} does not divide {nproc} ranks; "
                f"set {option} to a multiple of {others} or change tp, cp or pp"
            )
        plan = replace(plan, dp=nproc // others)
    return plan


def check_degrees(plan: Plan) -> None:
    """Raise UserError unless every degree and batch size is at least 1."""
    for name in DEGREES:
        if getattr(plan, name) < 1:
            raise UserError(f"--plan: {name}={getattr(plan, name)} must be at least 1")


def validate(plan: Plan, config: RunConfig, world: int, option: str = "--nproc") -> None:
    """Raise UserError, one line naming the option to change, if `plan` cannot run `config` on `world` ranks.

    `option`: with which one says how many ranks there are.
    """
    check_degrees(plan)
    _check_names(plan)
    _check_world(plan, world, option)
    _check_batch(plan)
    _check_sharding(plan)
    _check_model(plan, config)
    _check_sequence(plan, config.data.seq_len)
    _check_pipeline(plan, config)
    _check_gpu(plan, config)


def _check_names(plan: Plan) -> None:
    for name, allowed in (("precision", PRECISIONS), ("recompute", RECOMPUTES), ("schedule", SCHEDULES)):
        value = getattr(plan, name)
        if value not in allowed:
            raise UserError(f"--plan: {name}={value} is unknown{suggest(value, list(allowed))}; use {_or(allowed)}")
    if sorted(plan.order.split("-")) != sorted(AXES):
        raise UserError(
            f"--plan: order={plan.order} must name each of {', '.join(AXES)} once, fastest first, as in tp-cp-dp-pp"
        )


def _check_world(plan: Plan, world: int, option: str) -> None:
    if plan.world_size != world:
        others = plan.tp * plan.cp * plan.pp
        fix = f"set dp={world // others}" if world % others == 0 else f"set {option} to {plan.world_size}"
        raise UserError(
            f"tp={plan.tp} x cp={plan.cp} x pp={plan.pp} x dp={plan.dp} = {plan.world_size} ranks, "
            f"but the run has {world}; {fix}"
        )


def _check_batch(plan: Plan) -> None:
    share = plan.mbs * plan.dp
    if plan.gbs % share:
        near = plan.gbs // share * share
        values = " or ".join(str(v) for v in (near, near + share) if v)
        raise UserError(
            f"gbs={plan.gbs} is not a multiple of mbs={plan.mbs} x dp={plan.dp} = {share}; "
            f"set gbs={values}, or change mbs"
        )


def _check_sharding(plan: Plan) -> None:
    copies = plan.dp * plan.cp
    if plan.shard < 0 or copies % plan.shard_size:
        fitting = [n for n in range(1, copies + 1) if copies % n == 0]
        raise UserError(
            f"shard={plan.shard} does not divide dp={plan.dp} x cp={plan.cp} = {copies} ranks; "
            f"set shard to one of {', '.join(map(str, fitting))}, or 0 for all"
        )
    if plan.zero is not None and plan.zero not in ZERO:
        raise UserError(f"--plan: zero={plan.zero} is unknown; use 1, 2 or 3")
    if plan.zero_stage > 1 and plan.pp > 1 and (plan.vp > 1 or plan.schedule != "1f1b"):
        what = f"vp={plan.vp}" if plan.vp > 1 else f"schedule={plan.schedule}"
        raise UserError(
            f"zero={plan.zero} drops a block after each use, but the schedule of {what} gathers whole stages and keeps "
            f"their gradients until a step ends; set zero=1, or schedule=1f1b and vp=1"
        )


def _check_model(plan: Plan, config: RunConfig) -> None:
    model = config.model
    sizes = (
        ("n_heads", "attention heads"),
        ("n_kv_heads", "key/value heads"),
        ("ffn_dim", "feed-forward channels"),
        ("vocab_size", "vocabulary entries"),
    )
    for field, words in sizes:
        size = getattr(model, field, None)
        if size is not None and size % plan.tp:
            raise UserError(
                f"tp={plan.tp} does not divide the model's {size} {words} (model.{field}); set tp to one of "
                f"{', '.join(map(str, _tp_degrees(model, sizes)))}"
            )
    experts = getattr(model, "n_experts", 0)
    if plan.ep > 1 and not experts:
        raise UserError(f"ep={plan.ep} needs a mixture-of-experts model and {config.workload} has none; set ep=1")
    if plan.ep > 1 and experts % plan.ep:
        raise UserError(f"ep={plan.ep} does not divide the model's {experts} experts; change ep")


def _tp_degrees(model: object, sizes: tuple[tuple[str, str], ...]) -> list[int]:
    present = [s for s in (getattr(model, field, None) for field, _ in sizes) if s is not None]
    return [tp for tp in range(1, min(present) + 1) if all(s % tp == 0 for s in present)]


def _check_sequence(plan: Plan, seq_len: int) -> None:
    if plan.cp > 1 and seq_len % (2 * plan.cp):
        raise UserError(
            f"data.seq_len={seq_len} does not split into 2 x cp={2 * plan.cp} equal chunks (each rank holds a head "
            f"and a tail chunk); change cp or data.seq_len"
        )
    if plan.tp > 1 and (seq_len // plan.cp) % plan.tp:
        raise UserError(
            f"data.seq_len={seq_len} over cp={plan.cp} leaves {seq_len // plan.cp} tokens a rank, which tp={plan.tp} "
            f"does not divide (sequence parallelism); change tp, cp or data.seq_len"
        )


def _check_pipeline(plan: Plan, config: RunConfig) -> None:
    if plan.vp > 1 and plan.pp == 1:
        raise UserError(f"vp={plan.vp} needs pipeline stages; set pp above 1, or vp=1")
    if plan.schedule != "1f1b" and plan.pp == 1:
        raise UserError(f"schedule={plan.schedule} needs pipeline stages; set pp above 1, or schedule=1f1b")
    if plan.pp == 1:
        return
    layers = config.model.n_layers
    stages = plan.pp * plan.vp
    if layers + 2 < stages:
        raise UserError(
            f"pp={plan.pp} x vp={plan.vp} = {stages} stages, but the model's {layers} layers with embedding and loss "
            f"make {layers + 2}; lower pp or vp"
        )
    if getattr(config.model, "tied", False):
        raise UserError(
            f"pp={plan.pp} puts embedding and head on different ranks, but model.tied shares them; set pp=1"
        )
    with_layers = {stage_rank(i, plan) for i, (_, kept, _) in enumerate(split_layers(layers, stages)) if kept}
    if config.lora is not None and len(with_layers) < plan.pp:
        raise UserError(
            f"pp={plan.pp} x vp={plan.vp} leaves a rank with embedding or head alone, and adapters give it nothing to "
            f"train; lower pp or vp"
        )
    _check_schedule(plan)


def _check_schedule(plan: Plan) -> None:
    micro_batches = plan.grad_accumulation_steps
    if plan.schedule == "zbv" and plan.vp != 2:
        raise UserError(f"schedule=zbv runs two stages a rank, not vp={plan.vp}; set vp=2, or schedule=zb")
    if plan.schedule != "1f1b" and plan.recompute == "selective":
        raise UserError(
            f"schedule={plan.schedule} splits the backward pass, and what recompute=selective keeps can be used once "
            f"only; set recompute=full (which then runs twice), recompute=none or schedule=1f1b"
        )
    if plan.schedule != "1f1b" and plan.compile:
        raise UserError(
            f"schedule={plan.schedule} splits the backward pass, which compiled blocks do not allow; "
            f"set compile=false or schedule=1f1b"
        )
    plain = plan.schedule == "1f1b" and plan.vp == 1
    if plain and micro_batches < plan.pp:
        raise UserError(
            f"1F1B over pp={plan.pp} needs at least {plan.pp} micro batches, and gbs={plan.gbs} gives {micro_batches}; "
            f"raise gbs to {plan.pp * plan.mbs * plan.dp}, or lower mbs, dp or pp"
        )
    rounds = max(1, micro_batches // plan.pp)
    if not plain and plan.schedule != "zbv" and micro_batches % rounds:
        near = micro_batches // plan.pp * plan.pp
        raise UserError(
            f"{micro_batches} micro batches do not divide into {rounds} equal rounds over pp={plan.pp} ranks; "
            f"set gbs={near * plan.mbs * plan.dp} or gbs={(near + plan.pp) * plan.mbs * plan.dp}"
        )


def _check_gpu(plan: Plan, config: RunConfig) -> None:
    """Switches that mean something on GPUs only; whether there is one is for `cuda.check` to say."""
    if plan.graph and plan.pp > 1:
        raise UserError(f"graph=true cannot record the pipeline schedule of pp={plan.pp}; set graph=false or pp=1")
    if plan.graph and plan.recompute != "none" and config.lora is not None and config.lora.dropout > 0:
        raise UserError(
            f"graph=true cannot draw the dropout of lora.dropout={config.lora.dropout} again for "
            f"recompute={plan.recompute}; set recompute=none, lora.dropout=0 or graph=false"
        )
    if plan.async_tp and (plan.tp == 1 or not plan.compile):
        missing = "tp above 1" if plan.tp == 1 else "compile=true"
        raise UserError(f"async_tp=true needs {missing}: the compiler overlaps it; set {missing} or async_tp=false")


def split_layers(n_layers: int, stages: int) -> list[tuple[bool, range, bool]]:
    """For each pipeline stage: has it the embedding, which layers, has it the head and the loss.

    Embedding and loss count as one layer each, because the two ends weigh about as much: so 126 layers
    fall evenly on 64 stages. What does not divide evenly is spread over the stages.
    """
    units = n_layers + 2
    bounds = [i * units // stages for i in range(stages + 1)]
    parts = []
    for low, high in itertools.pairwise(bounds):
        parts.append((low == 0, range(max(low - 1, 0), min(high - 1, n_layers)), high == units))
    return parts


def stage_rank(stage: int, plan: Plan) -> int:
    """The pipeline rank that holds `stage`: stages go round the ranks, or to and fro in the V-shaped schedule."""
    turn, place = divmod(stage, plan.pp)
    return plan.pp - 1 - place if plan.schedule == "zbv" and turn % 2 else place


def _or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
