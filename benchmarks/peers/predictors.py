"""The predictors that are compared, what they are asked, and how one of them is asked once."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import environment
from timetrial.errors import UserError
from timetrial.parallel.plan import validate
from timetrial.predict import predict, refit, sure
from timetrial.predict import space as spaces
from timetrial.predict import validate as published_runs
from timetrial.predict.request import Request
from timetrial.predict.space import Space, question
from timetrial.systems.system import System

Answer = dict[str, Any]

ROW = {
    "benchmark": "llama31_405b",
    "accelerator": "H100",
    "accelerators": "512",
    "gbs": "1152",
    "precision": "fp8",
    "round": "v5.0",
}
"""The question of speed: every plan of this. Its published run has tp8 cp2 pp8 vp8 and took 55.1 s a step."""
PUBLISHED = {"tp": 8, "pp": 8, "cp": 2, "dp": 4, "vp": 8, "mbs": 1, "recompute": "none", "zero": 1}
EIGHT_BIT = ("fp8", "fp8_block", "mxfp8")


@dataclass(frozen=True)
class Predictor:
    """One that is compared."""

    name: str
    module: str
    """Of this package, run as a turn."""
    packages: tuple[str, ...] = ()
    """Of its own environment, installed without what they ask for. Empty: it runs where this does."""
    sources: tuple[str, ...] = ()
    """Packages of which the source is used, not built."""

    def python(self, directory: Path) -> Path:
        """Its interpreter."""
        if not self.packages:
            return Path(sys.executable)
        return environment.small(directory / self.name, self.packages, self.sources)


TIMETRIAL = Predictor("timetrial", "peers.predict_timetrial")
LLM_ANALYSIS = Predictor(
    "llm-analysis",
    "peers.predict_llm_analysis",
    ("llm-analysis==0.2.2", "fire==0.5.0", "six==1.17.0", "termcolor==3.1.0"),
)
GALVATRON = Predictor("hetu-galvatron", "peers.predict_galvatron", ("numpy==2.4.6",), ("hetu-galvatron==2.4.0",))
ABSENT = (
    (
        "Calculon",
        "on PyPI, calculon 1.1.1 is another program (a producer-consumer pattern); the predictor is not there",
    ),
    ("SimuMax", "pip install simumax: no matching distribution found (from versions: none)"),
    ("ASTRA-sim", "pip install astra-sim: no matching distribution found (from versions: none)"),
    ("fm-training-estimator 0.1.3", "on PyPI, but its times are learned from the user's own runs and it ships none"),
    ("genz-llm 0.0.16, aiconfigurator-core, vidur", "on PyPI, but predict serving alone"),
    ("fitcheck-llm 0.3.1", "on PyPI, but predicts memory alone"),
)
"""Predictors that cannot take part, and why, as found on 30 November 2026."""
QUOTED = {"Calculon": (31.0, "+15.9 % (BF16) and -3.3 % (FP8)"), "SimuMax 1.2": (5.6, "+103 % (BF16); fails on FP8")}
"""Measured earlier from their repositories, on two shared cores and not in this run: configurations a CPU second,
and 405B on 512 H100, mapped by hand to what they can express."""


def ask(predictor: Predictor, python: Path, asked: Answer, cache: Path) -> Answer:
    """One turn in a process of its own. Raises RuntimeError, with the end of its errors, when it fails."""
    one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    place = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *_own_path(predictor)])}
    words = [str(python), "-m", predictor.module]
    began = time.perf_counter()
    done = subprocess.run(
        words,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=os.environ | one_thread | place | {"XDG_CACHE_HOME": str(cache)},
    )
    if done.returncode:
        raise RuntimeError(f"{predictor.name} ended:\n" + "\n".join(done.stderr.splitlines()[-12:]))
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    return answer | {"process_s": time.perf_counter() - began}


def _own_path(predictor: Predictor) -> list[str]:
    """Where Timetrial lies when it is not installed; peers do not get it."""
    return (
        [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path] if not predictor.packages else []
    )


def plans(base: Request, space: Space) -> list[Answer]:
    """The valid plans of a space, in the words of peers, each in its first order."""
    system = predict.system_of(base)
    found = []
    for task in spaces.tasks(base, space, system):
        for plan in spaces.plans(base, space, task):
            try:
                validate(plan, base.config, base.accelerators)
            except UserError:
                continue
            names = ("tp", "cp", "pp", "vp", "ep", "dp", "mbs", "gbs", "recompute", "zero", "order", "precision")
            found.append({name: getattr(plan, name) for name in names} | {"orders": len(spaces.orders(plan, space))})
    return found


def peers_plans(base: Request) -> list[Answer]:
    """Those that peers have words for: no context parallelism, no virtual pipeline, one order."""
    return plans(base, Space(cp=(1,), vp=(1,), orders=Space().orders[:1]))


def asked_of(base: Request, system: System) -> Answer:
    """Model, machine and batch for peers."""
    model, chip = base.config.model, system.accelerator
    peak = chip.peak_flops
    return {
        "model": {
            "layers": model.n_layers,
            "heads": model.n_heads,
            "kv_heads": model.n_kv_heads,
            "dim": model.dim,
            "ffn": model.ffn_dim,
            "vocab": model.vocab_size,
            "seq_len": base.seq_len,
        },
        "system": {
            "name": system.name,
            "memory_gib": chip.memory_bytes / 2**30,
            "memory_gb_per_s": chip.memory_bytes_per_s / 1e9,
            "scale_up_gb_per_s": system.scale_up.bytes_per_s / 1e9,
            "scale_out_gb_per_s": system.scale_out.bytes_per_s / 1e9,
            "bf16_tflops": peak["bf16"] / 1e12,
            "fp8_tflops": peak.get("fp8", peak["bf16"]) / 1e12,
        },
        "bits": 8 if base.precision in EIGHT_BIT else 16,
        "gbs": base.plan.gbs,
    }


def speed_question() -> tuple[Request, Answer, list[Answer]]:
    """(request, what peers are asked of it, the plans that they can express)."""
    base = question(ROW)
    return base, asked_of(base, predict.system_of(base)), peers_plans(base)


@dataclass(frozen=True)
class Run:
    """A published run that a peer can be asked for."""

    label: str
    system: str
    model: str
    precision: str
    bits: int
    accelerators: int
    seconds: float
    """Published step time."""
    cells: Answer
    """Its row, for Timetrial."""
    asked: Answer
    """For peers."""
    without: float | None
    """Step time by constants fitted without its system, s."""

    @property
    def expressible(self) -> bool:
        """Whether a peer has words for all of it: neither context nor virtual pipelines, 16 bits, a GPU it ships."""
        plan = self.asked["plan"]
        return plan["cp"] == 1 and plan["vp"] == 1 and self.bits == 16 and self.system == "h100-sxm"


def runs() -> tuple[list[Run], list[str]]:
    """Pretraining runs of the package's table in 16 and 8 bits, and why its other rows are left out."""
    known = {(v.model, v.system, v.precision, v.mapping, f"{v.published_s:.4g}"): v for v in sure.validated()}
    found, left = [], []
    with refit.bundled().open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for cells in rows:
        try:
            one = published_runs.published(cells)
        except UserError as error:
            left.append(" ".join(str(error).split()))
            continue
        q, plan = one.request, one.request.plan
        if q.config.lora is not None:
            left.append("adapters (LoRA), which no peer has a word for")
        elif q.precision not in (*EIGHT_BIT, "bf16"):
            left.append("four bits, which no peer has a word for in training")
        else:
            record = refit.record(one, one.seconds, one.seconds)
            key = (q.model, one.system.name, q.precision, record.mapping, f"{one.seconds:.4g}")
            told = known.get(key)
            words = {name: getattr(plan, name) for name in ("tp", "pp", "cp", "dp", "vp", "mbs", "recompute", "zero")}
            asked = asked_of(q, one.system)
            found.append(
                Run(
                    f"{q.model} on {q.accelerators:,} {one.system.name}, {q.precision}, {record.mapping}",
                    one.system.name,
                    q.model,
                    q.precision,
                    asked["bits"],
                    q.accelerators,
                    one.seconds,
                    dict(cells),
                    asked | {"plan": words},
                    one.seconds * (1 + told.error) if told else None,
                )
            )
    return found, left
