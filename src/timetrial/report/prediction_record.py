"""`Answered`: all that is said about one prediction, and the figures that follow from it.

The page, the terminal's text, the JSON and the trace show the same record and count nothing of their own.
Torch-free, and free of jinja2 and matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from timetrial.predict import placement
from timetrial.predict.constants import Constants
from timetrial.predict.converge import TimeToTrain
from timetrial.predict.energy import Energy
from timetrial.predict.memory import Memory
from timetrial.predict.placement import Placement
from timetrial.predict.predict import Prediction
from timetrial.predict.sure import Interval as StepRange
from timetrial.report.text import several

PARTS: dict[str, str] = {
    "matmul": "matrix products",
    "attention": "attention",
    "other": "other kernels",
    "cast": "casts and amax",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "ep": "expert parallel, exposed",
    "pp": "pipeline messages, exposed",
    "bubble": "pipeline bubble",
    "launch": "launches and gaps",
    "optimizer": "optimizer",
    "dp": "data parallel, exposed",
    "skew": "waiting for the slowest rank",
    "fixed": "rest of the step",
}
"""Part of `Step.parts` -> words, in the order in which they are shown."""

PEAKS = {"fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}
"""Precision of linear layers -> the data sheet's format, where it has another name."""
WIDER = ("fp4", "fp8", "bf16", "fp32")
"""What a format is held against where the accelerator's data sheet has no peak of it."""

GROUPS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline",
    "edge": "neighbours on the pipeline",
    "dp": "data parallel",
    "dp-cp": "gradients (data and context parallel)",
    "ep": "expert parallel",
}
"""Group of `placement.lie` -> words."""


class Scaled(NamedTuple):
    """One point of the scaling curve."""

    gpus: int
    step_s: float
    """Seconds."""
    tokens_per_s_per_gpu: float


class PublishedRun(NamedTuple):
    """One published run of the same workload."""

    label: str
    """Round and submitter, for people."""
    gpus: int
    step_s: float
    """Seconds."""
    mapping: str = ""
    """The plan, its global batch last, as in "tp4 dp2 mbs1 gbs8"."""
    alike: bool = True
    """Whether precision and global batch are those of the prediction, so that it may be read beside the curve."""


@dataclass(frozen=True)
class Answered:
    """All that is said about one prediction."""

    prediction: Prediction
    interval: StepRange
    """Within what the step time lies: `answer.interval_of`."""
    fits: bool
    """Whether the run is possible in the accelerators' memory."""
    reason: str
    """Why, or why not, for people: `Verdict.text`, or why memory is not known."""
    memory: Memory | None = None
    """None where it was not asked for."""
    time: TimeToTrain | None = None
    """None where the workload has no target, or no convergence points."""
    energy: Energy | None = None
    """None without a time to train or any known power."""
    notes: tuple[str, ...] = ()
    """What is assumed, and what lies outside of what was validated, for people."""
    scaling: tuple[Scaled, ...] = ()
    """By accelerators, the predicted plan among them; empty where it was not asked for."""
    published: tuple[PublishedRun, ...] = ()
    constants: Constants | None = None
    """With which the step was priced; None: those of the package."""

    @property
    def device(self) -> str:
        """What an accelerator is called, for people: GPU, or core of a machine that was calibrated."""
        return "core" if self.prediction.system.accelerator.vendor == "cpu" else "GPU"

    @property
    def title(self) -> str:
        """What is predicted, on what."""
        q = self.prediction.request
        return f"{q.model} on {q.plan.world_size:,} \u00d7 {self.prediction.system.accelerator.name}"

    @property
    def peak(self) -> tuple[str, float]:
        """(format, dense FLOP/s of one accelerator) that MFU is held against: the linear layers' own format."""
        peaks, wanted = self.prediction.system.accelerator.peak_flops, self.prediction.request.precision
        fmt = PEAKS.get(wanted, wanted)
        wider = WIDER[WIDER.index(fmt) :] if fmt in WIDER else ("bf16", "fp32")
        found = next(f for f in (fmt, *wider) if f in peaks)
        return found, peaks[found]

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the dense peak of `peak`."""
        return self.prediction.flops_per_s_per_gpu / self.peak[1]

    @property
    def breakdown(self) -> dict[str, float]:
        """Part -> seconds, of the busiest pipeline rank, in the order of PARTS; they add up to the step."""
        parts = self.prediction.step.parts
        return {k: parts[k] for k in (*(k for k in PARTS if k in parts), *(k for k in parts if k not in PARTS))}

    @property
    def groups(self) -> dict[str, Placement]:
        """Groups of more than one rank -> how the worst placed of them lies."""
        plan = self.prediction.request.plan
        sizes = {"edge": plan.pp, "dp-cp": plan.dp * plan.cp if plan.dp > 1 and plan.cp > 1 else 1}
        return {
            group: placement.lie(plan, self.prediction.system, group)
            for group in GROUPS
            if sizes.get(group, getattr(plan, group, 1)) > 1
        }


def shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Part -> share of the whole, rounded to a thousandth so that they add up to exactly 1 (largest remainders)."""
    whole = sum(parts.values())
    if whole <= 0:
        return dict.fromkeys(parts, 0.0)
    exact = {name: 1000 * value / whole for name, value in parts.items()}
    rounded = {name: int(value // 1) for name, value in exact.items()}
    missing = 1000 - sum(rounded.values())
    for name in sorted(exact, key=lambda n: rounded[n] - exact[n])[:missing]:
        rounded[name] += 1
    return {name: value / 1000 for name, value in rounded.items()}


def words_of(part: str) -> str:
    """A part of the breakdown in words."""
    return PARTS.get(part, part)


def plan_words(answered: Answered) -> str:
    """The plan on one line: degrees above one, order, batches."""
    plan = answered.prediction.request.plan
    degrees = {"TP": plan.tp, "CP": plan.cp, "EP": plan.ep, "PP": plan.pp, "VP": plan.vp, "DP": plan.dp}
    found = " ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) or "one accelerator"
    more = ""
    if plan.schedule != "1f1b":
        more += f", schedule {plan.schedule}"
    if plan.recompute != "none":
        more += f", {plan.recompute} recomputation"
    return (
        f"{found} ({plan.order}), micro batch {plan.mbs}, global batch {plan.gbs:,}, "
        f"{several(plan.grad_accumulation_steps, 'micro batch', 'es')} a step{more}"
    )


def precision_words(answered: Answered) -> str:
    """In what the linear layers and attention compute."""
    q = answered.prediction.request
    return q.recipe if q.attention == q.precision else f"{q.recipe}, attention in {q.attention}"
