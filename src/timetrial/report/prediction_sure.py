"""How sure a prediction is: which of its figures are measured, which published, which assumed."""

from __future__ import annotations

from dataclasses import dataclass

from timetrial.predict.constants import load as load_constants
from timetrial.report.prediction_record import Answered
from timetrial.report.text import percent
from timetrial.systems.rates import Rates


@dataclass(frozen=True)
class Sure:
    """Sentences for people, by how the figures behind a prediction are known."""

    measured: tuple[str, ...]
    published: tuple[str, ...]
    assumed: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    """(figure of the system or stack, where it comes from)."""


def sure(answered: Answered) -> Sure:
    """What the record, the system's and the stack's files say of their own figures."""
    p = answered.prediction
    rates = Rates.load(p.system)
    # a curve's 90th percentile goes with its median, and kernels that the run has not are of no interest
    used = sorted(k for k in rates.spread if not k.endswith(".p90") and _used(k, answered))
    own = [f"{_curve(k)} (typical error {percent(rates.spread[k])})" for k in used if k not in rates.assumed]
    borrowed = [_curve(k) for k in used if k in rates.assumed]
    measured, published, assumed = [], [], []
    if own:
        measured.append(f"rates of kernels on this accelerator: {', '.join(own)}")
    if p.request.assumed:
        assumed.append(f"left open by the request: {'; '.join(p.request.assumed)}")
    basis = (answered.constants or load_constants()).basis
    if "no constants are fitted" in basis:
        assumed.append("the model's constants: their starting values, for nothing is fitted yet")
    elif basis:
        measured.append(f"the model's constants, fitted to {basis}")
    if answered.energy is not None:
        (measured if answered.energy.measured else assumed).append(_after(f"power: {answered.energy.basis}"))
    given = sorted({name.partition(".")[0] for name in p.system.sources if name not in p.system.assumed})
    own_machine = p.system.accelerator.vendor == "cpu"
    if given and own_machine:
        measured.append(f"figures of this machine, by `timetrial calibrate`: {', '.join(given)}")
    elif given:
        published.append(f"figures of {p.system.name}: {', '.join(given)}")
    if p.stack.sources:
        does = ", ".join(sorted(p.stack.sources))
        (measured if own_machine else published).append(f"what the stack {p.stack.name} does: {does}")
    if answered.time is not None:
        (assumed if answered.time.outside else published).append(f"samples to train: {answered.time.basis}")
    if borrowed:
        assumed.append(f"curves of a related accelerator: {', '.join(borrowed)}")
    if p.system.assumed:
        assumed.append(f"of the system: {', '.join(sorted(p.system.assumed))}")
    if answered.memory is not None:
        assumed.append("of memory: the context's and communication library's bytes, and the allocator's loss")
    sources = [(f"system: {k}", v) for k, v in p.system.sources.items()]
    sources += [(f"stack: {k}", v) for k, v in p.stack.sources.items()]
    return Sure(tuple(measured), tuple(published), tuple(assumed), tuple(sources))


def _used(curve: str, answered: Answered) -> bool:
    """Whether the run has such kernels."""
    kind, _, rest = curve.partition(".")
    kernels = [k for layer in answered.prediction.layers.values() for k in layer.kernels]
    if kind in ("matmul", "attention"):
        # attention in eight bits is priced by the curve of bf16
        same = {"fp8": "bf16"} if kind == "attention" else {"mxfp8": "fp8_block", "mxfp4": "nvfp4"}
        formats = {f for k in kernels if k.kind == kind for f in (k.format, same.get(k.format, k.format))}
        return rest.partition(".")[0] in formats
    if kind.startswith("collective"):
        return any(k.kind == "collective" for k in kernels)
    return True


def _curve(key: str) -> str:
    words = {"matmul": "products in", "attention": "attention in", "memory": "memory", "collective": "collectives"}
    kind, _, rest = key.partition(".")
    return " ".join([words.get(kind, kind), *rest.split(".")]).strip()


def _after(text: str) -> str:
    """Without what the list already says."""
    return text.replace(": measured: ", ": ").replace(": assumed: ", ": ")
