"""A prediction as a terminal shows it: some thirty lines of at most 100 columns."""

from __future__ import annotations

import textwrap

from timetrial.predict.memory import GIB
from timetrial.report import text as numbers
from timetrial.report.prediction_record import Answered, plan_words, precision_words, shares, words_of
from timetrial.report.prediction_sure import sure

WIDTH, BAR, LABEL = 100, 32, 15
MOST_NOTES = 4
"""Notes above which the rest is left to the page."""
MOST_RANKS = 16
"""Pipeline ranks whose memory is told one by one."""


def text(answered: Answered) -> str:
    """The report, lines joined by newlines, none at the end."""
    lines = [*_head(answered), "", *_figures(answered), "", *_breakdown(answered), ""]
    if answered.memory is not None:
        lines += [*_memory(answered), ""]
    lines += _sure(answered)
    return "\n".join(lines).replace(numbers.NBSP, " ")


def _head(answered: Answered) -> list[str]:
    p = answered.prediction
    about = f"{p.system.name}, stack {p.stack.name}, {precision_words(answered)}"
    return [f"Predicted: {answered.title}", f"  {about}", *_wrapped("", f"  {plan_words(answered)}", indent=2)]


def _figures(answered: Answered) -> list[str]:
    p, (fmt, _) = answered.prediction, answered.peak
    span = answered.interval
    lines = _wrapped(
        "Step time",
        f"{numbers.duration(p.step.seconds)}, {numbers.duration(span.low_s)} to {numbers.duration(span.high_s)} "
        f"({span.basis})",
    )
    lines += _wrapped(
        "Throughput",
        f"{numbers.significant(p.tokens_per_s_per_gpu, 4)} tokens/s per {answered.device}, "
        f"{numbers.significant(p.flops_per_s_per_gpu / 1e12, 4)} model TFLOP/s per {answered.device}, "
        f"MFU {numbers.percent(answered.mfu)} of dense {fmt}",
    )
    if (t := answered.time) is not None:
        lines += _wrapped(
            "Time to train",
            f"{numbers.significant(t.minutes)} min, {numbers.significant(t.low)} to {numbers.significant(t.high)} "
            f"({numbers.several(t.steps, 'step')}, {numbers.several(t.evaluations, 'evaluation')} of "
            f"{numbers.duration(t.evaluation_s)})",
        )
        lines += _wrapped(
            "Samples",
            f"{numbers.count(t.samples)} to the target, "
            f"{numbers.between(numbers.count(t.samples_low), numbers.count(t.samples_high))} ({t.basis})",
        )
    else:
        lines += _wrapped("Time to train", "none: no target, or no convergence points")
    if (e := answered.energy) is not None:
        kwh = [numbers.significant(joules / 3.6e6) for joules in (e.joules, e.low, e.high)]
        how = "measured" if e.measured else "assumed"
        lines += _wrapped(
            "Energy",
            f"{kwh[0]} kWh to train, {kwh[1]} to {kwh[2]} "
            f"({numbers.count(e.average_w)} W per {answered.device}, {how})",
        )
    return lines


def _breakdown(answered: Answered) -> list[str]:
    parts = answered.breakdown
    share = shares(parts)
    most = max(share.values()) or 1.0
    small = [part for part, seconds in parts.items() if seconds and share[part] == 0]
    small = small if len(small) > 1 else []
    lines = [f"{'Where the step goes':<{31 + BAR}}{'s':>9}{'%':>8}"]
    rows = [(words_of(part), parts[part], share[part]) for part in parts if parts[part] and part not in small]
    rows += [("parts below 0.1 %", sum(parts[part] for part in small), 0.0)] if small else []
    for words, seconds, of in rows:
        bar = "\u2588" * round(BAR * max(0.0, of) / most) or "\u258f"
        amount = f"{seconds:.3f}" if seconds >= 0.0005 else f"{seconds:.1e}"
        lines.append(f"  {words:<29}{bar:<{BAR}}{amount:>9}{100 * of:>8.1f}")
    return lines


def _memory(answered: Answered) -> list[str]:
    memory = answered.memory
    assert memory is not None
    capacity, peak = answered.prediction.system.accelerator.memory_bytes, memory.peak
    of = f"pipeline rank {memory.fullest}, the fullest of {len(memory.ranks)}; " if len(memory.ranks) > 1 else ""
    lines = _wrapped(
        "Memory",
        f"{peak.total / GIB:.1f} of {capacity / GIB:.1f} GiB ({of}{'' if answered.fits else 'NO: '}{answered.reason})",
    )
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in kinds_of(peak).items() if size >= 0.05 * GIB)
    lines += _wrapped("  by kind", f"{kinds} GiB")
    if len(memory.ranks) > 1:
        each = [f"{rank.total / GIB:.0f}" for rank in memory.ranks[:MOST_RANKS]]
        more = f" ... (of {len(memory.ranks)} ranks)" if len(memory.ranks) > MOST_RANKS else ""
        lines += _wrapped("  by rank", f"{' '.join(each)}{more} GiB")
    return lines


def kinds_of(rank: object) -> dict[str, float]:
    """Kind -> bytes of a `RankMemory`, in the order in which they are shown."""
    names = ("weights", "gradients", "optimizer", "activations", "working", "fixed", "fragmentation")
    return {name: float(getattr(rank, name)) for name in names}


def _sure(answered: Answered) -> list[str]:
    found, lines = sure(answered), []
    for label, sentences in (
        ("Measured", found.measured),
        ("Published", found.published),
        ("Assumed", found.assumed),
    ):
        if sentences:
            lines += _wrapped(label, "; ".join(sentences), most=3 if label == "Assumed" else 2)
    for i, note in enumerate(answered.notes[:MOST_NOTES]):
        lines += _wrapped("Note" if i == 0 else "", note)
    if len(answered.notes) > MOST_NOTES:
        lines += _wrapped("", f"and {len(answered.notes) - MOST_NOTES} more notes, which the page and the JSON have")
    return lines


def _wrapped(label: str, words: str, indent: int = LABEL, most: int | None = None) -> list[str]:
    """`label`, then `words` wrapped beside it; after `most` lines the rest is left to the page."""
    head = f"{label:<{indent}}" if label or indent == LABEL else ""
    return textwrap.wrap(
        words.strip(),
        WIDTH,
        initial_indent=head or " " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=most,
        placeholder=" ... (page)",
    )
