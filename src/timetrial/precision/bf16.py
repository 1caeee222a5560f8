"""bfloat16 matrix products: operands rounded to 8 significant bits, sums kept in float32.

    y = round(round(x) @ round(w)^T),   round: float32 -> nearest bfloat16

and likewise both products of the backward pass, since the gradient of a rounding is rounded too. On a
GPU the operands are bfloat16 tensors and the tensor cores do exactly this. On a CPU a bfloat16 product
is some fifteen times slower than a float32 one, so the same numbers are got by rounding the operands
and multiplying in float32: a product of two bfloat16 values is exact in float32.

`convert` rewrites the model's linear layers; autocast is not used because it would round by a list of
operators that differs between devices and leaves no place to put other formats.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bf16Linear(nn.Linear):
    """A linear layer that keeps its weights as they are and multiplies in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        if x.device.type == "cpu":
            bias = None if bias is None else bias.float()
            return rounded(F.linear(rounded(x), rounded(self.weight), bias)).to(x.dtype)
        return F.linear(x.to(torch.bfloat16), self.weight.to(torch.bfloat16), bias)


def rounded(x: Tensor) -> Tensor:
    """`x` at bfloat16 precision, stored as float32; its gradient is rounded in the same way."""
    return x.to(torch.bfloat16).float()


def convert(model: nn.Module) -> None:
    """Make every plain linear layer of `model` a Bf16Linear, in place; parameters stay the same objects."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _converted(child))


def _converted(linear: nn.Linear) -> Bf16Linear:
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        new = Bf16Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    new.weight, new.bias = linear.weight, linear.bias
    return new.train(linear.training)
