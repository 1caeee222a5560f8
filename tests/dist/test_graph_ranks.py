"""The graph's step and gathering ahead over ranks: the numbers stay, the order is what was meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import CLIP, GBS, config_of, engine_of, evaluate, samples, share, whole
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
from torch.distributed.fsdp import FSDPModule
from world import run_world

from timetrial.config import Lora, Optim, Plan
from timetrial.optim import adamw
from timetrial.optim.schedule import learning_rate
from timetrial.parallel import cuda
from timetrial.parallel.engine import Engine, NoTimer
from timetrial.parallel.overlap import prefetch
from timetrial.seeding import stream
from timetrial.train.step import GraphedStep, Step

OPTIM = Optim(base_lr=3e-3, warmup_steps=2, decay_steps=8)
STEPS = 6


class Again:
    """Runs the recorded work again: collectives and FSDP's own storage are beyond a tape of operators."""

    def __init__(self) -> None:
        self.replays = 0

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> None:
        self.work = work

    def replay(self) -> None:
        self.replays += 1
        self.work()

    def close(self) -> None:
        del self.work


def steps(plan: Plan, adapters: Lora | None, graph: bool) -> tuple[list[tuple[float, float]], dict[str, Any], int]:
    """Outcomes, whole weights and the number of replays; an evaluation lies between the steps."""
    torch.set_num_threads(1)
    plan = replace(plan, gbs=GBS)
    engine = engine_of(config_of(plan, adapters))
    optimizer = adamw.build(engine.parameters_named(), OPTIM, fused=True, capturable=graph)
    again = Again()
    step = GraphedStep(engine, optimizer, CLIP, again) if graph else Step(engine, optimizer, CLIP)
    outcomes = []
    for number in range(STEPS):
        torch.manual_seed(stream(number, engine.stream_name))
        made = step(share(samples(number), engine, plan), learning_rate(OPTIM, number), NoTimer())
        outcomes.append((made.loss, made.grad_norm))
        if number == 4:
            outcomes.append((evaluate(engine, plan), 0.0))
    return outcomes, {name: whole(p.detach()) for name, p in engine.parameters_named()}, again.replays


def both(cases: list[tuple[Plan, Lora | None]]) -> list[Any]:
    return [(steps(plan, adapters, False), steps(plan, adapters, True)) for plan, adapters in cases]


CASES = [
    (Plan(dp=2, mbs=2, precision="fp32"), None),
    (Plan(tp=2, mbs=4, precision="bf16"), None),
    (Plan(cp=2, mbs=4, precision="fp32", recompute="full"), None),
    (Plan(dp=2, mbs=2, precision="fp32"), Lora(rank=4, dropout=0.2)),
]


def test_a_graphs_steps_are_eager_steps_on_every_rank() -> None:
    for ranks in run_world(both, 2, CASES):
        for (wanted, weights, none), (got, again, replays) in ranks:
            assert (none, replays) == (0, STEPS - 3)
            assert got == wanted
            assert len({loss for loss, _ in got}) == STEPS + 1
            for name, value in weights.items():
                assert torch.equal(again[name], value), name


# ---- gathering ahead -----------------------------------------------------------------------------


def gathered(depth: int) -> tuple[list[set[int]], list[set[int]], float]:
    """Per block, which other blocks are gathered or on their way when it computes: forward, backward; the loss."""
    torch.set_num_threads(1)
    plan = Plan(dp=2, mbs=4, precision="fp32", gbs=GBS)
    engine: Engine = engine_of(config_of(plan))
    prefetch(engine.model, depth)
    blocks = list(engine.model.get_submodule("layers").children())
    seen: dict[str, list[set[int]]] = {"forward": [], "backward": []}

    def note(kind: str, own: int) -> None:
        seen[kind].append({i for i, block in enumerate(blocks) if i != own and _on_its_way(block)})

    for i, block in enumerate(blocks):
        block.get_submodule("attention").register_forward_pre_hook(lambda *_, i=i: note("forward", i))
        block.get_submodule("feed_forward").register_full_backward_pre_hook(lambda *_, i=i: note("backward", i))
    batch = samples(0)
    loss = engine.train_step(share(batch, engine, plan), int((batch["labels"] >= 0).sum()))
    return seen["forward"], seen["backward"], loss.item()


def _on_its_way(block: torch.nn.Module) -> bool:
    assert isinstance(block, FSDPModule)
    return any(group._all_gather_result is not None for group in block._get_fsdp_state()._fsdp_param_groups)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_blocks_are_gathered_while_one_computes(depth: int) -> None:
    """Four blocks: forward 0 to 3, backward 3 to 0."""
    for forward, backward, loss in run_world(gathered, 2, depth):
        assert forward == [{j for j in range(i + 1, i + 1 + depth) if j < 4} for i in range(4)]
        assert backward == [{j for j in range(i - depth, i) if j >= 0} for i in (3, 2, 1, 0)]
        assert loss > 0


def test_without_it_the_host_gathers_a_block_when_it_comes_to_it() -> None:
    for forward, _, _ in run_world(gathered, 2, 0):
        assert forward == [set()] * 4


# ---- asynchronous tensor parallelism -------------------------------------------------------------


def switched_on() -> tuple[bool, bool, bool]:
    import torch._inductor.config as inductor

    group = torch.distributed.new_group([0, 1])
    before = is_symm_mem_enabled_for_group(group.group_name)
    cuda.asynchronous_tp(group)
    return before, is_symm_mem_enabled_for_group(group.group_name), inductor._micro_pipeline_tp


def test_asynchronous_tp_is_switched_on_for_the_group() -> None:
    assert run_world(switched_on, 2) == [(False, True, True)] * 2
