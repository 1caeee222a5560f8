"""The one table of what computes what: for each capability the way on a CPU, on a GPU, and why.

Data, without torch. `timetrial capabilities` prints it, docs/gpu.md says how to check each GPU way, and a
test resolves every name in `torch` against the installed version.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Capability:
    """One row."""

    name: str
    cpu: str
    gpu: str
    because: str
    """Why these ways and not others."""
    where: str
    """File of this package that chooses."""
    torch: tuple[str, ...] = ()
    """What of torch the two ways stand on, by dotted name."""
    setting: str = ""
    """The plan's setting that turns it on; always on where empty."""
    run_on_gpu: bool = False
    """Whether the GPU way has ever been run."""


CAPABILITIES = (
    Capability(
        "matrix products, float32",
        cpu="oneDNN or MKL through nn.Linear",
        gpu="cuBLAS through nn.Linear, TF32 off",
        because="vendors' libraries are near the peak at these shapes; TF32 would make fp32 another format",
        where="models/llama/model.py",
        torch=("torch.nn.functional.linear", "torch.backends.cuda.matmul"),
        setting="precision=fp32",
    ),
    Capability(
        "matrix products, bfloat16",
        cpu="operands rounded to bfloat16, multiplied in float32",
        gpu="cuBLAS on bfloat16 tensors; parameters gathered in bfloat16, gradients summed in float32",
        because="the same numbers on both; a CPU's own bfloat16 product is some fifteen times slower",
        where="precision/bf16.py",
        torch=("torch.nn.functional.linear", "torch.distributed.fsdp.MixedPrecisionPolicy"),
        setting="precision=bf16",
    ),
    Capability(
        "attention",
        cpu="own blocks of batched products that keep the probabilities, up to 1,024 tokens; above, flash attention",
        gpu="first that fits of cuDNN, FlashAttention-2, memory-efficient, plain products",
        because="a CPU's products are faster than its flash operator; on a GPU none but the last keeps T x T scores",
        where="parallel/attention.py",
        torch=(
            "torch.library.custom_op",
            "torch.nn.functional.scaled_dot_product_attention",
            "torch.nn.attention.sdpa_kernel",
            "torch.nn.attention.SDPBackend.CUDNN_ATTENTION",
        ),
    ),
    Capability(
        "ring attention",
        cpu="own ring over the CPU's flash operator",
        gpu="the same ring over FlashAttention-2's operator, bfloat16 only",
        because="blocks merge by their log-sum-exp, which both operators give, with a backward pass to match",
        where="parallel/context.py",
        torch=(
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
            "torch.ops.aten._scaled_dot_product_flash_attention",
            "torch.ops.aten._scaled_dot_product_flash_attention_backward",
        ),
        setting="cp>1",
    ),
    Capability(
        "loss",
        cpu="head and cross entropy in one, a chunk of tokens at a time; own vocabulary-parallel loss under tp",
        gpu="the same, in larger chunks",
        because="all logits are the largest tensor of a step and are never held; no product is made twice",
        where="parallel/head.py",
        torch=("torch.nn.functional.log_softmax", "torch.nn.functional.cross_entropy"),
    ),
    Capability(
        "one rank's processors",
        cpu="lanes: parts of a micro batch side by side, each on threads of its own",
        gpu="none: one stream of kernels fills a GPU",
        because="threads within one product wait for each other; products on a thread each do not",
        where="parallel/lanes.py",
        torch=("torch.set_num_threads",),
    ),
    Capability(
        "norms, rotations, SwiGLU",
        cpu="torch's operators one by one",
        gpu="the same, fused by the compiler with compile=true",
        because="bound by memory: fusing is what helps, and a compiler does it without kernels to keep",
        where="models/layers/norm.py",
        torch=("torch.nn.functional.silu", "torch.rsqrt"),
    ),
    Capability(
        "compiled blocks",
        cpu="inductor's C++",
        gpu="inductor's Triton",
        because="a block is compiled once and used for all layers; FSDP's hooks stay outside of it",
        where="parallel/parallelize.py",
        torch=("torch.nn.Module.compile",),
        setting="compile=true",
    ),
    Capability(
        "AdamW",
        cpu="torch's fused kernel",
        gpu="torch's fused kernel, capturable and with the rate in a tensor under graph=true",
        because="one pass over weights and moments; an own kernel could not read less",
        where="optim/adamw.py",
        torch=("torch.optim.AdamW", "torch._fused_adamw_"),
    ),
    Capability(
        "gradient norm and clipping",
        cpu="foreach operators, one all-reduce of a scalar",
        gpu="the same",
        because="few launches, and nothing waits for the device",
        where="parallel/engine.py",
        torch=("torch._foreach_norm", "torch._foreach_mul_"),
    ),
    Capability(
        "process group",
        cpu="gloo",
        gpu="NCCL on streams of high priority, communicators made at the start, gloo for the host's tensors",
        because="a collective's few blocks start ahead of a product's many; a first step without set-up",
        where="parallel/cuda.py",
        torch=("torch.distributed.init_process_group",),
        setting="nproc>1",
    ),
    Capability(
        "all-gather and reduce-scatter of parameters and gradients",
        cpu="FSDP2 over gloo, next block gathered ahead",
        gpu="FSDP2 over NCCL on its own streams, next block gathered ahead",
        because="overlaps with the neighbouring blocks' computation; one block ahead is a block's time to hide in",
        where="parallel/overlap.py",
        torch=(
            "torch.distributed.fsdp.fully_shard",
            "torch.distributed.fsdp.FSDPModule.set_modules_to_forward_prefetch",
            "torch.distributed.fsdp.FSDPModule.set_modules_to_backward_prefetch",
        ),
        setting="dp>1 or cp>1",
    ),
    Capability(
        "tensor-parallel communication",
        cpu="functional collectives of DTensor over gloo",
        gpu="the same over NCCL",
        because="the compiler sees them and may move or fuse them",
        where="parallel/tensor.py",
        torch=("torch.distributed.tensor.distribute_tensor",),
        setting="tp>1",
    ),
    Capability(
        "asynchronous tensor parallelism",
        cpu="none: refused",
        gpu="gathers and reduce-scatters split with their products, through symmetric memory",
        because="the only way to hide what tp sends within a block; needs compiled blocks and NVLink",
        where="parallel/cuda.py",
        torch=(
            "torch._inductor.config._micro_pipeline_tp",
            "torch.distributed._symmetric_memory.enable_symm_mem_for_group",
        ),
        setting="async_tp=true",
    ),
    Capability(
        "pipeline send and receive",
        cpu="torch.distributed.pipelining over gloo",
        gpu="the same over NCCL",
        because="four schedules with one interface; shapes are known from the plan, so none are sent",
        where="parallel/pipeline.py",
        torch=("torch.distributed.pipelining.PipelineStage",),
        setting="pp>1",
    ),
    Capability(
        "activation recomputation",
        cpu="torch's checkpoint of a block, whole or all but its products and attention",
        gpu="the same",
        because="keeps what is dear to compute; composes with FSDP, schedules and graphs",
        where="parallel/recompute.py",
        torch=("torch.utils.checkpoint.create_selective_checkpoint_contexts",),
        setting="recompute=full or selective",
    ),
    Capability(
        "whole step as one launch",
        cpu="none: refused",
        gpu="one CUDA graph of forward, backward, clipping and optimizer, collectives inside; not with pp",
        because="no launch costs time once recorded; what decides is the smallest kernels' number",
        where="train/step.py",
        torch=("torch.cuda.CUDAGraph", "torch.cuda.graph", "torch.cuda.Stream"),
        setting="graph=true",
    ),
    Capability(
        "checkpoint transfer",
        cpu="a copy of the state, written by a thread",
        gpu="a copy to the host, written by a thread",
        because="training waits for the copy alone",
        where="train/checkpoint.py",
        torch=("torch.distributed.checkpoint",),
    ),
    Capability(
        "device memory of a step",
        cpu="glibc keeps blocks up to 1 GiB",
        gpu="torch's caching allocator",
        because="steps are alike: what one frees the next one takes, without the kernel's help",
        where="train/process.py",
    ),
)


def as_text(device: str, width: int = 100) -> str:
    """The table for people; `device` is "cpu" or "cuda", whose ways are marked with *."""
    tried = any(c.run_on_gpu for c in CAPABILITIES)
    untried = "" if tried else " No GPU way has been run on a GPU yet."
    lines = [f"This machine computes on {device}: its ways are marked *.{untried}"]
    for c in CAPABILITIES:
        marks = {"cpu": "*" if device == "cpu" else " ", "gpu": "*" if device == "cuda" else " "}
        lines += ["", c.name + (f"  [{c.setting}]" if c.setting else "")]
        run = "" if c.run_on_gpu else " (not yet run on a GPU)"
        for head, text in ((f"{marks['cpu']} CPU", c.cpu), (f"{marks['gpu']} GPU", c.gpu + run), ("  why", c.because)):
            lines.append(textwrap.fill(text, width, initial_indent=f"{head:7}", subsequent_indent=" " * 7))
    return "\n".join(lines)


def as_json(device: str) -> str:
    """The table for programs, with the way that `device` takes."""
    rows = [dataclasses.asdict(c) | {"here": c.gpu if device == "cuda" else c.cpu} for c in CAPABILITIES]
    return json.dumps({"device": device, "capabilities": rows}, indent=2)
