"""The step as a graph: N replayed steps are N eager steps, bit for bit, and nothing of the host is baked in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from engines import one_rank
from tape import Tape
from timetrial.config import Data, Evaluation, Lora, Optim, Plan, RunConfig
from timetrial.errors import UserError
from timetrial.models.llama.config import LlamaConfig
from timetrial.optim import adamw
from timetrial.optim.schedule import learning_rate
from timetrial.parallel import cuda
from timetrial.parallel.engine import Batch, NoTimer, OneRank
from timetrial.parallel.graph import WARM_UP, Graphed
from timetrial.parallel.plan import validate
from timetrial.train.state import load_model_state, model_state
from timetrial.train.step import GraphedStep, Outcome, Step, make_step

MODEL = LlamaConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48)
OPTIM = Optim(base_lr=3e-3, warmup_steps=3, decay_steps=9)
STEPS = 8
CLIP = 0.5
"""Below most gradient norms here, so that clipping steers the weights."""


def make_engine(adapters: Lora | None, precision: str) -> OneRank:
    return one_rank(MODEL, 0.1, precision, adapters, "cpu")


def make_optimizer(engine: OneRank, capturable: bool) -> torch.optim.AdamW:
    return adamw.build(engine.parameters_named(), OPTIM, fused=True, capturable=capturable)


def batches(step: int) -> list[Batch]:
    """Two micro batches of other tokens, and another number of labels, each step."""
    g = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (4, 17), generator=g)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=g) < 0.1 * (step % 4)] = -100
    return [{"tokens": tokens[i : i + 2, :-1].contiguous(), "labels": labels[i : i + 2]} for i in (0, 2)]


def run(make: Callable[[], Step], steps: range) -> tuple[list[Outcome], Step]:
    step = make()
    outcomes = []
    for number in steps:
        torch.manual_seed(100 + number)  # as the trainer does
        outcomes.append(step(batches(number), learning_rate(OPTIM, number), NoTimer()))
    return outcomes, step


def eager(adapters: Lora | None = None, precision: str = "fp32") -> Step:
    engine = make_engine(adapters, precision)
    return Step(engine, make_optimizer(engine, capturable=False), CLIP)


def graphed(tape: Tape, adapters: Lora | None = None, precision: str = "fp32") -> GraphedStep:
    engine = make_engine(adapters, precision)
    return GraphedStep(engine, make_optimizer(engine, capturable=True), CLIP, tape)


def everything(step: Step) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name."""
    found = {name: p.detach() for name, p in step.engine.parameters_named()}
    for name, p in step.engine.parameters_named():
        found |= {f"{name}.{key}": value for key, value in step.optimizer.state.get(p, {}).items()}
    return found


@pytest.mark.parametrize(
    ("adapters", "precision"), [(None, "fp32"), (None, "bf16"), (Lora(rank=4, dropout=0.2), "fp32")]
)
def test_replayed_steps_are_eager_steps(adapters: Lora | None, precision: str) -> None:
    tape = Tape()
    wanted, plain = run(lambda: eager(adapters, precision), range(STEPS))
    got, replayed = run(lambda: graphed(tape, adapters, precision), range(STEPS))
    assert tape.events == ["warm up"] * WARM_UP + ["record"] + ["replay"] * (STEPS - WARM_UP)
    assert got == wanted
    assert len({outcome.loss for outcome in wanted}) == STEPS
    assert max(outcome.grad_norm for outcome in wanted) > CLIP
    ours, theirs = everything(replayed), everything(plain)
    assert ours.keys() == theirs.keys()
    assert any(name.endswith("exp_avg_sq") for name in ours)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    counts = {float(value) for name, value in ours.items() if name.endswith(".step")}
    assert counts == {float(STEPS)}


def test_dropout_differs_between_replays() -> None:
    """The same samples at the rate 0 twice: only the mask can differ."""
    _, step = run(lambda: graphed(Tape(), Lora(rank=4, dropout=0.5, targets=("wq", "wv"))), range(WARM_UP + 2))
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(step(batches(0), 0.0, NoTimer()).loss)
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]


def test_a_rate_of_the_host_is_baked_in() -> None:
    """What the tensor is for: without it the first recorded rate stays, and the tape shows it."""
    wanted, _ = run(eager, range(STEPS))
    step = graphed(Tape())
    got = []
    for number in range(STEPS):
        adamw.set_learning_rate(step.optimizer, learning_rate(OPTIM, number))
        torch.manual_seed(100 + number)
        got.append(step(batches(number), 1.0, NoTimer()))
    assert got[: WARM_UP + 2] == wanted[: WARM_UP + 2]
    assert got[WARM_UP + 2 :] != wanted[WARM_UP + 2 :]


@pytest.mark.parametrize("work", [lambda x: x.sum().item(), lambda x: x + torch.tensor([1.0])])
def test_the_tape_refuses_what_cuda_refuses(work: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="not permitted while recording"):
        Tape().record(lambda: work(x))


