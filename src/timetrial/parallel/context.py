"""Context parallelism: one sequence over several ranks, attention as a ring of exact blocks.

The sequence is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r: under a causal mask
the early chunk has little to attend to and the late one much, so that every rank has the same work.

    step i of cp: rank r meets keys and values of rank s = (r - i) mod cp
      s = r   its own: causal over [chunk r, chunk 2 cp - 1 - r], which are in order
      s < r   all queries see the head chunk of s and none of its tail
      s > r   the tail queries see both chunks of s, the head queries none

Each block gives an output and a log-sum-exp per query; blocks merge as
out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i) (Liu et al. 2023, arXiv:2310.01889;
the balanced cut as in Brandon et al. 2023, arXiv:2311.09431). The backward pass runs the flash kernel's
own backward per block with the merged out and lse, which is exact, while keys, values and their
gradients go round again. Torch's built-in context parallelism has no strategy for the CPU kernel and
does not let the cut be chosen.

Shapes: B samples, N query heads, K key/value heads, T this rank's tokens, H head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from timetrial.models.llama.model import CausalAttention


def positions(seq_len: int, cp: int, cp_rank: int) -> Tensor:
    """Where this rank's tokens stand in the sequence, int64 [seq_len / cp]."""
    chunks = torch.arange(seq_len).chunk(2 * cp)
    return torch.cat((chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]))


def apply(model: nn.Module, group: dist.ProcessGroup, device_type: str | None = None) -> None:
    """Put a ring over `group` in the place of every causal attention of `model`.

    Its kernel is that of `device_type`, of the tensors' own device where None.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, CausalAttention):
                parent.register_module(name, RingAttention(group, device_type))


class RingAttention(nn.Module):
    """Causal attention over a sequence that lies over `group` as `positions` says."""

    def __init__(self, group: dist.ProcessGroup, device_type: str | None = None) -> None:
        super().__init__()
        self.group, self.device_type = group, device_type

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """-> [B, T, N, H], T being this rank's tokens."""
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q_BTNH, k_BTKH, v_BTKH))
        kernel = self.device_type or q.device.type
        out: Tensor = ring_forward(q, k, v, self.group.group_name, kernel)[0]
        return out.transpose(1, 2)


# ---- the kernel, per device ----------------------------------------------------------------------

