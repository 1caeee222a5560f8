"""What became of the time of a run: `run_time` measures one log, `explain` says it in sentences."""

from __future__ import annotations

import re

from timetrial.results.intervals import parts
from timetrial.results.margin import convergence_sentence, quality_sentence
from timetrial.results.model_flops import ModelFlops, Peak, model_flops, peak, peaks
from timetrial.results.records import Convergence, Energy, Run, RunLog, RunTime
from timetrial.results.steps import FIRST, count_of, step_times

FORMAT_KEY = "lowest_numerical_precision_in_linear"
"""Format of linear layers, in logs of v6.1 and later."""
LOW = ("nvfp4", "mxfp4", "fp4", "mxfp6", "fp6", "mxfp8", "fp8")
"""Formats below bf16, the lowest first: the higher peak makes the smaller MFU."""
NAMING = ("config_filename", "submission_platform")
"""Keys of logs whose text may name the format."""
BROKEN = frozenset({"block_start", "block_stop", "epoch_start", "epoch_stop", "eval_start", "eval_stop"})
"""Events without which the parts of the time cannot be told."""
MEANINGLESS = "where its time went cannot be told, and figures taken from it mean nothing"
ONE_RUN_MS = 60_000
"""Milliseconds within which all ranks of one run log its start, and its end; farther apart they are of several runs."""


def run_time(
    log: RunLog, benchmark: str, accelerators: int | None, accelerator: str, software_notes: str = ""
) -> RunTime:
    """Where the time of one run went.

    `accelerators` is how many the run used and `accelerator` their name in the system description. The parts
    `train_s`, `eval_s` and `gap_s` add up to run_stop - run_start; those that a log does not tell are None. Of a log
    with lines of several runs only `total_s` is told, and `doubt` says why. `software_notes` (`sw_notes` of the
    description) are a hint at the format of linear layers, where the log does not say it.
    """
    split = parts(log.events)
    doubt = _several(log)
    if doubt:
        return _untold(_seconds(split.total_ms), doubt)
    whole = BROKEN.isdisjoint(log.thinned)
    gbs = count_of(log.last("global_batch_size"))
    steps = step_times(log, benchmark, split, gbs)
    rate = gbs / steps.median_s if gbs and steps.median_s else None
    flops = model_flops(benchmark)
    length = count_of(log.last("max_sequence_length"))
    fits = flops.tflop is not None and length in (None, flops.seq_len)
    tflops = rate * flops.tflop / accelerators if rate and flops.tflop and accelerators and fits else None
    format_ = log.last(FORMAT_KEY)
    mfu, basis = (None, "")
    if tflops is not None:
        named = str(format_.value) if format_ and format_.value else ""
        hint = ("", "") if named else format_hint(log, software_notes)
        mfu, basis = _mfu(tflops, flops, accelerator, named, hint)
    return RunTime(
        init_s=_seconds(split.init_ms),
        train_s=_seconds(split.train_ms) if whole else None,
        eval_s=_seconds(split.eval_ms) if whole else None,
        gap_s=_seconds(split.gap_ms) if whole else None,
        steps=steps.count,
        step_s=steps.median_s,
        step_p10_s=steps.p10_s,
        step_p90_s=steps.p90_s,
        step_source=steps.source,
        slow_first_s=steps.slow_first_s,
        samples_per_s=rate,
        tflops_per_accelerator=tflops,
        mfu=mfu,
        mfu_basis=basis,
        stragglers=steps.stragglers,
        total_s=_seconds(split.total_ms),
        eval_off_clock_s=_seconds(split.eval_off_ms) if whole and split.eval_off_ms else None,
        overlap_s=_seconds(split.overlap_ms) if whole and split.overlap_ms else None,
        stragglers_count=steps.stragglers_count,
        flops_basis=_flops_basis(flops) if fits else _no_flops(flops, length),
    )


def _several(log: RunLog) -> str:
    """What shows that a log has lines of several runs; empty where nothing does."""
    for key in ("run_start", "run_stop"):
        times = [event.time_ms for event in log.all(key)]
        if len(times) > 1 and max(times) - min(times) > ONE_RUN_MS:
            apart = duration((max(times) - min(times)) / 1e3)
            return f"The log has lines of several runs ({len(times)} times {key}, {apart} apart): {MEANINGLESS}."
    return ""


