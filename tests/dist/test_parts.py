"""Parts of the engine against their one-process answers: the ring, the split loss, whole weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from world import run_world

from timetrial.models.llama.model import CausalAttention
from timetrial.parallel import context
from timetrial.parallel.loss import token_loss_sum

RANKS = 4


def inputs(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and a gradient [B, S, heads, H], the same on every rank."""
    g = torch.Generator().manual_seed(3)
    shapes = [(2, 64, 4, 16), (2, 64, kv_heads, 16), (2, 64, kv_heads, 16), (2, 64, 4, 16)]
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def attend(attention: torch.nn.Module, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and the gradients of q, k, v."""
    *qkv, grad = (x.clone().requires_grad_() for x in tensors)
    out = attention(*qkv)
    out.backward(grad.detach())
    return [out.detach(), *(x.grad for x in qkv)]


def ring_parts() -> dict[int, list[torch.Tensor]]:
    """By key/value heads: this rank's part of output and gradients."""
    own = context.positions(64, RANKS, dist.get_rank())
    ring = context.RingAttention(dist.group.WORLD)
    return {heads: attend(ring, [x[:, own] for x in inputs(heads, torch.float32)]) for heads in (1, 2, 4)}


def loss_parts() -> list[list[torch.Tensor]]:
    """For each kind of batch: the loss sum and this rank's part of the logits' gradient."""
    return [split_loss(*case) for case in loss_cases()]


def loss_cases() -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 8, 32, generator=g) * 5
    labels = torch.randint(0, 32, (2, 8), generator=g)
    some, none = labels.clone(), torch.full_like(labels, -100)
    some[0, :5] = -100
    # values that overflow exp unless the maximum over all ranks is taken off first
    return [(logits, labels), (logits, some), (logits, none), (logits * 40 + 300, labels)]


def split_loss(logits: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    part = logits.chunk(RANKS, dim=-1)[dist.get_rank()].clone().requires_grad_()
    loss = token_loss_sum(part, labels, dist.group.WORLD)
    (loss * 0.5).backward()
    return [loss.detach(), part.grad]


def everything() -> tuple[Any, Any]:
    return ring_parts(), loss_parts()


@pytest.fixture(scope="module")
def parts() -> list[tuple[Any, Any]]:
    return run_world(everything, RANKS)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_ring_equals_attention_over_the_whole_sequence(kv_heads: int, parts: list[tuple[Any, Any]]) -> None:
    """Against float64 attention on one process: the merge adds no error beyond float32's own."""
    exact = attend(CausalAttention(), inputs(kv_heads, torch.float64))
    plain = attend(CausalAttention(), inputs(kv_heads, torch.float32))
    for i, what in enumerate(("output", "dq", "dk", "dv")):
        whole = torch.empty_like(plain[i])
        for rank, (ring, _) in enumerate(parts):
            whole[:, context.positions(64, RANKS, rank)] = ring[kv_heads][i]
        error = (whole - exact[i]).abs().max().item()
        assert error < 2e-6, what
        assert error < 4 * (plain[i] - exact[i]).abs().max().item() + 1e-7, what


def test_positions_share_out_the_sequence_and_the_work() -> None:
    for cp in (1, 2, 4, 8):
        own = [context.positions(64, cp, rank) for rank in range(cp)]
        assert torch.cat(own).sort().values.equal(torch.arange(64))
        work = {int((positions + 1).sum()) for positions in own}  # keys that a rank's queries see
        assert len(work) == 1


def test_split_loss_equals_cross_entropy(parts: list[tuple[Any, Any]]) -> None:
    for i, (logits, labels) in enumerate(loss_cases()):
        logits = logits.double().requires_grad_()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (loss * 0.5).backward()
        grad = torch.cat([losses[i][1] for _, losses in parts], dim=-1)
        for _, losses in parts:
            assert losses[i][0].item() == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)
        assert grad.isfinite().all()
        assert (grad - logits.grad).abs().max().item() < 1e-5


def failing(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted")
    dist.barrier()


def test_a_failing_rank_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2:\n(.|\n)*ValueError: planted"):
        run_world(failing, 2, 1)
