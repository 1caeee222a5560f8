"""How a Llama lies over tensor-parallel ranks, as data: module -> style.

What the styles mean: `parallel/tensor.py`. The residual stream is split along the sequence; attention
and feed-forward gather it, work on their part of the heads or channels, and scatter the sum.
"""

from __future__ import annotations

SHARDING = {
    "embed": "vocab",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "head": "colwise_gather",
}