def _untold(total_s: float | None, doubt: str) -> RunTime:
    return RunTime(
        init_s=None,
        train_s=None,
        eval_s=None,
        gap_s=None,
        steps=None,
        step_s=None,
        step_p10_s=None,
        step_p90_s=None,
        step_source="none: the log has lines of several runs",
        slow_first_s=None,
        samples_per_s=None,
        tflops_per_accelerator=None,
        mfu=None,
        mfu_basis="",
        total_s=total_s,
        doubt=doubt,
    )


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _flops_basis(flops: ModelFlops) -> str:
    assert flops.tflop is not None
    mask = {True: "causal attention halved", False: "attention in full, not halved for the causal mask"}
    said = mask[flops.causal] if flops.causal is not None else "source does not say whether causal attention is halved"
    other = ""
    if flops.counted and abs(flops.counted / flops.tflop - 1) > 0.01:
        other = f"; {flops.counted:,.0f} by our count with causal attention halved"
    return f"{figure(flops.tflop, 6)} TFLOP a sample, {said}{other}, recomputation not counted ({flops.source})"


def _no_flops(flops: ModelFlops, length: int | None) -> str:
    if flops.tflop is None:
        return f"no model FLOPs: {flops.source}"
    return f"no model FLOPs: they are known for {flops.seq_len} tokens a sample, the log has {length}"


def format_hint(log: RunLog, software_notes: str) -> tuple[str, str]:
    """(lowest format below bf16 that is spoken of, where) in the notes or the names that a log gives itself; two empty
    texts where none is."""
    said = [("the system's sw_notes", software_notes)]
    said += [(f"the log's {key}", str(event.value)) for key in NAMING for event in [log.last(key)] if event]
    for format_ in LOW:
        for where, text in said:
            if re.search(rf"(?<![a-z0-9]){format_}(?![0-9])", text, re.IGNORECASE):
                return format_, f'{where} ("{text[:60]}")'
    return "", ""


def _mfu(
    tflops: float, flops: ModelFlops, accelerator: str, format_: str, hint: tuple[str, str] = ("", "")
) -> tuple[float | None, str]:
    """(share of the peak, what was divided by what); (None, why there is none)."""
    hinted = peak(accelerator, hint[0]) if hint[0] else None
    if hinted is not None:
        words = f"dense {hinted.format} peak, {figure(hinted.tflops, 6)} TFLOP/s ({hinted.source})"
        words += f"; {hint[0]} by {hint[1]}: a hint, the log does not name its format"
        return tflops / hinted.tflops, f"{words}; {_flops_basis(flops)}"
    dense = peak(accelerator, format_ or "bf16")
    if dense is None:
        figures, source = peaks(accelerator)
        why = f"no peak for {format_} with a source" if figures else source
        return None, f"no MFU: {why}"
    return tflops / dense.tflops, f"{_peak_words(dense, format_)}; {_flops_basis(flops)}"


def _peak_words(dense: Peak, format_: str) -> str:
    words = f"dense {dense.format} peak, {figure(dense.tflops, 6)} TFLOP/s ({dense.source})"
    if format_:
        return f"{words}, by the log's {FORMAT_KEY} {format_}"
    return f"{words}; the log does not name its format, and one below bf16 can pass 100 %"


