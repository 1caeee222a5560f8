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

    device_type: str | None = None
    """Kind of device whose way it takes, cpu or cuda; that of its input where None."""

    def emulates(self, x: Tensor) -> bool:
        """Whether operands are rounded and multiplied in float32."""
        return (self.device_type or x.device.type) == "cpu"

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        if self.emulates(x):
            bias = None if bias is None else bias.float()
            return rounded(F.linear(rounded(x), rounded(self.weight), bias)).to(x.dtype)
        return F.linear(x.to(torch.bfloat16), self.weight.to(torch.bfloat16), bias)


def rounded(x: Tensor) -> Tensor:
    """`x` at bfloat16 precision, stored as float32; its gradient is rounded in the same way."""
    return x.to(torch.bfloat16).float()


def convert(model: nn.Module, device_type: str | None = None) -> None:
    """Make every plain linear layer of `model` a Bf16Linear, in place; parameters stay the same objects.

    `device_type` as in Bf16Linear: a trace takes a GPU's way on tensors that are none of its.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                converted = _converted(child)
                converted.device_type = device_type
                setattr(parent, name, converted)


def _converted(linear: nn.Linear) -> Bf16Linear:
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        new = Bf16Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    new.weight, new.bias = linear.weight, linear.bias
    return new.train(linear.training)
