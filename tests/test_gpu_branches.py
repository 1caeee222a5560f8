"""The GPU branches as far as they can be checked without one: signatures, shapes and types on fake tensors.

Meta tensors take the branches that are not the CPU's and have a backward pass; fake tensors say "cuda" of
themselves but cannot have gradients in a CPU build of torch.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from timetrial.config import Lora, Optim, Plan
from timetrial.errors import UserError
from timetrial.models import lora
from timetrial.models.llama.config import LlamaConfig
from timetrial.models.llama.model import CausalAttention
from timetrial.optim import adamw
from timetrial.parallel import cuda, fsdp
from timetrial.parallel.context import KERNELS
from timetrial.parallel.loss import token_loss_sum
from timetrial.parallel.recompute import KEPT
from timetrial.precision import bf16

MODEL = LlamaConfig(vocab_size=64, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96)


def on(device: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """q, k, v, a gradient [B, N, T, H] with fewer keys than queries, and their log-sum-exp."""
    shapes = [(2, 4, 64, 16), (2, 4, 32, 16), (2, 4, 32, 16), (2, 4, 64, 16)]
    return [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_the_ring_kernel_calls_its_operators_as_torch_has_them(device: str, causal: bool) -> None:
    kernel = KERNELS["cuda"]
    with FakeTensorMode():
        q, k, v, grad = on(device)
        out, lse = kernel.forward(q, k, v, causal)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, device)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        grads = kernel.backward(grad, q, k, v, out, lse, causal)
        assert [(g.shape, g.dtype, g.device.type) for g in grads] == [
            (x.shape, torch.bfloat16, device) for x in (q, k, v)
        ]


@pytest.mark.parametrize(
    ("operator", "names"),
    [
        (
            torch.ops.aten._scaled_dot_product_flash_attention.default,
            ["query", "key", "value", "dropout_p", "is_causal"],
        ),
        (
            torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
            ["grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
             "dropout_p", "is_causal", "philox_seed", "philox_offset"],
        ),
    ],
)  # fmt: skip
def test_the_flash_operators_arguments_stand_where_the_kernel_puts_them(operator, names: list[str]) -> None:
    """A fake tensor does not tell a swapped argument of the same type; their names do."""
    assert [a.name for a in operator._schema.arguments][: len(names)] == names
    required = [a.name for a in operator._schema.arguments if not a.has_default_value()]
    assert set(required) <= set(names)


class Probe(nn.Module):
    """Notes what attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = CausalAttention()
        self.seen: list[torch.dtype] = []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.seen += [q.dtype, k.dtype, v.dtype]
        return self.attention(q, k, v)


@pytest.mark.parametrize("adapters", [None, Lora(rank=4, dropout=0.1)])
def test_bf16_reaches_attention_and_gradients_stay_float32(adapters: Lora | None) -> None:
    """Flash attention and cuDNN's take 16-bit inputs only: a float32 one would fall to a slower kernel unnoticed."""
    with torch.device("meta"):
        model = MODEL.create()
        if adapters is not None:
            lora.apply(model, adapters, seed=0)
    bf16.convert(model)
    probes = []
    for block in model.get_submodule("layers").children():
        block.attention.core = Probe()
        probes.append(block.attention.core)
    tokens = torch.empty(2, 32, dtype=torch.int64, device="meta")
    logits = model(tokens)
    loss = token_loss_sum(logits, tokens)
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert [probe.seen for probe in probes] == [[torch.bfloat16] * 3] * 2
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    for p in trained:
        assert (p.grad.shape, p.grad.dtype) == (p.shape, torch.float32)


def test_fsdp_gathers_in_bfloat16_on_a_gpu_and_sums_in_float32() -> None:
    policy = fsdp.mixed_precision("bf16", "cuda")
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    for precision, device in (("fp32", "cuda"), ("bf16", "cpu")):
        assert fsdp.mixed_precision(precision, device).param_dtype is None


def test_selective_recomputation_keeps_every_attention_kernel_a_gpu_may_take() -> None:
    kept = {operator.name() for operator in KEPT}
    for kernel in ("flash", "efficient", "cudnn"):
        assert f"aten::_scaled_dot_product_{kernel}_attention" in kept


def test_the_optimizer_can_be_recorded() -> None:
    """Fused with its step count on the device and the rate in a tensor, as the operator's overload takes it."""
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = adamw.build([("w", p)], Optim(base_lr=0.1), fused=True, capturable=True)
    adamw.set_learning_rate(optimizer, torch.tensor(0.1, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(group["capturable"] and group["fused"] for group in optimizer.param_groups)
    assert isinstance(optimizer.state[p]["step"], torch.Tensor)
    lr = next(a for a in torch.ops.aten._fused_adamw_.tensor_lr._schema.arguments if a.name == "lr")
    assert str(lr.type) == "Tensor"


def test_attention_kernels_are_tried_in_the_order_given_and_it_is_put_back() -> None:
    before = torch._C._get_sdp_priority_order()
    with cuda.attention(torch.device("cpu")):
        assert torch._C._get_sdp_priority_order() == before
    wanted = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with cuda.attention(torch.device("cuda")):
        assert torch._C._get_sdp_priority_order()[:4] == [int(kernel) for kernel in wanted]
    assert torch._C._get_sdp_priority_order() == before
    assert torch.backends.cuda.flash_sdp_enabled()


def test_nccl_is_asked_for_high_priority_and_a_bound_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            made.append(self)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    timeout, device = datetime.timedelta(seconds=7), torch.device("cuda", 1)
    given = cuda.group_arguments(device, timeout)
    assert given == {
        "backend": "cpu:gloo,cuda:nccl",
        "timeout": timeout,
        "device_id": device,
        "pg_options": made[0],
    }
    assert made[0].is_high_priority_stream
    assert made[0]._timeout == timeout
    assert cuda.group_arguments(torch.device("cpu"), timeout) == {"backend": "gloo", "timeout": timeout}


def test_nccl_options_are_those_of_the_installed_torch() -> None:
    """The CPU build has no NCCL; its type stubs do."""
    stub = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    nccl = stub[stub.index("class ProcessGroupNCCL") :]
    assert "def __init__(self, is_high_priority_stream: bool = False)" in nccl


def test_a_ring_in_float32_is_refused_on_a_gpu() -> None:
    plan = Plan(cp=2, precision="fp32")
    with pytest.raises(UserError, match="set precision=bf16 or cp=1"):
        cuda.check(plan, torch.device("cuda"))
    cuda.check(plan, torch.device("cpu"))
    cuda.check(Plan(cp=2, precision="bf16"), torch.device("cuda"))
