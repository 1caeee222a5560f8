"""Causal attention on a CPU by batched products, a block of queries at a time.

torch's flash operator makes some 40 GFLOP/s a core where a matrix product makes 90: its tiles are small
products, and its backward pass makes one of the five products twice. For sequences of a training step on a
CPU it is cheaper to keep the probabilities. Queries go in blocks, so that what the mask hides is not computed
(but for the corner of each block), and the query heads that share a key/value head are rows of one product:

    forward   P = softmax(q k^T / sqrt(H))   out = P v
    backward  dv += P^T g   dS = P * (g v^T - sum(g * out))   dq = dS k / sqrt(H)   dk += dS^T q / sqrt(H)

(Dao et al. 2022, arXiv:2205.14135, appendix B.2, with P kept.) P takes N T (T + BLOCK) / 2 floats a sample,
so `BlockAttention` leaves sequences longer than LONGEST, and anything but float32, to torch's operator.

Shapes: B samples, T tokens, N query heads, K key/value heads, G = N / K, H head. Rows are [B K, T G, H]: all
query heads of a key/value head at a token lie together.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from timetrial.models.llama.model import CausalAttention

BLOCK = 64
"""Queries of a block: 32 and 64 are equally fast, 128 and more compute too much that the mask hides."""
LONGEST = 1024
"""Tokens of a sequence up to which P is kept: 2.1 MB a head and sample there, in float32."""


def apply(model: nn.Module) -> None:
    """Put block attention in the place of every causal attention of `model`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is CausalAttention:
                parent.register_module(name, BlockAttention())


class BlockAttention(CausalAttention):
    """Causal attention through `causal_attention` where that is the faster way."""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """-> [B, T, N, H]; query head n reads key/value head n // (N / K)."""
        own = q_BTNH.device.type == "cpu" and q_BTNH.dtype == torch.float32 and q_BTNH.shape[1] <= LONGEST
        if not own:
            return super().forward(q_BTNH, k_BTKH, v_BTKH)
        out_BTNH: Tensor = causal_attention(q_BTNH, k_BTKH, v_BTKH)[0]
        return out_BTNH


# Operators of their own, so that selective recomputation keeps the result, the compiler leaves them whole and a
# trace names them.


@torch.library.custom_op("timetrial::causal_attention", mutates_args=())
def causal_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
    """-> (out [B, T, N, H], probabilities of all blocks one after another, flat)."""
    B, T, N, H = q_BTNH.shape
    K, G = k_BTKH.shape[2], N // k_BTKH.shape[2]
    q, k, v = _rows(q_BTNH, K) * (1 / math.sqrt(H)), _rows(k_BTKH, K), _rows(v_BTKH, K)
    out = torch.empty_like(q)
    kept = q.new_empty(probabilities(B * K, T, G))
    hidden = q.new_full((BLOCK, BLOCK), -math.inf).triu_(1).repeat_interleave(G, 0)
    for rows, keys, block, p in _blocks(kept, B * K, T, G):
        scores = torch.bmm(q[:, rows], k[:, keys].transpose(1, 2))
        size = block.stop - block.start
        scores[:, :, block] += hidden[: size * G, :size]
        torch.softmax(scores, -1, out=p)
        torch.bmm(p, v[:, keys], out=out[:, rows])
    return _heads(out, B, N), kept


@torch.library.custom_op("timetrial::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, out_BTNH: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of q, k and v."""
    B, T, N, H = q_BTNH.shape
    K, G = k_BTKH.shape[2], N // k_BTKH.shape[2]
    q, k, v, grad = (_rows(x, K) for x in (q_BTNH, k_BTKH, v_BTKH, grad_BTNH))
    along = _rows((grad_BTNH * out_BTNH).sum(-1, keepdim=True), K)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, _, p in _blocks(kept, B * K, T, G):
        dv[:, keys].baddbmm_(p.transpose(1, 2), grad[:, rows])
        ds = torch.bmm(grad[:, rows], v[:, keys].transpose(1, 2)).sub_(along[:, rows]).mul_(p)
        torch.bmm(ds, k[:, keys], out=dq[:, rows])
        dk[:, keys].baddbmm_(ds.transpose(1, 2), q[:, rows])
    scale = 1 / math.sqrt(H)
    return _heads(dq.mul_(scale), B, N), _heads(dk.mul_(scale), B, K), _heads(dv, B, K)


def probabilities(batches: int, tokens: int, group: int) -> int:
    """How many probabilities are kept for `batches` samples and key/value heads, `group` query heads each."""
    ends = [min(start + BLOCK, tokens) for start in range(0, tokens, BLOCK)]
    return batches * group * sum((end - start) * end for start, end in zip(range(0, tokens, BLOCK), ends, strict=True))


def _blocks(kept: Tensor, batches: int, tokens: int, group: int) -> list[tuple[slice, slice, slice, Tensor]]:
    """For each block of queries: its rows, the keys it may see, those of them beside it, its part of `kept`."""
    found, at = [], 0
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        rows, size = slice(start * group, end * group), batches * (end - start) * group * end
        p = kept[at : at + size].view(batches, (end - start) * group, end)
        found.append((rows, slice(0, end), slice(start, end), p))
        at += size
    return found


def _rows(x_BTNH: Tensor, kv_heads: int) -> Tensor:
    """[B, T, N, H] -> [B K, T G, H], contiguous."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, kv_heads, N // kv_heads, H).transpose(1, 2).reshape(B * kv_heads, -1, H)


def _heads(rows: Tensor, samples: int, heads: int) -> Tensor:
    """The reverse of `_rows`: [B K, T G, H] -> [B, T, N, H], contiguous."""
    kv_heads, H = rows.shape[0] // samples, rows.shape[-1]
    x_BKTGH = rows.view(samples, kv_heads, -1, heads // kv_heads, H)
    return x_BKTGH.transpose(1, 2).reshape(samples, -1, heads, H).contiguous()


@causal_attention.register_fake
def _(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
    B, T, N, _ = q_BTNH.shape
    K = k_BTKH.shape[2]
    return q_BTNH.new_empty(q_BTNH.shape), q_BTNH.new_empty(probabilities(B * K, T, N // K))


@causal_attention_backward.register_fake
def _(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, out_BTNH: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BTNH.new_empty(q_BTNH.shape), k_BTKH.new_empty(k_BTKH.shape), v_BTKH.new_empty(v_BTKH.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad_BTNH: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = causal_attention_backward(grad_BTNH, *ctx.saved_tensors)
    return grads


causal_attention.register_autograd(_gradients, setup_context=_save)
