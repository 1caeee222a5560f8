"""Contestant: a plain PyTorch training loop, as in nanoGPT and its like. No framework.

The model is the shortest Llama that one would write today: torch's RMSNorm and attention, rotary
positions from a table, cross entropy over whole logits, fused AdamW. Several ranks: DistributedDataParallel.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from peers.gate import Gate, Task, task
from peers.shape import Shape, batch


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, N, T, H]"""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        kv_dim = self.head_dim * shape.kv_heads
        self.norm1 = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.norm2 = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)
        self.w1 = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.w2 = nn.Linear(shape.ffn, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, D = x.shape
        h = self.norm1(x)
        q, k, v = (w(h).view(B, T, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, D))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        head_dim = shape.dim // shape.heads
        frequency = shape.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(shape.seq), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if residual else 0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of [B, T] token ids and their labels."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(task: Task) -> None:
    torch.set_num_threads(task.threads)
    torch.manual_seed(1)
    model: nn.Module = Llama(task.shape)
    count = sum(p.numel() for p in model.parameters())
    if task.ranks > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    if task.compile:
        model = torch.compile(model)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=task.shape.lr, betas=(0.9, 0.95), fused=True)
    gate = Gate(task)
    gate.ready(parameters=count, version=torch.__version__, torch=torch.__version__)
    step = 0
    while True:
        tokens, labels = batch(task.shape, step, task.rank, task.ranks)
        loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.shape.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        gate.step(loss.item())


if __name__ == "__main__":
    train(task())
