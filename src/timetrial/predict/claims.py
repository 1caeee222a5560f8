"""Claims of announcements beside predictions, as Markdown: `python -m timetrial.predict.claims > docs/claims.md`.

Every figure is computed when the command runs, but for published ones, which come from the package's table of
published step times or stand with their source.
"""

from __future__ import annotations

from collections.abc import Iterable

from timetrial.predict.claims_list import CLAIMS, Claim
from timetrial.predict.claims_run import GPU_TIME, THROUGHPUT, TIME, Compared
from timetrial.predict.constants import load as load_constants
from timetrial.report.prediction_record import PARTS

COMMAND = "python -m timetrial.predict.claims > docs/claims.md"
NONE = "\u2013"
TOLD = 3
"""Parts of the breakdown that a sentence names."""
LEAST = 0.001
"""Of a sample's GPU time; smaller differences are called none."""


def document(claims: Iterable[Claim]) -> str:
    """The whole document."""
    head = [
        "# Claims of announcements, predicted",
        "",
        f"Made by `{COMMAND}`; do not edit. Constants are fitted to {load_constants().basis}, with published runs "
        "below among them: a figure beside its publication is no blind test. Ranges are made of errors on systems that "
        "were left out of the fit (`timetrial validate`).",
        "",
        "A factor says how many times better the second run is. A step's range holds four of five of the nearest "
        "validated runs. A factor's range holds four of five pairs of validated runs of one model, whose systems, "
        "stacks and precisions are alike or differ as those of the two; it is that of the step, also where a time to "
        "train is told. Where two runs differ in one switch alone they share more than such pairs do, and "
        "their range is too wide.",
        "",
    ]
    return "\n".join([*head, *(line for claim in claims for line in section(claim))]).rstrip() + "\n"


def section(claim: Claim) -> list[str]:
    """One claim."""
    lines = [f"## {claim.title}", "", claim.said, ""]
    if claim.caveat:
        lines += [f"**{claim.caveat}**", ""]
    if claim.compared:
        lines += [*_runs(claim), "", *_factors(claim.compared), "", *_reasons(claim.compared), ""]
    if claim.split:
        lines += [*split(claim.split), ""]
    for note in claim.notes:
        lines += [note, ""]
    return lines


def _runs(claim: Claim) -> list[str]:
    timed = any(c.measure in (TIME, GPU_TIME) for c in claim.compared)
    head = ["run", "plan", "memory", "step, s", "range, s", "published, s", "off"]
    head += ["minutes", "published", "off"] if timed else []
    rows = []
    for r in claim.runs:
        low, high = r.interval.low_s, r.interval.high_s
        row = [r.label, r.mapping, r.verdict, _n(r.seconds), f"{_n(low)} to {_n(high)}"]
        row += [_maybe(r.published_s), _off(r.seconds, r.published_s)]
        if timed:
            minutes = r.time.minutes if r.time else None
            row += [_maybe(minutes), _maybe(r.published_min), _off(minutes, r.published_min)]
        rows.append(row)
    lines = _table(head, rows, 3)
    sources = dict.fromkeys(f"{r.label}: {r.source}" for r in claim.runs if r.source)
    return [*lines, "", f"Published: {'; '.join(sources)}."] if sources else lines


def _factors(compared: Iterable[Compared]) -> list[str]:
    rows = []
    for c in compared:
        low, high, _ = c.range
        row = [c.before.label, c.after.label, c.measure.words, f"{c.ratio:.3f}", f"{low:.2f} to {high:.2f}"]
        rows.append([*row, f"{c.published:.3f}" if c.published else NONE, _off(c.ratio, c.published)])
    return _table(["first", "second", "of", "factor", "range", "published", "off"], rows, 3)


def _reasons(compared: Iterable[Compared]) -> list[str]:
    return list(dict.fromkeys(f"- {why(c)}" for c in compared if c.measure is THROUGHPUT))


def why(c: Compared) -> str:
    """Where a difference in throughput comes from, by parts of the breakdown."""
    before, after = c.before.parts, c.after.parts
    gain = {part: before.get(part, 0.0) - after.get(part, 0.0) for part in (*before, *after)}
    whole = c.before.gpu_s - c.after.gpu_s
    pair = f"{c.before.label} \u2192 {c.after.label}"
    told = sorted((p for p in gain if abs(gain[p]) >= LEAST * c.before.gpu_s), key=lambda p: -abs(gain[p]))
    if not told:
        return f"{pair}: no part of the step changes by {100 * LEAST:g} % of it."
    named = "; ".join(f"{PARTS.get(p, p)} {-gain[p]:+.3g}" for p in told[:TOLD])
    rest = whole - sum(gain[p] for p in told[:TOLD])
    more = f"; all else {-rest:+.3g}" if abs(rest) >= LEAST * c.before.gpu_s else ""
    return f"{pair}: {_n(c.before.gpu_s)} to {_n(c.after.gpu_s)} GPU seconds a sample: {named}{more}."


def split(c: Compared) -> list[str]:
    """The GPU time to train that the second run needs more than the first, by what it goes to."""
    a, b = c.before, c.after
    if a.time is None or b.time is None:
        raise ValueError("only runs with a time to train can be split")
    more = {"samples to the target": (b.time.samples - a.time.samples) * a.gpu_s}
    for part in a.parts:
        more[PARTS.get(part, part)] = (b.parts.get(part, 0.0) - a.parts[part]) * b.time.samples
    whole = (b.time.minutes * b.gpus - a.time.minutes * a.gpus) * 60
    more["evaluations, and the start before the first step"] = whole - sum(more.values())
    total = b.time.minutes * b.gpus * 60
    shown = sorted(((k, v) for k, v in more.items() if abs(v) >= LEAST * total), key=lambda item: -item[1])
    rows = [[words, f"{v / 3600:+,.1f}", _percent(v / total)] for words, v in shown]
    rest = whole - sum(v for _, v in shown)
    rows.append(["all else", f"{rest / 3600:+,.1f}", _percent(rest / total)])
    rows.append(["**together**", f"{whole / 3600:+,.1f}", _percent(whole / total)])
    words = f"Where the efficiency goes, in GPU hours and as a share of those of {b.label}:"
    return [words, "", *_table(["part", "GPU hours", "share"], rows, 1)]


def _table(head: list[str], rows: list[list[str]], words: int) -> list[str]:
    """Columns after the first `words` are numbers."""
    marks = ["---" if i < words else "---:" for i in range(len(head))]
    return ["| " + " | ".join(cells) + " |" for cells in (head, marks, *rows)]


def _n(value: float) -> str:
    return f"{value:.4g}" if value >= 1 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _maybe(value: float | None) -> str:
    return _n(value) if value is not None else NONE


def _off(predicted: float | None, published: float | None) -> str:
    return _percent(predicted / published - 1) if predicted and published else NONE


if __name__ == "__main__":
    print(document(make() for make in CLAIMS), end="")
