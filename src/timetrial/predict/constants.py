"""The fitted constants: few, each with a meaning and a range, none of one run.

| constant            | of          | meaning                                                                       |
| ------------------- | ----------- | ----------------------------------------------------------------------------- |
| speed               | generation  | rate of products and attention in training, as a share of single kernels'      |
| flops_per_joule     | generation  | what an accelerator without rates of its own sustains for its design power,     |
|                     |             | bf16 FLOP/s per watt; rates measured on a chip have its power limit in them     |
| kernels             | stack       | rate of its kernels as a share of the newest                                  |
| ripeness            | both        | how far a stack's kernels for a generation had come, as a share of `kernels`    |
| fp4_kernels         | stack       | rate of its products in four bits, which came later                           |
| launch_s            | stack       | host time of one kernel where no graph removes it, s                           |
| step_s              | stack       | of a step, outside the model, s                                               |
| skew                | all         | what each doubling of the accelerators that keep step costs, as a share of it   |
| mx_kernels          | all         | rate of products in MXFP8 as a share of the curve that they borrow            |
| tp_overlap ...      | all         | what hides communication, and what hidden communication costs                 |

They are written by `timetrial validate --fit` into `constants.json`, with the rows they were fitted to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from timetrial.errors import UserError


@dataclass(frozen=True)
class Kind:
    """One kind of constant."""

    low: float
    high: float
    start: float
    """Before any fit; what is taken where nothing is fitted."""
    spread: float
    """How far from the start it is expected, as a share of it (the prior of the fit)."""
    of: str
    """generation, stack, both ("stack on generation") or all."""


KINDS: dict[str, Kind] = {
    "speed": Kind(0.5, 1.1, 0.85, 0.06, "generation"),
    "flops_per_joule": Kind(0.3e12, 3e12, 1.2e12, 0.4, "generation"),
    "kernels": Kind(0.7, 1.1, 0.97, 0.05, "stack"),
    "ripeness": Kind(0.8, 1.2, 1.0, 0.05, "both"),
    "fp4_kernels": Kind(0.6, 1.3, 1.0, 0.08, "stack"),
    "launch_s": Kind(5e-6, 250e-6, 85e-6, 0.25, "stack"),
    "step_s": Kind(0.0, 0.1, 0.015, 0.3, "stack"),
    "tp_overlap": Kind(0.0, 1.0, 0.5, 0.2, "all"),
    "cp_overlap": Kind(0.0, 1.0, 0.9, 0.1, "all"),
    "dp_overlap": Kind(0.0, 1.0, 0.9, 0.1, "all"),
    "contention": Kind(0.0, 0.3, 0.2, 0.15, "all"),
    "network": Kind(0.4, 1.2, 1.0, 0.1, "all"),
    "memory": Kind(0.5, 1.1, 0.9, 0.1, "all"),
    "skew": Kind(0.0, 0.03, 0.004, 0.5, "all"),
    "mx_kernels": Kind(0.8, 1.2, 1.0, 0.08, "all"),
    "fp8_attention": Kind(0.8, 1.8, 1.2, 0.1, "all"),
}


def on(stack: str, generation: str) -> str:
    """What a constant of both is called by."""
    return f"{stack} on {generation}"


@dataclass(frozen=True)
class Constants:
    """Values by name: "speed.hopper", "kernels.ngc25.04", "contention"."""

    values: Mapping[str, float]
    basis: str = ""
    """What they were fitted to, for people."""

    def get(self, kind: str, of: str = "") -> float:
        """A constant; the kind's start where it is not fitted."""
        return self.values.get(f"{kind}.{of}" if of else kind, KINDS[kind].start)

    def fitted(self, kind: str, of: str = "") -> bool:
        """Whether it was fitted rather than assumed."""
        return (f"{kind}.{of}" if of else kind) in self.values


@lru_cache(maxsize=8)
def load(path: str | None = None) -> Constants:
    """The package's constants, or those of a file that `validate --fit` wrote. Raises UserError on another file."""
    source = Path(path) if path else resources.files("timetrial.predict") / "data" / "constants.json"
    try:
        content = json.loads(source.read_text(encoding="utf-8"))
        values = {str(name): float(value) for name, value in content["values"].items()}
        basis = str(content["basis"])
    except FileNotFoundError:
        if path:
            raise UserError(f"no file of constants {path}; write one with `timetrial validate --fit {path}`") from None
        return Constants({}, "nothing: no constants are fitted yet")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: not a file of constants ({error}); write one with `timetrial validate --fit`"
        ) from None
    for name, value in values.items():
        kind = KINDS.get(name.partition(".")[0])
        if kind is None or not kind.low <= value <= kind.high:
            raise UserError(f"{path}: constant {name}={value} is unknown or out of range")
    return Constants(values, basis)
