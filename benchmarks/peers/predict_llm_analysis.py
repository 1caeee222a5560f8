"""Contestant: llm-analysis as a library, in its own environment (fire is the one package that it needs to import).

It has no word for context or virtual pipelines, for eight-bit floating point, or for accelerators after H100. What
stands in for them here favours it: context-parallel ranks count as tensor-parallel ones, for both share a sample;
eight-bit integers are fp8; accelerators that it does not ship are made from Timetrial's figures. Its warnings are
switched off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from llm_analysis import config as configs
from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.logger import logger

from peers.predict_turn import Answer, run, timed, tries

SHIPPED = {"h100-sxm": "h100-sxm-80gb"}
"""Timetrial's name of a system -> this one's."""
BITS = {16: "w16a16e16", 8: "w8a8e16"}
RECOMPUTE = {
    "none": ActivationRecomputation.NONE,
    "selective": ActivationRecomputation.SELECTIVE,
    "full": ActivationRecomputation.FULL,
}


def model(shape: dict[str, int]) -> configs.ModelConfig:
    """`expansion_ratio` by hand, for without it no model is let in whose ffn is not a multiple of its width."""
    return configs.ModelConfig(
        name="asked",
        num_layers=shape["layers"],
        n_head=shape["heads"],
        hidden_dim=shape["dim"],
        vocab_size=shape["vocab"],
        max_seq_len=shape["seq_len"],
        num_key_value_heads=shape["kv_heads"],
        ffn_embed_dim=shape["ffn"],
        expansion_ratio=shape["ffn"] / shape["dim"],
    )


def gpu(system: dict[str, Any]) -> configs.GPUConfig:
    if system["name"] in SHIPPED:
        return configs.get_gpu_config_by_name(SHIPPED[system["name"]])
    return configs.GPUConfig(
        name=system["name"],
        mem_per_GPU_in_GB=system["memory_gib"],
        hbm_bandwidth_in_GB_per_sec=system["memory_gb_per_s"],
        intra_node_bandwidth_in_GB_per_sec=system["scale_up_gb_per_s"],
        intra_node_min_message_latency=8e-6,
        peak_fp16_TFLOPS=system["bf16_tflops"],
        peak_i8_TFLOPS=system["fp8_tflops"],
        inter_node_bandwidth_in_GB_per_sec=system["scale_out_gb_per_s"],
    )


def priced(question: Answer, plan: dict[str, Any], efficiency: float | None = None) -> dict[str, Any]:
    """Its whole summary of one plan."""
    parallel = configs.ParallelismConfig(tp_size=plan["tp"] * plan["cp"], pp_size=plan["pp"], dp_size=plan["dp"])
    analysis = LLMAnalysis(
        _model(tuple(question["model"].items())),
        _gpu(tuple(question["system"].items())),
        configs.get_dtype_config_by_name(BITS[question["bits"]]),
        parallel,
        flops_efficiency=efficiency,
    )
    return analysis.training(
        batch_size_per_gpu=plan["mbs"],
        global_batch_size=question["gbs"],
        seq_len=question["model"]["seq_len"],
        activation_recomputation=RECOMPUTE[plan["recompute"]],
        ds_zero=DSZeRO.STAGE_3 if plan["zero"] == 3 else DSZeRO.STAGE_1,
        mlp_gated_linear_units=True,
    )


@cache
def _model(shape: tuple[tuple[str, int], ...]) -> configs.ModelConfig:
    return model(dict(shape))


@cache
def _gpu(system: tuple[tuple[str, Any], ...]) -> configs.GPUConfig:
    return gpu(dict(system))


def speed(question: Answer) -> Answer:
    """Every plan, `repeats` times over."""
    room: list[float] = []

    def price() -> Iterator[float | None]:
        for _ in range(question["repeats"]):
            for plan in question["plans"]:
                try:
                    summary = priced(question, plan)
                except (AssertionError, ValueError):
                    yield None
                else:
                    room.append(summary["memory_left_per_gpu"])
                    yield summary["latency_per_iter"]

    answer = timed(price)
    return answer | {"fits": sum(left >= 0 for left in room) // question["repeats"]}


def rows(question: Answer) -> Answer:
    """Step times of published runs at an efficiency of one, which is its default; others are these over theirs."""
    summaries = [priced(row, row["plan"]) for row in question["rows"]]
    return {"seconds": [summary["latency_per_iter"] for summary in summaries]}


def cannot(question: Answer) -> Answer:
    """What it says to what it cannot express, and what it does silently."""
    shape, plan = question["model"], question["plan"]
    base = {"num_layers": 126, "n_head": 128, "hidden_dim": 16_384, "vocab_size": 128_256}
    parallel = configs.ParallelismConfig

    def step(asked: Answer, **changed: int) -> str:
        return f"{priced(asked, plan | changed)['latency_per_iter']:.3f} s"

    def left(**changed: int) -> str:
        return f"{priced(question, plan | changed)['memory_left_per_gpu'] / 2**30:.0f} GiB left"

    narrow = question | {"model": shape | {"ffn": shape["ffn"] // 2}}
    return {
        "said": tries(
            {
                "Llama 3.1 405B by its own dimensions": lambda: configs.ModelConfig(
                    name="405b", max_seq_len=8192, num_key_value_heads=8, ffn_embed_dim=53_248, **base
                ),
                "context parallelism": lambda: parallel(tp_size=8, pp_size=8, dp_size=4, cp_size=2),
                "a virtual pipeline": lambda: parallel(tp_size=8, pp_size=8, dp_size=8, vp_size=8),
                "order of the axes": lambda: parallel(tp_size=8, pp_size=8, dp_size=8, order="tp-cp-pp-dp"),
                "fp8": lambda: configs.get_dtype_config_by_name("fp8"),
                "GB200": lambda: configs.get_gpu_config_by_name("gb200"),
                "adapters (LoRA)": lambda: LLMAnalysis(model(shape), gpu(question["system"])).training(lora_rank=16),
                "step of the published mapping, cp as tp": lambda: step(question),
                "step with 128 stages of 126 layers, no tp": lambda: step(question, tp=1, cp=1, pp=128),
                "step with half of the feed-forward width": lambda: step(narrow),
                "parameters of Llama 3.1 405B": lambda: (
                    f"{priced(question, plan)['num_params_total'] / 1e9:.0f} billion"
                ),
                "memory of the mapping that ran, cp as tp": left,
                "memory of the mapping that ran, cp as dp": lambda: left(cp=1, dp=plan["dp"] * plan["cp"]),
            }
        )
    }


if __name__ == "__main__":
    logger.setLevel(logging.ERROR)
    run({"speed": speed, "rows": rows, "cannot": cannot})
