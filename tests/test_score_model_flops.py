"""FLOPs of a sample and peaks: against our own count, and every published name of an accelerator."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from timetrial.results.model_flops import model_flops, peak, peaks
from timetrial.workloads import llama2_70b_lora, llama31_8b, llama31_405b

TABLE = Path(__file__).resolve().parents[2] / "shared/facts/published_results.csv"
UNKNOWN = {
    "AMD Radeon RX 7900 XTX",
    "NVIDIA RTX A5000",
    "NVIDIA RTX Pro 6000 SE PCIe 96GB",
    "Intel(R) Gaudi(R) 2 AI Accelerator",
}


def test_our_own_count() -> None:
    for name, module, gbs, frozen in (
        ("llama31_405b", llama31_405b, 1152, False),
        ("llama31_8b", llama31_8b, 32, False),
        ("llama2_70b_lora", llama2_70b_lora, 8, True),
    ):
        config = module.official("v5.1", gbs)
        assert model_flops(name).counted == pytest.approx(config.model.flops_per_sample(8192, frozen) / 1e12, rel=1e-6)


def test_published_figures_are_understood() -> None:
    """405B: attention in full and a vocabulary of 128,256; 8B: attention halved."""
    model = llama31_405b.official("v5.1", 1152).model
    tokens = 8192
    head = 6 * (128_256 - model.vocab_size) * model.dim * tokens
    attention = 6 * model.n_layers * model.dim * tokens**2
    whole = (model.flops_per_sample(tokens) + head + attention) / 1e12
    assert model_flops("llama31_405b").tflop == pytest.approx(whole, abs=1)  # one unit of the figure's last digit
    assert model_flops("llama31_405b").causal is False
    small = llama31_8b.official("v5.1", 32).model
    assert model_flops("llama31_8b").tflop == pytest.approx(small.flops_per_sample(tokens) / 1e12, rel=2e-4)
    assert model_flops("llama31_8b").causal is True
    assert (model_flops("llama2_70b_lora").tflop, model_flops("deepseekv3_671b").tflop) == (2598, 1068)


def test_gpt3_by_its_formula() -> None:
    layers, width, vocab, tokens = 96, 12_288, 51_200, 2048
    flop = 6 * (12 * layers * width**2 + vocab * width) * tokens + 6 * layers * width * tokens**2
    assert model_flops("gpt3").tflop == pytest.approx(flop / 1e12, rel=1e-6)


@pytest.mark.parametrize("benchmark", ["bert", "stable_diffusion", "dlrm_dcnv2", "llama31_8b_mini", ""])
def test_no_figure_says_why(benchmark: str) -> None:
    assert model_flops(benchmark).tflop is None
    assert len(model_flops(benchmark).source) > 20


@pytest.mark.skipif(not TABLE.is_file(), reason="no table")
def test_every_published_accelerator() -> None:
    with TABLE.open(newline="") as file:
        names = {row["accelerator"] for row in csv.DictReader(file)}
    assert names
    assert {name for name in names if not peaks(name)[0]} == UNKNOWN
    for name in names:
        figures, source = peaks(name)
        assert source
        assert name in UNKNOWN or figures["bf16"] > 100


def test_names_vary() -> None:
    for name in ("NVIDIA GB200", "NVIDIA Blackwell GPU (GB200)", "nvidia gb200"):
        assert peaks(name)[0]["bf16"] == 2500
    assert peaks("AMD Instinct MI325X 256GB HBM3e")[0] == peaks("AMD Instinct MI325X 256GB HBM3E DLC")[0]
    assert peaks("Abacus") == ({}, "the accelerator Abacus is unknown")


def test_formats() -> None:
    found = peak("NVIDIA GB200", "NVFP4")
    assert found is not None
    assert (found.tflops, found.format) == (10_000, "fp4")
    assert peak("NVIDIA H100-SXM5-80GB", "nvfp4") is None
    assert peak("NVIDIA H100-SXM5-80GB", "int7") is None
    half = peak("NVIDIA H100-SXM5-80GB", "FP16")
    assert half is not None
    assert half.format == "bf16"
