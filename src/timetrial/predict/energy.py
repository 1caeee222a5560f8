"""Energy to train, from the average power of accelerators with their share of the nodes.

Measured where a system's file has it; else from the accelerator's design power, by the share that measured runs
drew of it. What there is to measure against, rounds v4.0 and v5.0 (mlcommons/training_results_v4.0 Sustainable
Metal Cloud, _v5.0 Lenovo), power per accelerator with its share of the node over its design power:

| accelerators | language models                            | others    |
| ------------ | ------------------------------------------- | --------- |
| H100, 700 W  | gpt3 on 512: 1.39; LoRA on 64: 1.40, on 512: 1.06 | 1.19-1.27 |
| B200, 1000 W | LoRA on 8: 1.12                             | 1.12-1.18 |

As the rules measure it (training_policies power_measurement.adoc): all nodes, interconnect as measured or
estimated, no storage and no cooling; over the run's clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from timetrial.errors import UserError
from timetrial.predict.converge import TimeToTrain
from timetrial.systems.system import System

SHARE = 1.25
"""Power of an accelerator with its share of the node over its design power where not measured (assumed): the
mean of the four measured runs of language models."""
SHARE_RANGE = (1.05, 1.40)
"""Of those runs, at the AC or the DC side."""
MEASURED_RANGE = (0.76, 1.06)
"""Power of other measured runs on the same system over that of the run that its file has."""


@dataclass(frozen=True)
class Energy:
    """Of a run from the start of its clock to the target."""

    joules: float
    """Expected."""
    low: float
    """Of a fast run at low power, joules."""
    high: float
    """Of a slow run at high power, joules."""
    average_w: float
    """Of one accelerator with its share of the node, watts."""
    measured: bool
    """Whether the power was measured on such a system; else it is assumed from the design power."""
    basis: str
    """Where the power comes from, for people."""

    @property
    def kwh(self) -> float:
        """Kilowatt hours."""
        return self.joules / 3.6e6


def energy(system: System, accelerators: int, time: TimeToTrain) -> Energy:
    """Energy of training for `time` on so many `accelerators` of `system`. Raises UserError without any power."""
    if accelerators < 1:
        raise UserError(f"accelerators={accelerators}: must be at least 1 to draw power")
    if system.power is not None:
        average, measured, basis = system.power.average_w, True, f"measured: {system.power.basis}"
        low, high = MEASURED_RANGE
    elif system.accelerator.tdp_w and math.isfinite(system.accelerator.tdp_w):
        average, measured = SHARE * system.accelerator.tdp_w, False
        basis = f"assumed: {SHARE:g} of the design power of {system.accelerator.tdp_w:g} W"
        low, high = (share / SHARE for share in SHARE_RANGE)
    else:
        raise UserError(f"system {system.name} has neither measured power nor a design power; add one to its file")
    watts = 60 * average * accelerators
    return Energy(
        joules=watts * time.minutes,
        low=watts * low * time.low,
        high=watts * high * time.high,
        average_w=average,
        measured=measured,
        basis=basis,
    )
