"""Contestant: Hugging Face transformers' Trainer with LlamaForCausalLM; several ranks: its DDP over gloo.

Nothing is saved, logged or evaluated. `shift_labels` makes its loss count all tokens of a sequence, as the
others' does; by itself it would drop the last one.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from peers.gate import Gate, Task, task
from peers.shape import SAMPLES, Shape, sample


class Tokens(Dataset):
    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = sample(self.shape, index)
        return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}


class Watched(Trainer):
    """Trainer that keeps the loss of the last step."""

    last_loss = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.last_loss = loss.item()
        return loss


class Turns(TrainerCallback):
    def __init__(self, gate: Gate, trainer: Watched, parameters: int) -> None:
        self.gate, self.trainer, self.parameters = gate, trainer, parameters

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        version = f"transformers {transformers.__version__}"
        self.gate.ready(parameters=self.parameters, version=version, torch=torch.__version__)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.gate.step(self.trainer.last_loss)


def train(task: Task) -> None:
    torch.set_num_threads(task.threads)
    shape = task.shape
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.seq,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        pad_token_id=None,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=shape.batch // task.ranks,
            max_steps=1_000_000,
            optim="adamw_torch_fused",
            learning_rate=shape.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.1,
            max_grad_norm=shape.clip,
            torch_compile=task.compile,
            use_cpu=True,
            ddp_backend="gloo",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Watched(model=model, args=arguments, train_dataset=Tokens(shape))
        trainer.add_callback(Turns(Gate(task), trainer, sum(p.numel() for p in model.parameters())))
        trainer.train()


if __name__ == "__main__":
    train(task())
