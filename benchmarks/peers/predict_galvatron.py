"""Contestant: the cost models of Galvatron's search engine, from its source, without its training runtime.

They price with a profile that Galvatron measures on the cluster that is to train. There is none here, so the profile
is made up, and what comes out says how fast plans are priced and nothing about steps.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from peers.predict_turn import Answer, run, timed, tries

SOURCE = next((Path(sys.prefix) / "sources").glob("hetu_galvatron-*")) / "galvatron"


def package(name: str, path: Path) -> ModuleType:
    """A package whose __init__ is not run: it would import the training runtime, and with it torch and Megatron."""
    made = ModuleType(name)
    made.__path__ = [str(path)]
    sys.modules[name] = made
    return made


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


package("galvatron", SOURCE)
package("galvatron.core", SOURCE / "core")
package("galvatron.core.search_engine", SOURCE / "core/search_engine")
utils = package("galvatron.utils", SOURCE / "utils")
strategies = load("galvatron.utils.strategy_utils", SOURCE / "utils/strategy_utils.py")
utils.form_strategy, utils.strategy_str2list = strategies.form_strategy, strategies.strategy_str2list  # type: ignore[attr-defined]
arguments = load("galvatron.core.search_engine.cost_model_args", SOURCE / "core/search_engine/cost_model_args.py")
costs = load("galvatron.core.search_engine.cost_model", SOURCE / "core/search_engine/cost_model.py")

SIZES = [2**n for n in range(14)] + [3 * 2**n for n in range(12)]


def profile() -> tuple[Any, Any]:
    """Made up: a layer of 10 ms a sample, the same bandwidth for groups of all sizes."""
    by_size = dict.fromkeys(SIZES, 1000.0)
    state = {"model_states": by_size, "activation": by_size}
    per_mb = {f"{size}{kind}": 0.006 for size in SIZES for kind in ("", "_0", "_1")}
    return (
        arguments.ProfileModelArgs(
            tp_activation_per_bsz_dict={"checkpoint": 20.0} | by_size,
            other_memory_pp_off=state,
            other_memory_pp_on={"first_stage": state, "last_stage": state},
            forward_computation_time=10.0,
            other_time_profiled=1.0,
        ),
        arguments.ProfileHardwareArgs(
            comm_coe_dict=per_mb,
            p2p_comm_coe_dict=dict.fromkeys(SIZES, 0.007),
            allreduce_dict={size: {"popt": (0.01, 0.1)} for size in SIZES},
        ),
    )


def priced(question: Answer, plan: dict[str, Any], measured: tuple[Any, Any]) -> tuple[float, float]:
    """Seconds of a step, and MB of a layer, of one plan."""
    shape, (model_profile, hardware) = question["model"], measured
    dp, tp, pp = plan["dp"] * plan["cp"], plan["tp"], plan["pp"]
    chunks = question["gbs"] // dp // plan["mbs"]
    strategy = [pp, tp, dp, {"tp": 1, "fsdp": int(plan["zero"] == 3), "cpt": int(plan["recompute"] == "full")}]
    train = arguments.TrainArgs(mixed_precision=True)
    parallel = arguments.ParallelArgs(
        use_zero2_for_dp=True, sequence_parallel=True, pipeline_type="pipedream_flush", chunks=chunks
    )
    width = shape["dim"] * (2 * shape["dim"] + 3 * shape["ffn"])
    model = arguments.ModelArgs(width * 4 / 2**20, shape["seq_len"], shape["dim"], shape["layers"])
    memory = costs.MemoryCostModel(
        strategy, question["gbs"], plan["mbs"], tp, tp,
        model_args=model, train_args=train, parallel_args=parallel, profile_model_args=model_profile,
    ).get_memory_cost()["enc_total"]  # fmt: skip
    share, rest = divmod(shape["layers"], pp)
    seconds = costs.pipeline_costmodel(
        costs.TimeCostModel, [shape["layers"]], [model], [train], [parallel], [model_profile], [hardware],
        [strategy] * shape["layers"], [share + (stage < rest) for stage in range(pp)], chunks, question["gbs"], tp,
        [0.0] * pp,
    )  # fmt: skip
    return float(seconds), float(memory)


def speed(question: Answer) -> Answer:
    """Every plan, `repeats` times over."""
    measured = profile()

    def price() -> Iterator[float | None]:
        for _ in range(question["repeats"]):
            for plan in question["plans"]:
                yield priced(question, plan, measured)[0]

    return timed(price)


def cannot(question: Answer) -> Answer:
    """What it says without a profile, and to what a strategy has no word for."""
    made_up = profile()

    def step(profiles: tuple[Any, Any] = made_up, precision: Any = True, **words: int) -> float:
        strategy = [8, 8, 8, {"tp": 1, "fsdp": 0} | words]
        args = (arguments.ModelArgs(), arguments.TrainArgs(precision), arguments.ParallelArgs(), *profiles)
        return float(costs.TimeCostModel(strategy, 512, False, *args).gen_result())

    own = (arguments.ProfileModelArgs(), arguments.ProfileHardwareArgs())
    return {
        "said": tries(
            {
                "512 accelerators by the profile that is its default": lambda: step(own),
                "context parallelism, as a word of its strategy": lambda: (
                    f"{step(cp=2):.6g} s, {step():.6g} s without it"
                ),
                "a virtual pipeline, as a word of its strategy": lambda: (
                    f"{step(vpp=8):.6g} s, {step():.6g} s without it"
                ),
                "fp8 for its mixed_precision": lambda: f"{step(precision='fp8'):.6g} s, {step():.6g} s with True",
            }
        )
    }


if __name__ == "__main__":
    run({"speed": speed, "cannot": cannot})