Out = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Kernel:
    """Flash attention that also gives its log-sum-exp."""

    forward: Callable[[Tensor, Tensor, Tensor, bool], Out]
    """(q, k, v [B, N, T, H], causal) -> (out [B, N, T, H], lse [B, N, T] float32)."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Grads]
    """(grad, q, k, v, out, lse, causal) -> gradients of q, k, v."""


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Out:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    grads: Grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal
    )
    return grads


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Out:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _cuda_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    rng = torch.empty(2, dtype=torch.uint64, device=q.device)  # read only where there is dropout
    grads: Grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, rng, rng
    )
    return grads


KERNELS = {
    "cpu": Kernel(_cpu_forward, _cpu_backward),
    "cuda": Kernel(_cuda_forward, _cuda_backward),  # written from the operators' signatures; not yet run on a GPU
}


# ---- the ring ------------------------------------------------------------------------------------
#
# Operators of their own, so that selective recomputation can keep the ring's result (and does not run
# the ring twice) and torch.compile leaves it whole. Operators take plain values: group and kernel by their names.


def _forward(q: Tensor, k: Tensor, v: Tensor, group_name: str, kernel_name: str) -> tuple[Tensor, Tensor]:
    """(q [B, N, T, H], k, v [B, K, T, H]) -> (out [B, N, T, H], lse [B, N, T] float32)."""
    group = _group(group_name)
    kernel, cp, rank = KERNELS[kernel_name], group.size(), group.rank()
    half, repeat = q.shape[2] // 2, q.shape[1] // k.shape[1]
    kv = torch.stack((k, v))
    out = torch.empty_like(q, dtype=torch.float32)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for i in range(cp):
        source = (rank - i) % cp
        pending, following = _pass_on(kv, group) if i + 1 < cp else ([], kv)
        queries, keys = _overlap(rank, source, half)
        k_i, v_i = (_heads(x[:, :, keys], repeat) for x in kv)
        out_i, lse_i = kernel.forward(q[:, :, queries].contiguous(), k_i, v_i, source == rank)
        if i == 0:  # its own keys, which every query sees some of
            out.copy_(out_i)
            lse.copy_(lse_i)
        else:
            _merge(out[:, :, queries], lse[:, :, queries], out_i, lse_i)
        _wait(pending)
        kv = following
    return out.to(q.dtype), lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group_name: str, kernel_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtypes."""
    group = _group(group_name)
    kernel, cp, rank = KERNELS[kernel_name], group.size(), group.rank()
    half, repeat = q.shape[2] // 2, q.shape[1] // k.shape[1]
    kv = torch.stack((k, v))
    dq = torch.zeros_like(q, dtype=torch.float32)
    dkv = torch.zeros_like(kv, dtype=torch.float32)  # of the keys in hand; it travels with them
    arriving: list[dist.Work] = []
    for i in range(cp):
        source = (rank - i) % cp
        pending, following = _pass_on(kv, group) if i + 1 < cp else ([], kv)
        queries, keys = _overlap(rank, source, half)
        k_i, v_i = (_heads(x[:, :, keys], repeat) for x in kv)
        q_i, grad_i, out_i, lse_i = (x[:, :, queries].contiguous() for x in (q, grad, out, lse))
        dq_i, dk_i, dv_i = kernel.backward(grad_i, q_i, k_i, v_i, out_i, lse_i, source == rank)
        dq[:, :, queries].add_(dq_i)  # += would copy what it has added to onto itself
        _wait(arriving)
        dkv[0, :, :, keys].add_(_sum_heads(dk_i, repeat))
        dkv[1, :, :, keys].add_(_sum_heads(dv_i, repeat))
        _wait(pending)
        kv = following
        arriving, dkv = _pass_on(dkv, group)  # the last turn brings them home
    _wait(arriving)
    return dq.to(q.dtype), dkv[0].to(k.dtype, copy=True), dkv[1].to(v.dtype, copy=True)


ring_forward = torch.library.custom_op("timetrial::ring_attention", _forward, mutates_args=())
ring_backward = torch.library.custom_op("timetrial::ring_attention_backward", _backward, mutates_args=())
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"ring_attention": _forward, "ring_attention_backward": _backward}
"""What the operators run: for whoever must look inside (`record.py`)."""


@ring_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group_name: str, kernel_name: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@ring_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group_name: str, kernel_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str, str], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.names = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return *ring_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.names), None, None


ring_forward.register_autograd(_gradients, setup_context=_save)


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore
    return group


def _overlap(rank: int, source: int, half: int) -> tuple[slice, slice]:
    """Which of `rank`'s queries see which of `source`'s keys; see the table above."""
    everything, head, tail = slice(None), slice(None, half), slice(half, None)
    if source == rank:
        return everything, everything
    return (everything, head) if source < rank else (tail, everything)


def _heads(x_BKTH: Tensor, repeat: int) -> Tensor:
    """Each key/value head once per query head that reads it."""
    return x_BKTH.repeat_interleave(repeat, dim=1) if repeat > 1 else x_BKTH.contiguous()


def _sum_heads(d_BNTH: Tensor, repeat: int) -> Tensor:
    """The reverse of `_heads` for gradients: the sum over the query heads of each key/value head."""
    B, N, T, H = d_BNTH.shape
    return d_BNTH.reshape(B, N // repeat, repeat, T, H).sum(2)


def _merge(out: Tensor, lse: Tensor, out_i: Tensor, lse_i: Tensor) -> None:
    """Take block i into `out` and `lse`, in place."""
    both = torch.logaddexp(lse, lse_i)
    out.mul_((lse - both).exp_()[..., None]).add_(out_i * (lse_i - both).exp_()[..., None])
    lse.copy_(both)


def _pass_on(x: Tensor, group: dist.ProcessGroup) -> tuple[list[dist.Work], Tensor]:
    """Start sending `x` to the next rank of the ring and receiving the one before's into the result."""
    cp, rank = group.size(), group.rank()
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % cp)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % cp)
    return dist.batch_isend_irecv([send, receive]), received


def _wait(pending: list[dist.Work]) -> None:
    for work in pending:
        work.wait()
