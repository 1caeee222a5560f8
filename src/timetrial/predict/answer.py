"""Requests from the command line, and what is answered beside the step time: memory, time to train, energy, range."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from timetrial.check import IDENTITY, check
from timetrial.config import Plan, RunConfig, override, replace
from timetrial.errors import UserError
from timetrial.parallel.plan import parse_plan, validate
from timetrial.predict import cache, energy, memory, sure
from timetrial.predict.converge import TimeToTrain, time_to_train
from timetrial.predict.energy import Energy
from timetrial.predict.local import local_memory
from timetrial.predict.memory import Memory
from timetrial.predict.predict import Prediction, predict, stack_of, system_of
from timetrial.predict.request import PRECISIONS, RECIPES, Hints, Request
from timetrial.predict.rows import Answer
from timetrial.systems import stack as stacks
from timetrial.systems import system as systems
from timetrial.systems.stack import Stack
from timetrial.workloads.workload import resolve

if TYPE_CHECKING:
    from timetrial.predict.search import Found

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what)."""
GRAPHS = {"none": "none", "layer": "layer", "full": "full_iter"}
"""--graphs -> what published tables call it."""
START_S = 30.0
"""From the start of the clock to the first step, s; assumed."""


def request_of(
    workload: str,
    system: str,
    gpus: int,
    *,
    preset: str = "official",
    plan: str = "",
    precision: str = "",
    round_: str | None = None,
    sets: list[str] | None = None,
    graphs: str | None = None,
    any_plan: bool = False,
) -> Request:
    """What the command line asks for. Raises UserError, one line, for what cannot be.

    `precision`: "" is fp8, and on processors what the preset trains in. `any_plan`: the mapping is to be searched; of
    `plan` only the global batch counts.
    """
    if graphs not in (None, *GRAPHS):
        raise UserError(f"--graphs {graphs}: use {', '.join(GRAPHS)}")
    config: RunConfig = resolve(workload, preset, round_)
    found = systems.named(system)
    processors = found.accelerator.generation == "cpu"
    name, attention, recipe = _precision(precision or (config.plan.precision if processors else "fp8"))
    if processors and name not in ("fp32", "bf16"):
        raise UserError(f"--precision {precision}: the engine trains in fp32 or bf16 on {found.name}")
    any_plan = any_plan and not processors  # what is searched are mappings of accelerators
    if processors:
        base = replace(config.plan, tp=1, cp=1, pp=1, vp=1, dp=1)
    else:
        base = Plan(mbs=1, gbs=config.plan.gbs, zero=1, order="tp-cp-dp-pp")
    chosen = parse_plan(plan, base, 1 if any_plan else gpus, "--gpus")
    chosen = replace(chosen, precision="fp32" if name == "fp32" else "bf16")
    if preset == "official":
        config = replace(resolve(workload, preset, round_, chosen.gbs), lora=config.lora)
    config = replace(config, plan=chosen)
    for text in sets or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: needs a value, as in --set model.n_layers=62")
        if key.strip() in IDENTITY:
            raise UserError(f"--set {key.strip()}: is what the run is; give the workload, --preset or --round")
        config = override(config, key.strip(), value.strip())
    check(config)
    if not any_plan:
        validate(config.plan, config, gpus, "--gpus")
    return Request(
        config=config,
        round=config.round,
        system=system if system.endswith(".toml") else found.name,
        accelerators=gpus,
        nodes=None,
        precision=name,
        attention=attention,
        converges=preset == "official",
        model=workload_title(workload) + ("" if preset == "official" else f" ({preset})"),
        hints=Hints(cuda_graph=GRAPHS.get(graphs or "", ""), recipe=recipe),
    )


def workload_title(workload: str) -> str:
    """The model's name of a workload, as published tables call it."""
    return {"llama31_8b": "Llama 3.1 8B", "llama31_405b": "Llama 3.1 405B", "llama2_70b_lora": "Llama 2 70B"}.get(
        workload, workload
    )


def _precision(text: str) -> tuple[str, str, str]:
    """(linear layers, attention, recipe), as a row's."""
    base, *more = text.lower().split("+")
    letters = "".join(c for c in base if c.isalnum())
    name = PRECISIONS.get(letters)
    if name is None or more not in ([], ["fp8attn"]):
        known = ", ".join(sorted(set(PRECISIONS.values())))
        raise UserError(f"--precision {text}: use one of {known}, with +fp8attn for attention in fp8")
    return name, "fp8" if more else "fp32" if name == "fp32" else "bf16", RECIPES.get(letters, "")


