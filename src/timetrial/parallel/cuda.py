"""What of an NVIDIA GPU is chosen outside of the model: process group, attention kernel, switches.

Written against torch 2.13's sources and not yet run on a GPU; docs/gpu.md says how to check each part.
"""

from __future__ import annotations

import datetime
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from timetrial.config import Plan
from timetrial.errors import UserError


def check(plan: Plan, device: torch.device) -> None:
    """Raise UserError, one line naming the plan's setting, if `plan` cannot run on `device`."""
    if device.type == "cuda":
        if plan.cp > 1 and plan.precision == "fp32":
            raise UserError(
                f"cp={plan.cp} with precision=fp32: flash attention on a GPU takes bfloat16 only; "
                f"set precision=bf16 or cp=1"
            )
        return
    for name in ("graph", "async_tp"):
        if getattr(plan, name):
            raise UserError(
                f"--plan: {name}=true needs a CUDA device and this run is on {device.type}; set {name}=false"
            )


def group_arguments(device: torch.device, timeout: datetime.timedelta) -> dict[str, Any]:
    """Arguments of `init_process_group` for ranks that compute on `device`.

    On a GPU: NCCL for its tensors and gloo for the host's. With the device given, communicators are made at
    once and sub-groups are split off the first, with its options, so that all of them communicate on
    streams of high priority: a collective's few blocks start ahead of a product's many.
    """
    if device.type != "cuda":
        return {"backend": "gloo", "timeout": timeout}
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns where the two differ
    return {"backend": "cpu:gloo,cuda:nccl", "timeout": timeout, "device_id": device, "pg_options": options}


def attention(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, scaled dot product attention on a GPU takes the first kernel of this order that fits its inputs.

    cuDNN's is the fastest from Hopper on, FlashAttention-2 goes anywhere with 16-bit inputs, the
    memory-efficient one takes float32, and the plain products take what is left.
    """
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


def asynchronous_tp(group: dist.ProcessGroup) -> None:
    """Have the compiler split gathers with their products into pieces that overlap, over `group`.

    all-gather -> product and product -> reduce-scatter become one operator each, which moves pieces through
    symmetric memory while it multiplies others (Wang et al. 2023, doi:10.1145/3567955.3567959). Only in
    compiled blocks, and for the rest of the process: torch has this as a setting of its compiler.
    """
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)