def test_recording_changes_nothing() -> None:
    x, tape = torch.ones(3), Tape()
    tape.record(lambda: x.add_(1.0))
    assert x.tolist() == [1.0] * 3
    tape.replay()
    tape.replay()
    assert x.tolist() == [3.0] * 3


def test_samples_are_copied_to_where_the_graph_reads_them() -> None:
    _, step = run(lambda: graphed(Tape()), range(WARM_UP + 1))
    before = [(id(b[key]), b[key].data_ptr()) for b in step._inputs for key in ("tokens", "labels")]
    given = batches(20)
    step(given, 0.0, NoTimer())
    assert [(id(b[key]), b[key].data_ptr()) for b in step._inputs for key in ("tokens", "labels")] == before
    for own, batch in zip(step._inputs, given, strict=True):
        assert own["tokens"] is not batch["tokens"]
        assert torch.equal(own["tokens"], batch["tokens"])
        assert torch.equal(own["labels"], batch["labels"])
    assert all(p.grad is None for p in step.engine.model.parameters())
    narrow = [{key: value[:1] for key, value in batch.items()} for batch in given]
    with pytest.raises(ValueError, match=r"\[2, 16\] was given \[1, 16\]"):
        step(narrow, 0.0, NoTimer())
    with pytest.raises(ValueError, match="shorter"):
        step(given[:1], 0.0, NoTimer())


def test_a_resumed_graph_goes_on_as_the_undisturbed_run() -> None:
    """The state holds the rate as a number, and a new graph starts from it in the middle."""
    wanted, _ = run(eager, range(STEPS))
    _, first = run(lambda: graphed(Tape()), range(5))
    stored = model_state(first.engine.model, first.optimizer)
    assert stored["optimizer"]["groups"]["decay"]["lr"] == learning_rate(OPTIM, 4)

    def taken_up() -> GraphedStep:
        engine = make_engine(None, "fp32")
        optimizer = make_optimizer(engine, capturable=True)
        load_model_state(engine.model, optimizer, stored)
        return GraphedStep(engine, optimizer, CLIP, Tape())

    got, second = run(taken_up, range(5, STEPS + 3))
    assert got[: STEPS - 5] == wanted[5:]
    more, whole = run(eager, range(STEPS + 3))
    assert got == more[5:]
    for name, value in everything(whole).items():
        assert torch.equal(everything(second)[name], value), name
    assert all(group["capturable"] for group in second.optimizer.param_groups)


def test_closing_forgets_the_recording() -> None:
    tape, log = Tape(), []
    graph = Graphed(lambda: log.append(1), tape, warm_up=1)
    graph()
    graph()
    graph.close()
    graph()
    assert tape.events == ["warm up", "record", "replay", "close", "warm up"]
    assert len(log) == 3


# ---- the plan's switch ---------------------------------------------------------------------------


def run_config(plan: Plan, adapters: Lora | None = None) -> RunConfig:
    data, evaluation = Data("x", seq_len=32), Evaluation("loss", 1.0, 1, 1)
    return RunConfig("w", "mini", "v5.1", MODEL, data, OPTIM, evaluation, plan, lora=adapters)


@pytest.mark.parametrize(
    ("plan", "adapters", "words"),
    [
        (
            Plan(graph=True, pp=2, gbs=2),
            None,
            "graph=true cannot record the pipeline schedule of pp=2; set graph=false",
        ),
        (Plan(graph=True, recompute="full"), Lora(dropout=0.1), "lora.dropout=0.1 again for recompute=full"),
        (Plan(async_tp=True, compile=True), None, "async_tp=true needs tp above 1"),
        (Plan(async_tp=True, tp=2), None, "async_tp=true needs compile=true"),
    ],
)
def test_plans_without_a_graph_are_refused(plan: Plan, adapters: Lora | None, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        validate(plan, run_config(plan, adapters), plan.world_size)
    assert "\n" not in str(caught.value)
    lifted = dataclasses.replace(plan, graph=False, async_tp=False)
    validate(lifted, run_config(lifted, adapters), plan.world_size)


def test_a_graph_may_recompute_without_dropout() -> None:
    plan = Plan(graph=True, recompute="full")
    validate(plan, run_config(plan, Lora(dropout=0.0)), 1)


@pytest.mark.parametrize("name", ["graph", "async_tp"])
def test_a_graph_needs_a_gpu(name: str) -> None:
    plan = Plan(**{name: True})
    with pytest.raises(UserError, match=rf"^--plan: {name}=true needs a CUDA device .* on cpu; set {name}=false$"):
        cuda.check(plan, torch.device("cpu"))
    cuda.check(plan, torch.device("cuda"))
    cuda.check(Plan(), torch.device("cpu"))


def test_the_plan_chooses_the_step() -> None:
    engine = make_engine(None, "fp32")
    step = make_step(run_config(Plan()), engine, make_optimizer(engine, capturable=False))
    assert type(step) is Step
