"""What TorchTitan 0.3.0 needs to train on a CPU with torch 2.13.0. Nothing here is on the path of a step.

- it takes CUDA where torch names no accelerator: a device module for the CPU stands in;
- its FSDP asks for a reduction that gloo does not know (`PREMUL_SUM`): plain sums, which is what its
  gradient divisor of 1 means;
- it shortens time limits by a function that torch 2.13.0 does not have yet: left out.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def cpu_module() -> SimpleNamespace:
    """The functions of `torch.cuda` that the trainer calls, for a CPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def nothing(*args: Any) -> None:
        return None

    return SimpleNamespace(
        set_device=nothing,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda *args: "CPU",
        get_device_properties=lambda *args: SimpleNamespace(total_memory=memory, name="CPU"),
        memory_stats=lambda *args: {},
        reset_peak_memory_stats=nothing,
        empty_cache=nothing,
        synchronize=nothing,
    )


def install() -> None:
    """To be called before anything else of TorchTitan is imported."""
    import torchtitan.tools.utils as tools

    tools.device_type, tools.device_module = "cpu", cpu_module()
    import torchtitan.distributed.fsdp as fsdp
    import torchtitan.distributed.utils as distributed
    from torch.distributed.fsdp import FSDPModule

    def sums_only(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def keep_timeouts(*args: Any, **kwargs: Any) -> None:
        return None

    assert not hasattr(torch.distributed, "set_timeout")
    fsdp.disable_fsdp_gradient_division = sums_only
    distributed.set_pg_timeouts = keep_timeouts
