"""Contestant: Timetrial through all that `timetrial train` runs, from the command line's words to metrics.jsonl.

Data, loader, engine, trainer, result log and files are the product's. Two things are put in from outside: a data
source of random tokens, and a wait between two steps, outside the step's clock.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import timetrial
from peers.gate import Gate, Task, task
from peers.shape import SAMPLES, Shape, sample
from timetrial.config import Data, RunConfig
from timetrial.data import source as sources

HELD_OUT = 1
WORK = ("forward", "backward", "optimizer")
"""Phases that any training loop has; the rest of a step is what the harness costs."""


class Tokens:
    """Random samples, as `data.samples.Samples`."""

    def __init__(self, shape: Shape, count: int) -> None:
        self.shape, self.count = shape, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = sample(self.shape, index).numpy()
        return {"tokens": row[:-1], "labels": row[1:]}


def offer_random_tokens(shape: Shape) -> None:
    """Add the data source `random`. To be called before `timetrial.train` is imported, which lists the sources."""
    tokenizer = sources.bundled_by_name("sotu-2048")  # no text is read: any will do

    def open_random(data: Data) -> sources.Source:
        return sources.Source(Tokens(shape, SAMPLES), Tokens(shape, HELD_OUT), shape.vocab, tokenizer)

    sources.SOURCES["random"] = open_random


def configuration(shape: Shape, ranks: int, threads: int, compiled: bool, steps: int) -> RunConfig:
    """What `timetrial train llama31_8b --plan ... --set ...` would resolve to; never evaluates within `steps`."""
    from timetrial.train import request

    far = (steps + 1) * shape.batch
    sets = {
        "model.vocab_size": shape.vocab,
        "model.dim": shape.dim,
        "model.n_layers": shape.layers,
        "model.n_heads": shape.heads,
        "model.n_kv_heads": shape.kv_heads,
        "model.ffn_dim": shape.ffn,
        "model.rope_theta": shape.rope_theta,
        "model.norm_eps": shape.norm_eps,
        "data.source": "random",
        "data.seq_len": shape.seq,
        "optim.base_lr": shape.lr,
        "optim.end_lr": shape.lr,
        "optim.eps": 1e-8,
        "optim.warmup_steps": 0,
        "optim.clip_norm": shape.clip,
        "evaluation.every_samples": far,
        "evaluation.samples": HELD_OUT,
        "evaluation.max_samples": steps * shape.batch,
        "checkpoint_every": 0,
    }
    plan = f"dp={ranks},gbs={shape.batch},mbs={shape.batch // ranks},precision=fp32,compile={str(compiled).lower()}"
    if ranks > 1:
        plan += ",zero=1"  # parameters fit: gathered once a step
    words = [f"{key}={value}" for key, value in sets.items()]
    return request.resolve("llama31_8b", "mini", plan=plan, ranks=ranks, sets=words, threads=threads)


def run(config: RunConfig, out: Path, between: Callable[[Any], None]) -> dict[str, Any]:
    """Train `config` into `out`, calling `between(trainer)` before each step and at the end; result.json's content."""
    from timetrial.train import run as product

    class Interrupted(product.Trainer):
        def _ended(self) -> str | None:
            between(self)
            return super()._ended()

    original = product.Trainer
    product.Trainer = Interrupted  # type: ignore[misc]
    try:
        return product.train_run(config, out, resume=False, command="benchmarks/train_cpu.py", quiet=True)
    finally:
        product.Trainer = original  # type: ignore[misc]


def rows(out: Path) -> list[dict[str, Any]]:
    """The steps that metrics.jsonl has."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def train(task: Task) -> None:
    offer_random_tokens(task.shape)
    config = configuration(task.shape, task.ranks, task.threads, task.compile, steps=1_000_000)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"

        def phases(count: int) -> dict[str, Any]:
            if task.rank:
                return {}
            last = rows(out)[-count:]
            return {"work_s": [sum(row["phases"][name] for name in WORK) for row in last]}

        gate = Gate(task, phases)

        def between(trainer: Any) -> None:
            if trainer.progress.step == 0:
                count = config.model.n_params()
                version = f"timetrial {timetrial.__version__}"
                gate.ready(parameters=count, version=version, torch=torch.__version__)
            else:
                gate.step(None if task.rank else rows(out)[-1]["loss"])

        run(config, out, between)


if __name__ == "__main__":
    train(task())
