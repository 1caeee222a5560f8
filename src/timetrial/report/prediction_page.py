"""A prediction as one page: headline, breakdown, timeline, memory, scaling, mapping, and how sure it is.

As the run's report (`html.py`), the page asks nothing of the network, has no script and forbids both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timetrial
from timetrial.predict.memory import GIB, Memory
from timetrial.report import pages, text
from timetrial.report import prediction_charts as charts
from timetrial.report import prediction_timeline as timeline
from timetrial.report.prediction_mapping import mapping
from timetrial.report.prediction_record import (
    PARTS,
    Answered,
    plan_words,
    precision_words,
    shares,
    words_of,
)
from timetrial.report.prediction_sure import sure
from timetrial.report.prediction_text import kinds_of

MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "working": "temporaries",
    "fixed": "context and libraries",
    "fragmentation": "fragmentation",
}
"""Kind of memory -> words."""


@dataclass(frozen=True)
class Chart:
    """One chart with its sentence, as the template shows it."""

    wide: str
    narrow: str
    words: str
    heading: str = ""
    id: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    """(colour, words)."""


def write_page(answered: Answered, path: str | Path) -> Path:
    """Write the page to `path`, beside it and renamed, and return it. Raises UserError when it cannot be written."""
    return pages.write(page(answered), Path(path))


def page(answered: Answered) -> str:
    """The page as HTML text."""
    environment = pages.environment()
    environment.filters.update(count=text.count, duration=text.duration, percent=text.percent, size=text.size)
    environment.filters["batch"] = lambda plan: _batch(plan)[1]
    environment.filters["degrees"] = lambda plan: _batch(plan)[0]
    environment.filters["rate"] = lambda value: text.significant(value, 4)
    found = sure(answered)
    return environment.get_template("prediction.html.j2").render(
        style=pages.style("report.css", "prediction.css"),
        title=answered.title,
        device=answered.device,
        devices="cores" if answered.device == "core" else "accelerators",
        facts=_facts(answered),
        verdict=_verdict(answered),
        headline=_headline(answered),
        parts=_parts(answered),
        breakdown_words=_breakdown_words(answered),
        step_s=answered.prediction.step.seconds,
        timelines=_timelines(answered),
        memory=_memory(answered),
        reason=answered.reason,
        scaling=_scaling(answered),
        scaled=sorted(answered.scaling),
        ideal=charts.same_batch(answered) and len(answered.scaling) > 1,
        published=sorted(answered.published, key=lambda d: (not d.alike, d.gpus, d.label)),
        mapping=mapping(answered),
        samples=_samples(answered),
        low_s=answered.interval.low_s,
        high_s=answered.interval.high_s,
        basis=answered.interval.basis.rstrip("."),
        outside=answered.interval.outside,
        notes=answered.notes,
        sure=[("Measured", found.measured), ("Published", found.published), ("Assumed", found.assumed)],
        sources=found.sources,
        version=timetrial.__version__,
    )


def _facts(answered: Answered) -> list[str]:
    p = answered.prediction
    facts = [p.system.title, f"stack {p.stack.name}", precision_words(answered)]
    if p.request.round:
        facts.append(f"round {p.request.round}")
    return [*facts, plan_words(answered)]


def _verdict(answered: Answered) -> dict[str, str]:
    step = text.duration(answered.prediction.step.seconds)
    low, high = text.duration(answered.interval.low_s), text.duration(answered.interval.high_s)
    if not answered.fits:
        return {"kind": "bad", "mark": "\u2717", "words": "Does not fit", "detail": answered.reason}
    if answered.reason not in ("", "fits"):
        return {"kind": "open", "mark": "!", "words": f"{step} a step", "detail": f"{low} to {high}; {answered.reason}"}
    return {"kind": "good", "mark": "\u25b8", "words": f"{step} a step", "detail": f"{low} to {high}"}


def _headline(answered: Answered) -> list[dict[str, str]]:
    p, (fmt, peak), span = answered.prediction, answered.peak, answered.interval
    device, low_s, high_s = answered.device, text.duration(span.low_s), text.duration(span.high_s)
    figures = [
        (
            "Step time",
            text.duration(p.step.seconds),
            text.between(low_s, high_s),
        ),
        (
            f"Tokens/s per {device}",
            text.significant(p.tokens_per_s_per_gpu, 4),
            f"{text.compact(_tokens_per_s(answered))} in all",
        ),
        (f"Model TFLOP/s per {device}", text.significant(p.flops_per_s_per_gpu / 1e12, 4), "without recomputation"),
        ("MFU", text.percent(answered.mfu), f"of dense {fmt}, {text.count(peak / 1e12)} TFLOP/s"),
    ]
    if (t := answered.time) is not None:
        minutes = text.between(text.significant(t.low), f"{text.significant(t.high)} min")
        figures.append(
            (
                "Time to train",
                f"{text.significant(t.minutes)}{text.NBSP}min",
                f"{minutes}; {text.several(t.steps, 'step')}, {text.several(t.evaluations, 'evaluation')} of "
                f"{text.duration(t.evaluation_s)}",
            )
        )
    else:
        figures.append(("Time to train", text.NONE, "no target, or no convergence points"))
    if (e := answered.energy) is not None:
        how = "measured" if e.measured else "assumed"
        figures.append(
            (
                "Energy to train",
                f"{text.significant(e.kwh)}{text.NBSP}kWh",
                f"{text.count(e.average_w)} W per {device}, {how}",
            )
        )
    else:
        figures.append(("Energy to train", text.NONE, "no time to train, or no power"))
    capacity = p.system.accelerator.memory_bytes
    if answered.memory is not None:
        figures.append(
            (f"Memory of the fullest {device}", text.size(answered.memory.peak.total), f"of {text.size(capacity)}")
        )
    else:
        figures.append((f"Memory of the fullest {device}", text.NONE, f"of {text.size(capacity)}"))
    exposed = sum(answered.breakdown.get(axis, 0.0) for axis in ("tp", "cp", "ep", "pp", "dp"))
    waits = answered.breakdown.get("bubble", 0.0)
    figures.append(
        (
            "Exposed communication",
            text.percent(exposed / p.step.seconds),
            f"and {text.percent(waits / p.step.seconds)} bubble" if p.request.plan.pp > 1 else "no pipeline, no bubble",
        )
    )
    return [{"label": label, "value": value, "detail": detail} for label, value, detail in figures]


def _batch(plan: str) -> tuple[str, str]:
    """(degrees and micro batch, global batch) of "tp4 dp2 mbs1 gbs8"."""
    degrees, _, batch = plan.rpartition(" ")
    return degrees or text.NONE, f"{int(batch[3:]):,}" if batch.startswith("gbs") else text.NONE


def _tokens_per_s(answered: Answered) -> float:
    return answered.prediction.tokens_per_s_per_gpu * answered.prediction.request.plan.world_size


def _samples(answered: Answered) -> str:
    """What a run needs to the target, in a sentence; "" where that is not known."""
    if (t := answered.time) is None:
        return ""
    span = text.between(text.count(t.samples_low), text.count(t.samples_high))
    return f"The target takes {text.count(t.samples)} samples, {span} by run: {t.basis}."


def _parts(answered: Answered) -> list[dict[str, Any]]:
    parts = {part: seconds for part, seconds in answered.breakdown.items() if seconds}
    share = shares(parts)
    return [
        {
            "words": words_of(part),
            "seconds": seconds,
            "share": share[part],
            "color": f"part-{part if part in PARTS else 'fixed'}",
        }
        for part, seconds in parts.items()
    ]


def _breakdown_words(answered: Answered) -> str:
    if answered.prediction.request.plan.pp > 1:
        return (
            "Of the pipeline rank with most work. Communication is what computing does not hide, and what hidden "
            "communication slows computing by."
        )
    return "Communication is what computing does not hide, and what hidden communication slows computing by."


def _timelines(answered: Answered) -> list[Chart]:
    laid = timeline.lay(answered)
    plan = answered.prediction.request.plan
    keys = [("forward", "forward"), ("backward", "backward")]
    if any(i.kind == "W" for i in laid.intervals):
        keys.append(("weights", "weights' gradients"))
    keys.append(("wait", "waiting"))
    streams = {i.stream for i in laid.intervals}
    if "send" in streams:
        keys.append(("part-pp", "pipeline messages"))
    if "data" in streams or any(t.part == "dp" for t in laid.tails):
        keys.append(("part-dp", "data parallel"))
    ends = [(f"part-{t.part}", words_of(t.part)) for t in laid.tails if t.part != "dp"]
    exact = charts.readable(laid, True)
    one_each = (
        "each rectangle is one pass of one micro batch"
        if exact
        else "height is the share of the time, of neighbouring passes together"
    )
    of = ""
    if laid.ranks > charts.MOST_RANKS:
        of = f" {charts.MOST_RANKS} of {laid.ranks} ranks are shown."
    whole = (
        f"{text.several(answered.prediction.step.micro_batches, 'micro batch', 'es')} through "
        f"{text.several(len(answered.prediction.step.stages), 'stage')} on "
        f"{text.several(laid.ranks, 'pipeline rank')}; "
        f"{one_each}. "
        f"Communication stands below computing.{of}"
    )
    found = [
        Chart(
            charts.step(laid, True, whole), charts.step(laid, False, whole), whole,
            "The whole step", "timeline", tuple(keys + ends),
        )
    ]  # fmt: skip
    if plan.pp > 1 and not exact:
        words = f"The first {text.duration(charts.start_s(laid))}; numbers, where they have room, are micro batches."
        found.append(
            Chart(
                charts.start(laid, True, words), charts.start(laid, False, words), words,
                "How it starts", "start", tuple(keys),
            )
        )  # fmt: skip
    if "block" in answered.prediction.layers:
        kernels = timeline.faster(answered, "block", timeline.pricing(answered)).kernels
        words = (
            f"One block, one micro batch: {len(kernels)} kernels and collectives, computing above and communication "
            "below. What of a collective no computing hides is a gap above it."
        )
        present = {k.part for k in kernels}
        legend = tuple((f"part-{part}", words_of(part).removesuffix(", exposed")) for part in PARTS if part in present)
        found.append(
            Chart(
                charts.layer(answered, True, words), charts.layer(answered, False, words), words,
                "One block", "block", legend,
            )
        )  # fmt: skip
    return found


def _memory(answered: Answered) -> dict[str, Any] | None:
    if (memory := answered.memory) is None:
        return None
    capacity = answered.prediction.system.accelerator.memory_bytes
    most = max(capacity, memory.peak.total)
    ranks = []
    for index in charts.drawn(len(memory.ranks)):
        rank, stages = memory.ranks[index], timeline.stages_of_rank(answered, index)
        kinds = kinds_of(rank)
        told = ", ".join(f"{MEMORY[kind]} {text.size(size)}" for kind, size in kinds.items() if size)
        ranks.append(
            {
                "label": f"rank {index}" if len(memory.ranks) > 1 else f"every {answered.device}",
                "words": f"pipeline rank {index}, {len(stages)} stages: {told}",
                "share": rank.total / most,
                "parts": [(f"mem-{kind}", size / rank.total) for kind, size in kinds.items() if size],
                "total": rank.total,
                "over": rank.used > capacity,
            }
        )
    return {
        "ranks": ranks,
        "limit": capacity / most,
        "capacity": capacity,
        "kinds": [
            (f"mem-{kind}", MEMORY[kind], size) for kind, size in kinds_of(memory.peak).items() if size >= GIB / 20
        ],
        "words": _memory_words(answered, memory),
    }


def _memory_words(answered: Answered, memory: Memory) -> str:
    words = f"{answered.reason[:1].upper()}{answered.reason[1:].rstrip('.')}."
    return f"{words} Amounts below are of the fullest, rank {memory.fullest}." if len(memory.ranks) > 1 else words


def _scaling(answered: Answered) -> Chart | None:
    if not answered.scaling and not answered.published:
        return None
    words = f"{answered.prediction.request.model}: predicted step time by accelerators"
    if answered.published:
        words += ", and published runs"
    return Chart(charts.scaling(answered, True, words), charts.scaling(answered, False, words), f"{words}.")
