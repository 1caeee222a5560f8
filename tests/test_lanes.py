"""Lanes give one lane's numbers, repeat bit for bit, and are chosen where they pay and can be used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from timetrial.check import check
from timetrial.config import Lora, Plan, RunConfig
from timetrial.models import lora
from timetrial.models.llama.config import LlamaConfig
from timetrial.parallel.engine import Batch, Engine, OneRank
from timetrial.parallel.lanes import Lanes, sharing
from timetrial.train import threads
from timetrial.train.process import Process
from timetrial.workloads.workload import resolve

MODEL = LlamaConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, init_std=0.05)


def model_of(adapters: Lora | None = None) -> nn.Module:
    model = MODEL.create()
    for name, parameter in model.named_parameters():
        MODEL.init_parameter(name, parameter, 1)
    if adapters is not None:
        lora.apply(model, adapters, 1)
    return model


def batch(samples: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, 64, (samples, 16), generator=g) for _ in range(2))
    labels[0, :12] = -100  # samples count different numbers of tokens
    return {"tokens": tokens, "labels": labels}


def train(engine: Engine, batches: list[Batch], steps: int = 4) -> list[torch.Tensor]:
    """Losses and gradient norms of each step, then the weights."""
    parameters = [p for _, p in engine.parameters_named() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, fused=True)
    counted = sum(int((b["labels"] >= 0).sum()) for b in batches)
    out = []
    for _ in range(steps):
        out += [engine.train_step(batches, counted), engine.clip_grad_norm(0.5)]
        optimizer.step()
        optimizer.zero_grad()
    return [*out, *(p.detach().clone() for p in parameters)]


@pytest.mark.parametrize("samples", [[8, 8], [3], [1]], ids=["two micro batches", "uneven", "fewer than lanes"])
@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("adapters", [None, Lora(rank=2, dropout=0.0)], ids=["all", "adapters"])
def test_lanes_equal_one_lane(lanes: int, samples: list[int], adapters: Lora | None) -> None:
    batches = [batch(count, seed) for seed, count in enumerate(samples)]
    one = train(OneRank(model_of(adapters), torch.device("cpu")), batches)
    lanes_run = train(Lanes(model_of(adapters), lanes, lanes), batches)
    # float32; only sums over samples are reordered, which moves the last places
    for a, b in zip(one, lanes_run, strict=True):
        assert ((a - b).norm() / a.norm().clamp(min=1e-9)).item() < 1e-5


def test_lanes_repeat_bit_for_bit() -> None:
    batches = [batch(7, 0), batch(7, 1)]
    runs = [train(Lanes(model_of(), 3, 3), batches) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


def test_evaluation_of_any_batch_size() -> None:
    one, two = OneRank(model_of(), torch.device("cpu")), Lanes(model_of(), 2, 2)
    for count in (1, 5):
        loss, tokens = one.eval_loss(batch(count, 3))
        lanes_loss, lanes_tokens = two.eval_loss(batch(count, 3))
        assert lanes_loss.item() == pytest.approx(loss.item(), rel=1e-6)
        assert lanes_tokens == tokens
        assert not lanes_loss.requires_grad


def test_replicas_share_memory_and_no_gradient() -> None:
    model = model_of()
    replica = sharing(model)
    with torch.no_grad():
        next(model.parameters()).fill_(3.0)
    for mine, its in zip(model.parameters(), replica.parameters(), strict=True):
        assert its is not mine
        assert its.data_ptr() == mine.data_ptr()
    replica(batch(1, 0)["tokens"]).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_compiled_blocks_in_lanes() -> None:
    engines = []
    for compiled in (True, False):
        engine = Lanes(model_of(), 2, 2)
        for replica in engine.replicas if compiled else ():
            for block in replica.get_submodule("layers").children():
                block.compile()
        engines.append(train(engine, [batch(8, 0)], steps=2))
    for a, b in zip(*engines, strict=True):
        assert ((a - b).norm() / a.norm().clamp(min=1e-9)).item() < 1e-5


def test_an_error_in_a_lane_is_raised() -> None:
    engine = Lanes(model_of(), 2, 2)
    bad = batch(2, 0)
    bad["tokens"][1] = 64  # beyond the vocabulary, in the second lane's part
    with pytest.raises(IndexError):
        engine.train_step([bad], 1)


def process(world: int = 1) -> Process:
    return Process(0, world, 0, world, torch.device("cpu"))


def mini(**plan: object) -> RunConfig:
    config = resolve("llama31_8b", "mini")
    return replace(config, plan=replace(config.plan, **plan))


@pytest.mark.parametrize(
    ("count", "mbs", "lanes"), [(1, 8, 1), (2, 8, 2), (6, 8, 2), (4, 6, 2), (2, 1, 1), (16, 16, 8), (3, 9, 3)]
)
def test_lanes_divide_threads_and_samples(count: int, mbs: int, lanes: int) -> None:
    assert threads.lanes_for(mini(mbs=mbs, gbs=mbs), count, process()) == lanes


def test_no_lanes_where_they_cannot_be_used() -> None:
    config = mini(mbs=8, gbs=8)
    assert threads.lanes_for(config, 2, process(world=2)) == 1
    assert threads.lanes_for(replace(config, lora=Lora(dropout=0.1)), 2, process()) == 1
    assert threads.lanes_for(replace(config, lora=Lora(dropout=0.0)), 2, process()) == 2


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({(1, 1): 10, (2, 1): 15, (2, 2): 18}, (2, 2)),
        ({(1, 1): 10, (2, 1): 17, (2, 2): 18}, (2, 1)),  # not worth it
        ({(1, 1): 10, (2, 1): 4, (2, 2): 10.5}, (1, 1)),  # somebody else is at work
        ({(1, 1): 10, (2, 1): 4, (2, 2): 15}, (2, 2)),
    ],
)
def test_the_fastest_is_chosen(
    rates: dict[tuple[int, int], float], chosen: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "cores_available", lambda: 2)
    monkeypatch.setattr(threads, "rounds_per_s", lambda count, lanes=1: rates[count, lanes])
    settled = threads.settle(mini(mbs=8, gbs=8), process())
    assert (settled.threads, settled.lanes) == chosen
    assert threads.settle(settled, process()) == settled


def test_rounds_are_counted_in_lanes() -> None:
    before = torch.get_num_threads()
    assert threads.rounds_per_s(2, 2, seconds=0.05) > 0
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"plan": Plan(dp=2, mbs=4, gbs=8)}, "several ranks"),
        ({"lora": Lora(dropout=0.1)}, "lora.dropout"),
        ({"threads": 3}, "must divide threads=3"),
    ],
)
def test_lanes_that_cannot_be_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(Exception, match=f"lanes=2: .*{says}"):
        check(replace(mini(mbs=8, gbs=8), lanes=2, **changes))
    check(replace(mini(mbs=8, gbs=8), lanes=2, threads=4))
