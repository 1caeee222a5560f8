"""What became of the time of a run: `run_time` measures one log, `explain` says it in sentences."""

from __future__ import annotations

from timetrial.results.intervals import parts
from timetrial.results.margin import convergence_sentence, quality_sentence
from timetrial.results.model_flops import ModelFlops, Peak, model_flops, peak, peaks
from timetrial.results.records import Convergence, Energy, Run, RunLog, RunTime
from timetrial.results.steps import FIRST, count_of, step_times

FORMAT_KEY = "lowest_numerical_precision_in_linear"
"""Format of linear layers, in logs of v6.1 and later."""
BROKEN = frozenset({"block_start", "block_stop", "epoch_start", "epoch_stop", "eval_start", "eval_stop"})
"""Events without which the parts of the time cannot be told."""


def run_time(log: RunLog, benchmark: str, accelerators: int | None, accelerator: str) -> RunTime:
    """Where the time of one run went.

    `accelerators` is how many the run used and `accelerator` their name in the system description. The parts
    `train_s`, `eval_s` and `gap_s` add up to run_stop - run_start; those that a log does not tell are None.
    """
    split = parts(log.events)
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
        mfu, basis = _mfu(tflops, flops, accelerator, str(format_.value) if format_ and format_.value else "")
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


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _flops_basis(flops: ModelFlops) -> str:
    mask = {True: "causal attention halved", False: "attention in full, not halved for the causal mask"}
    said = mask[flops.causal] if flops.causal is not None else "source does not say whether causal attention is halved"
    other = ""
    if flops.counted and flops.tflop and abs(flops.counted / flops.tflop - 1) > 0.01:
        other = f"; {flops.counted:,.0f} by our count with causal attention halved"
    return f"{flops.tflop:,.6g} TFLOP a sample, {said}{other}, recomputation not counted ({flops.source})"


def _no_flops(flops: ModelFlops, length: int | None) -> str:
    if flops.tflop is None:
        return f"no model FLOPs: {flops.source}"
    return f"no model FLOPs: they are known for {flops.seq_len} tokens a sample, the log has {length}"


def _mfu(tflops: float, flops: ModelFlops, accelerator: str, format_: str) -> tuple[float | None, str]:
    """(share of the peak, what was divided by what); (None, why there is none)."""
    dense = peak(accelerator, format_ or "bf16")
    if dense is None:
        figures, source = peaks(accelerator)
        why = f"no peak for {format_} with a source" if figures else source
        return None, f"no MFU: {why}"
    return tflops / dense.tflops, f"{_peak_words(dense, format_)}; {_flops_basis(flops)}"


def _peak_words(dense: Peak, format_: str) -> str:
    words = f"dense {dense.format} peak, {dense.tflops:,.6g} TFLOP/s ({dense.source})"
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
    lines = [] if time is None else [*_where(time), *_steps(time), *_rate(time)]
    if convergence is not None:
        lines.append(convergence_sentence(convergence, interval))
    quality = quality_sentence(benchmark, round_, run.quality) if isinstance(run, Run) else None
    if quality is not None:
        lines.append(quality)
    if energy is not None:
        kwh, kw = energy.joules / 3.6e6, energy.average_w / 1e3
        lines.append(f"Energy {kwh:,.4g} kWh, {kw:,.4g} kW on average over {energy.runs} runs.")
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
    lines = [f"{number}{duration(time.step_s)} (median{spread}; {time.step_source})."]
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
        lines.append(f"{time.samples_per_s:,.5g} samples/s while training.")
    if time.tflops_per_accelerator is not None:
        text = f"{time.tflops_per_accelerator:,.0f} model TFLOP/s per accelerator"
        if time.mfu is None:
            return [*lines, f"{text}; {time.mfu_basis}; {time.flops_basis}."]
        return [*lines, f"{text}, MFU {100 * time.mfu:.1f} % of the {time.mfu_basis}."]
    return [*lines, f"{time.flops_basis[0].upper()}{time.flops_basis[1:]}."] if time.flops_basis else lines


def duration(seconds: float) -> str:
    """A time in the unit that reads best."""
    if seconds < 1:
        return f"{seconds * 1e3:.4g} ms"
    if seconds < 120:
        return f"{seconds:.4g} s"
    return f"{seconds / 60:.4g} min" if seconds < 7200 else f"{seconds / 3600:.4g} h"