def explain(
    run: Run | RunTime,
    convergence: Convergence | None = None,
    interval: float | None = None,
    energy: Energy | None = None,
    benchmark: str = "",
    round_: str = "",
) -> list[str]:
    """Sentences for a performance engineer: parts of the time, steps, rate, FLOPs, convergence, energy.

    `interval` is the distance of evaluations in the unit of `convergence` (`margin.eval_interval`), used where the
    logs did not tell it. `benchmark` and `round_` (`v5.0`) give the target that the last evaluation of a Run is set
    against. What is not known has no sentence, except step times and FLOPs, whose absence is explained.
    """
    time = run.time if isinstance(run, Run) else run
    lines = [] if time is None else [time.doubt] if time.doubt else [*_where(time), *_steps(time), *_rate(time)]
    if convergence is not None:
        lines.append(convergence_sentence(convergence, interval))
    quality = quality_sentence(benchmark, round_, run.quality) if isinstance(run, Run) else None
    if quality is not None:
        lines.append(quality)
    if energy is not None:
        kwh, kw = energy.joules / 3.6e6, energy.average_w / 1e3
        over = f"{energy.runs} {'run' if energy.runs == 1 else 'runs'}"
        lines.append(f"Energy {figure(kwh)} kWh, {figure(kw)} kW on average over {over}.")
    return lines


def _where(time: RunTime) -> list[str]:
    total, lines = time.total_s, []
    if total:
        named = (("training", time.train_s), ("evaluation", time.eval_s), ("neither", time.gap_s))
        shares = [f"{100 * part / total:.1f} % {name}" for name, part in named if part is not None]
        lines.append(f"{duration(total)} on the clock" + (f": {', '.join(shares)}." if shares else "."))
    if time.overlap_s:
        lines.append(f"{duration(time.overlap_s)} of the evaluation ran beside training that had begun again.")
    if time.eval_off_clock_s:
        lines.append(f"{duration(time.eval_off_clock_s)} of evaluation off the clock.")
    if time.init_s is not None:
        lines.append(f"Initialisation before the clock: {duration(time.init_s)}.")
    return lines


def _steps(time: RunTime) -> list[str]:
    if time.step_s is None:
        return [f"Step time {time.step_source}."]
    number = f"{time.steps:,} steps of " if time.steps else "Step "
    spread = ""
    if time.step_p10_s is not None and time.step_p90_s is not None:
        wide = 100 * (time.step_p90_s - time.step_p10_s) / time.step_s
        spread = f", 80 % of them within {duration(time.step_p10_s)} to {duration(time.step_p90_s)} ({wide:.1f} % wide)"
    lines = [f"{number}{duration(time.step_s)} ({time.step_kind}{spread}; {time.step_source})."]
    if time.slow_first_s is not None and time.slow_first_s > 0.5 * time.step_s:
        first = f"The first {FIRST} steps" if time.step_p10_s is not None else "The first block"
        lines.append(f"{first} took {duration(time.slow_first_s)} longer than at the usual pace.")
    if time.stragglers:
        step, seconds = max(time.stragglers, key=lambda pair: pair[1])
        count = time.stragglers_count
        lost = sum(seconds - time.step_s for _, seconds in time.stragglers)
        lines.append(
            f"{count} {'step' if count == 1 else 'steps'} over twice the median: {duration(lost)} lost; "
            f"the slowest was step {step:,} with {duration(seconds)}."
        )
    return lines


def _rate(time: RunTime) -> list[str]:
    lines = []
    if time.samples_per_s is not None:
        lines.append(f"{figure(time.samples_per_s, 5)} samples/s while training.")
    counted = time.flops_basis
    if time.tflops_per_accelerator is None:
        return [*lines, f"{counted[0].upper()}{counted[1:]}."] if counted else lines
    text = f"{time.tflops_per_accelerator:,.0f} model TFLOP/s per accelerator"
    if time.mfu is None:
        lines.append(f"{text}; {time.mfu_basis}.")
    else:
        peak_ = time.mfu_basis.removesuffix(f"; {counted}")
        lines += [f"{text}, MFU {100 * time.mfu:.1f} %.", f"MFU is of the {peak_}."]
    return [*lines, f"Model FLOPs: {counted}."] if counted else lines


def figure(value: float, digits: int = 4) -> str:
    """A number of so many significant digits, thousands separated, large ones in full: 16,709,000."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:,.{digits}g}"


def duration(seconds: float) -> str:
    """A time in the unit that reads best."""
    if seconds < 1:
        return f"{seconds * 1e3:.4g} ms"
    if seconds < 120:
        return f"{seconds:.4g} s"
    return f"{seconds / 60:.4g} min" if seconds < 7200 else f"{seconds / 3600:.4g} h"
