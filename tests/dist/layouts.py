"""One small training run, made under any plan, so that plans can be compared with one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from timetrial.config import Data, Evaluation, Lora, Optim, Plan, RunConfig
from timetrial.models.llama.config import LlamaConfig
from timetrial.parallel.engine import Batch, Engine
from timetrial.parallel.initial import Values, fill
from timetrial.parallel.parallelize import build
from timetrial.parallel.sharded import gathered
from timetrial.seeding import stream
from timetrial.train.build import InitialValues, empty_model

MODEL = LlamaConfig(vocab_size=96, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=64, init_std=0.05)
SEQ_LEN = 32
GBS = 8
CLIP = 0.5
"""Below the gradient norms of this run, so that every step is clipped and the norm steers it."""
LR = 3e-3


@dataclass
class Curve:
    """What a run left: the same on every rank of a right layout."""

    losses: list[float]
    """Mean loss per step."""
    norms: list[float]
    """Gradient norm before clipping, per step."""
    evals: list[float]
    """Held-out mean loss before the first and after the last step."""
    first_grads: dict[str, torch.Tensor]
    """Whole gradients of the first step, of the parameters this rank has."""
    weights: dict[str, torch.Tensor]
    """Whole weights after the last step, likewise."""
    exported: dict[str, torch.Tensor]
    """The whole model's weights after the last step, on rank 0; empty elsewhere."""


def config_of(plan: Plan, adapters: Lora | None = None, model: LlamaConfig = MODEL) -> RunConfig:
    data = Data("random", seq_len=SEQ_LEN)
    return RunConfig("w", "mini", "v5.1", model, data, Optim(), Evaluation("loss", 1.0, 1, 1), plan, lora=adapters)


def values_of(config: RunConfig) -> Values:
    """A run's initial values, but no adapter starts at zero."""

    def values(shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in InitialValues(config, None)(shapes):
            if name.endswith("lora_b"):  # zeros leave A without a gradient, and a step without an effect
                value.normal_(std=0.05, generator=torch.Generator().manual_seed(stream(1, name)))
            yield name, value

    return values


def engine_of(config: RunConfig) -> Engine:
    return build(config, empty_model(config), values_of(config))


def model_of(config: RunConfig) -> nn.Module:
    """The whole model on one device."""
    model = empty_model(config)
    fill(model, values_of(config), "cpu")
    return model


def samples(step: int, count: int = GBS) -> Batch:
    """The global batch of a step. Samples differ in how many tokens count, from 8 to all."""
    g = torch.Generator().manual_seed(1000 + step)
    # token t+1 is mostly a fixed function of token t, so that there is something to learn
    tokens = torch.randint(0, MODEL.vocab_size, (count, SEQ_LEN + 1), generator=g)
    for t in range(SEQ_LEN):
        follow = torch.rand(count, generator=g) < 0.7
        tokens[:, t + 1] = torch.where(follow, (tokens[:, t] * 5 + 7) % MODEL.vocab_size, tokens[:, t + 1])
    labels = tokens[:, 1:].clone()
    skipped = torch.randint(0, SEQ_LEN - 8, (count,), generator=g)
    labels[torch.arange(SEQ_LEN) < skipped[:, None]] = -100
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


def share(batch: Batch, engine: Engine, plan: Plan) -> list[Batch]:
    """The micro batches of this dp rank."""
    count = batch["tokens"].shape[0] // plan.dp
    own = slice(engine.dp_rank * count, (engine.dp_rank + 1) * count)
    parts = {key: value[own].split(plan.mbs) for key, value in batch.items()}
    return [{key: parts[key][i] for key in parts} for i in range(count // plan.mbs)]


def train(plan: Plan, steps: int, adapters: Lora | None = None, model: LlamaConfig = MODEL) -> Curve:
    """Run `steps` optimizer steps under `plan` on this job's ranks, each on one thread."""
    torch.set_num_threads(1)  # on a few tokens a second thread costs more than it does
    config = config_of(replace(plan, gbs=GBS), adapters, model)
    engine = engine_of(config)
    parameters = engine.parameters_named()
    trained = [p for _, p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-5, fused=True)
    curve = Curve([], [], [evaluate(engine, plan)], {}, {}, {})
    for step in range(steps):
        batch = samples(step)
        total = int((batch["labels"] >= 0).sum())
        torch.manual_seed(stream(step, engine.stream_name))
        loss_sum = engine.train_step(share(batch, engine, config.plan), total)
        curve.losses.append(engine.reduce_sums(loss_sum).item() / total)
        if step == 0:
            curve.first_grads = {name: whole(p.grad) for name, p in parameters if p.grad is not None}
        curve.norms.append(engine.clip_grad_norm(CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    curve.evals.append(evaluate(engine, plan))
    curve.weights = {name: whole(p.detach()) for name, p in parameters}
    curve.exported = engine.whole_weights()
    return curve


def evaluate(engine: Engine, plan: Plan) -> float:
    """Mean loss over eight held-out samples."""
    batch = samples(-1)
    own = {key: value.chunk(plan.dp)[engine.dp_rank] for key, value in batch.items()}
    sums = torch.stack([x.double() for x in engine.eval_loss(own)])
    loss_sum, count = engine.reduce_sums(sums).tolist()
    return loss_sum / count


def whole(x: torch.Tensor) -> torch.Tensor:
    return (gathered(x) if isinstance(x, DTensor) else x).clone()
