"""Each GPU way against its CPU way, on one CUDA device. None of this has been run on one yet."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from engines import one_rank
from timetrial.config import Lora, Optim
from timetrial.models.llama.config import LlamaConfig
from timetrial.optim import adamw
from timetrial.optim.schedule import learning_rate
from timetrial.parallel.context import KERNELS
from timetrial.parallel.cuda import attention
from timetrial.parallel.engine import Batch, NoTimer, OneRank
from timetrial.parallel.graph import CudaGraph
from timetrial.train.step import GraphedStep, Outcome, Step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODEL = LlamaConfig(vocab_size=256, dim=128, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=256)
OPTIM = Optim(base_lr=1e-3, warmup_steps=3, decay_steps=20)


def make_engine(device: str, precision: str, adapters: Lora | None = None) -> OneRank:
    return one_rank(MODEL, 0.05, precision, adapters, device)


def batches(step: int) -> list[Batch]:
    g = torch.Generator().manual_seed(step)
    start = torch.randint(0, 256, (4, 1), generator=g)
    tokens = (start + 7 * torch.arange(65)) % 256  # something to learn
    tokens[torch.rand(tokens.shape, generator=g) < 0.2] = 3
    return [{"tokens": tokens[i : i + 2, :-1].contiguous(), "labels": tokens[i : i + 2, 1:].clone()} for i in (0, 2)]


def run(step: Step, steps: int) -> list[Outcome]:
    outcomes = []
    for number in range(steps):
        torch.manual_seed(100 + number)
        outcomes.append(step(batches(number), learning_rate(OPTIM, number), NoTimer()))
    return outcomes


def eager(device: str, precision: str, adapters: Lora | None = None) -> Step:
    engine = make_engine(device, precision, adapters)
    return Step(engine, adamw.build(engine.parameters_named(), OPTIM, fused=True), 1.0)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_the_loss_curve_is_that_of_the_cpu(precision: str, tolerance: float) -> None:
    here, there = run(eager("cuda", precision), 20), run(eager("cpu", precision), 20)
    assert there[-1].loss < there[0].loss - 0.2
    assert max(abs(a.loss - b.loss) for a, b in zip(here, there, strict=True)) < tolerance


def test_the_fused_optimizer_is_that_of_the_cpu() -> None:
    """Ten updates from the same gradients, the rate as a tensor on the device."""
    weights = {}
    for device in ("cpu", "cuda"):
        g = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(300, 70, generator=g).to(device))
        optimizer = adamw.build([("w", p)], OPTIM, fused=True, capturable=device == "cuda")
        rate = torch.zeros((), device=device)
        adamw.set_learning_rate(optimizer, rate)
        for number in range(10):
            rate.fill_(learning_rate(OPTIM, number))
            p.grad = torch.randn(300, 70, generator=g).to(device)
            optimizer.step()
        weights[device] = p.detach().cpu()
        assert float(optimizer.state[p]["step"]) == 10
    assert (weights["cpu"] - weights["cuda"]).abs().max().item() < 1e-6


class Eager:
    """In the place of a graph: runs the same work as it is."""

    def warm_up(self, work) -> None:
        work()

    def record(self, work) -> None:
        self.work = work

    def replay(self) -> None:
        self.work()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [None, 0.2])
def test_a_graph_repeats_the_eager_steps(
    precision: str, dropout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit with deterministic kernels: dropout, rate, clipping and step counts included."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    adapters = Lora(rank=4, dropout=dropout) if dropout is not None else None
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for recorder in (Eager(), CudaGraph(torch.device("cuda"))):
            engine = make_engine("cuda", precision, adapters)
            optimizer = adamw.build(engine.parameters_named(), OPTIM, fused=True, capturable=True)
            step = GraphedStep(engine, optimizer, 1.0, recorder)
            outcomes = run(step, 10)
            weights = {name: p.detach().clone() for name, p in engine.parameters_named()}
            counts = {float(state["step"]) for state in optimizer.state.values()}
            step.close()
            found.append((outcomes, weights, counts))
    finally:
        torch.use_deterministic_algorithms(False)
    (eager_outcomes, eager_weights, _), (outcomes, weights, counts) = found
    assert all(math.isfinite(o.loss) for o in outcomes)
    assert outcomes == eager_outcomes
    assert counts == {10.0}
    for name, value in eager_weights.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("causal", [True, False])
def test_the_ring_kernel_is_that_of_the_cpu(causal: bool) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 128, 64, generator=g) for _ in range(4))
    out, lse = KERNELS["cpu"].forward(q, k, v, causal)
    grads = KERNELS["cpu"].backward(grad, q, k, v, out, lse, causal)
    q, k, v, grad = (x.to("cuda", torch.bfloat16) for x in (q, k, v, grad))
    out_gpu, lse_gpu = KERNELS["cuda"].forward(q, k, v, causal)
    grads_gpu = KERNELS["cuda"].backward(grad, q, k, v, out_gpu, lse_gpu, causal)
    assert (lse_gpu.cpu() - lse).abs().max().item() < 2e-2
    for ours, wanted in zip((out_gpu, *grads_gpu), (out, *grads), strict=True):
        assert (ours.float().cpu() - wanted).norm().item() < 2e-2 * wanted.norm().item()


def test_attention_takes_a_fused_kernel_in_bf16() -> None:
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    with attention(q.device), torch.profiler.profile() as profile:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    names = {event.key for event in profile.key_averages()}
    fused = {"aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention"}
    assert names & fused, sorted(names)


def test_a_replay_launches_one_graph() -> None:
    engine = make_engine("cuda", "bf16")
    optimizer = adamw.build(engine.parameters_named(), OPTIM, fused=True, capturable=True)
    step = GraphedStep(engine, optimizer, 1.0, CudaGraph(engine.device))
    run(step, 5)
    with torch.profiler.profile() as profile:
        step(batches(6), 1e-3, NoTimer())
    launches = {event.key: event.count for event in profile.key_averages()}
    step.close()
    assert launches.get("cudaGraphLaunch") == 1
    assert launches.get("cudaLaunchKernel", 0) < 20
