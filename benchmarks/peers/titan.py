"""Contestant: TorchTitan 0.3.0's trainer and Llama 3, made to run on a CPU by `titan_cpu.py`; ranks: FSDP2.

Its attention for language models has no CPU kernel, so its own `ScaledDotProductAttention` is put in
their place. The rest is its default: fused QKV weight, loss in chunks of the sequence, compiled block by block.
Activation checkpointing is off: memory is plenty here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peers import titan_cpu
from peers.gate import Gate, Task, task
from peers.shape import Shape, batch

titan_cpu.install()

import torchtitan  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

ENDS_INIT = {"weight": partial(nn.init.normal_, std=0.02)}
"""Of embedding and head; its own is so wide that the first loss would not be comparable."""


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class RandomTokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        shape: Shape

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **kwargs: Any) -> None:
        self.shape, self.rank, self.ranks = config.shape, dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        step = 0
        while True:
            tokens, labels = batch(self.shape, step, self.rank, self.ranks)
            yield {"input": tokens}, labels
            step += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class GatedTrainer(Trainer):
    """The trainer, waiting for its turn after each step. Takes the loss where the trainer logs it."""

    gate: Gate
    last_loss = 0.0

    def take_turns(self, gate: Gate) -> None:
        self.gate = gate
        log = self.metrics_processor.log

        def keep_loss(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
            self.last_loss = loss
            log(step, loss, *args, **kwargs)

        self.metrics_processor.log = keep_loss

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        super().train_step(data_iterator)
        self.gate.step(self.last_loss)


def model_spec(shape: Shape) -> ModelSpec:
    """The Llama 3 of `torchtitan.models.llama3` in this shape."""
    layers = llama3._build_llama3_layers(
        n_layers=shape.layers,
        dim=shape.dim,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        hidden_dim=shape.ffn,
        rope=ComplexRoPE.Config(
            dim=shape.dim // shape.heads, max_seq_len=shape.seq, theta=shape.rope_theta, scaling="none"
        ),
        attn_backend="flex",
    )
    norm = RMSNorm.Config(normalized_shape=shape.dim, eps=shape.norm_eps, param_init=llama3._NORM_INIT)
    config = llama3.Llama3Model.Config(
        dim=shape.dim,
        vocab_size=shape.vocab,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab, embedding_dim=shape.dim, param_init=ENDS_INIT),
        norm=norm,
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab, param_init=ENDS_INIT),
        layers=layers,
    )
    for _, _, parent, field in list(config.traverse(FlexAttention.Config)):
        setattr(parent, field, ScaledDotProductAttention.Config())
    return ModelSpec(
        name="llama3",
        flavor="benchmark",
        model=config,
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def trainer_config(task: Task, dump: str) -> Trainer.Config:
    shape = task.shape
    return Trainer.Config(
        model_spec=model_spec(shape),
        dump_folder=dump,
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(shape=shape),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=shape.vocab)),
        optimizer=default_adamw(lr=shape.lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=shape.batch // task.ranks,
            seq_len=shape.seq,
            max_norm=shape.clip,
            steps=1_000_000,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        # parameters fit, so they stay gathered through the step, as with Timetrial's zero=1
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward="never"),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        compile=CompileConfig(enable=task.compile),
        activation_checkpoint=None,
    )


def train(task: Task) -> None:
    torch.set_num_threads(task.threads)
    with tempfile.TemporaryDirectory() as dump:
        trainer = GatedTrainer(trainer_config(task, dump))
        count = sum(p.numel() for part in trainer.model_parts for p in part.parameters())
        gate = Gate(task)
        trainer.take_turns(gate)
        gate.ready(parameters=count, version=f"torchtitan {torchtitan.__version__}", torch=torch.__version__)
        trainer.train()


if __name__ == "__main__":
    train(task())