def memory_of(prediction: Prediction) -> Memory:
    """Bytes of each pipeline rank at its peak."""
    q, stack = prediction.request, prediction.stack
    if prediction.system.accelerator.generation == "cpu":
        return local_memory(q.config, prediction.system)
    layers = memory.measure(cache.layers(q.config), stack.fuse)
    policy = memory.policy(stack, stack.recipe({"tf32": "fp32"}.get(q.recipe, q.recipe)), q.attention)
    capacity = prediction.system.accelerator.memory_bytes
    return memory.memory(q.plan, q.config.model.n_layers, layers, policy, capacity)


def time_of(prediction: Prediction) -> tuple[TimeToTrain | None, str]:
    """Time to train; or None, and why there is none."""
    q, step, span = prediction.request, prediction.step, interval_of(prediction)
    if not q.converges or not q.config.official:
        return None, "no target to train to: not an official workload"
    official = resolve(q.config.workload, "official", q.config.round, q.plan.gbs)
    if q.config.model != official.model or q.seq_len != official.data.seq_len:
        return None, "no target to train to: another model or sequence length than the official one"
    try:
        time = time_to_train(
            q.config,
            step.seconds,
            step.evaluation_s,
            start_s=START_S,
            step_range=(span.low_s, span.high_s),
            precision=q.precision,
        )
    except UserError as error:
        return None, str(error)
    return time, ""


def energy_of(prediction: Prediction, time: TimeToTrain | None) -> Energy | None:
    """Energy to train; None without a time or any known power."""
    if time is None or not (prediction.system.power or prediction.system.accelerator.tdp_w):
        return None
    return energy.energy(prediction.system, prediction.request.accelerators, time)


def answer(request: Request) -> Answer:
    """One row's answer: what `--rows` writes."""
    found = predict(request)
    needed = memory_of(found)
    verdict = needed.verdict(found.system.accelerator.memory_bytes)
    time, _ = time_of(found)
    return Answer(
        step_time_s=found.step.seconds,
        memory_bytes=needed.peak.total,
        tflops_per_gpu=found.flops_per_s_per_gpu / 1e12,
        ttt_min=time.minutes if time else None,
        status="ok" if verdict.possible else verdict.text,
    )


def named_stack(name: str | None, request: Request) -> Stack:
    """The stack of that name, or the one that the request's round ran on.

    Raises UserError for a stack of another vendor's accelerators: its kernels do not run there.
    """
    system = system_of(request)
    if not name:
        return stack_of(request, system)
    stack, vendor = stacks.load(name), system.accelerator.vendor
    if vendor not in stack.vendors:
        fitting = [n for n in stacks.names() if vendor in stacks.load(n).vendors]
        raise UserError(
            f"--stack {name}: is for {' and '.join(stack.vendors)}, not for {system.name}; use {', '.join(fitting)}"
        )
    return stack


def found(request: Request, stack: Stack, progress: Progress | None = None) -> Found:
    """Every plan for the request's workload, batch and accelerators, ranked."""
    from timetrial.predict.search import search

    return search(request, stack=stack, progress=progress)


def best_request(request: Request, stack: Stack, progress: Progress | None = None) -> Request:
    """The request with the fastest plan that fits; on processors the plan that it has.

    Raises UserError where none fits, with the nearest miss.
    """
    if system_of(request).accelerator.generation == "cpu":
        return request
    result = found(request, stack, progress)
    if result.best is None:
        near = f"; nearest: {result.tightest.name}, {result.tightest.verdict.text}" if result.tightest else ""
        refused = f"; {result.refused[0].example}" if result.refused and not near else ""
        raise UserError(
            f"no plan of {request.config.workload} fits {request.accelerators} of {result.system}{near}{refused}; "
            f"use more accelerators, another --precision or another gbs in --plan"
        )
    whole = next((row for row in result.ranked if row.verdict.over == 0), result.best)  # nothing to be offloaded
    config = replace(request.config, plan=replace(whole.plan, precision=request.plan.precision))
    return dataclasses.replace(request, config=config)


def interval_of(prediction: Prediction) -> sure.Interval:
    """Within what the step time lies."""
    return sure.interval(prediction.request, prediction.system, prediction.stack, prediction.step.seconds)
