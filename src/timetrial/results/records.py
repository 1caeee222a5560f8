"""What a result is: runs, findings and the result of one benchmark on one system.

A *run* is one result log. A *result* is what the runs of one benchmark directory make together:
one score. Events are kept for one run at a time; everything that later stages need of a run stands
in `Run`, so that a whole round's repository needs no more memory than its table.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["fail", "warn", "note"]
"""fail: the result does not stand; warn: a reviewer would ask; note: worth knowing."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One `:::MLLOG` line."""

    time_ms: int
    """Unix time, milliseconds."""
    kind: Literal["point", "start", "end"]
    """POINT_IN_TIME, INTERVAL_START or INTERVAL_END."""
    key: str
    value: Any
    metadata: dict[str, Any]
    line: int
    """Line number in the file, from 1."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check found."""

    level: Level
    rule: str
    """Short name of the rule, e.g. `llama31_8b.opt_adamw_epsilon` or `reader.truncated`."""
    found: str
    """What stands in the log, tree or description."""
    asked: str
    """What the rule asks."""
    source: str
    """Where the rule stands: file and line of rules text, configuration or checker."""
    change: str
    """What to change."""
    path: Path | None = None
    line: int | None = None


@dataclass(frozen=True)
class RunLog:
    """One log as read: its events in file order and what was odd about the file."""

    path: Path
    events: tuple[LogEvent, ...]
    findings: tuple[Finding, ...] = ()
    """The reader's: foreign lines, truncated tail, clock running backwards, encodings, ..."""
    lines: int = 0
    bytes: int = 0
    thinned: dict[str, int] = field(default_factory=dict)
    """Key -> events not kept because the log has so many; empty for most logs."""
    step_times: array[float] = field(default_factory=lambda: array("d"))
    """`train_step_time` of the tracked_stats events that were not kept, seconds, in file order."""

    def all(self, key: str) -> list[LogEvent]:
        """Every event of this key, in file order."""
        return [event for event in self.events if event.key == key]

    def first(self, key: str) -> LogEvent | None:
        return next((event for event in self.events if event.key == key), None)

    def last(self, key: str) -> LogEvent | None:
        return next((event for event in reversed(self.events) if event.key == key), None)


@dataclass(frozen=True)
class Run:
    """What one run came to; by the official summarizer's arithmetic."""

    path: Path
    converged: bool
    """run_stop says success (and the log is whole)."""
    status: str
    """success, aborted, or why there is none: `no run_stop`, `no run_start`, `no status`, `clock ran backwards`,
    `log is broken` (some line is no event), `unreadable`."""
    time_min: float | None
    """run_stop - run_start, minutes; None where either is missing."""
    samples: float | None
    """What the reference-convergence test compares: the benchmark's unit at convergence."""
    quality: float | None
    """The last evaluation."""
    gbs: int | None
    seed: int | None
    dropped: Literal["", "fastest", "slowest"] = ""
    """Left out of the olympic mean as which."""
    findings: tuple[Finding, ...] = ()
    time: RunTime | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    """Single-valued hyperparameter and submission keys of the log; the last value where there are several."""
    benchmark: str = ""
    """`submission_benchmark` of the log."""
    start_ms: int | None = None
    """run_start, Unix time in milliseconds."""
    stop_ms: int | None = None
    """run_stop, Unix time in milliseconds."""
    eval_every: float | None = None
    """Between two evaluations, in the unit of `samples`; the median."""
    broken: bool = False
    """The official reader would refuse the log: some line of it is no event."""
    seeds: tuple[tuple[str, str, int], ...] = ()
    """(source file, line in it, seed) of each `seed` event, in file order."""
    seeds_odd: str = ""
    """Why the official seed checker can make nothing of one of them; empty where it can."""


@dataclass(frozen=True)
class RunTime:
    """Where the time of one run went; seconds unless said."""

    init_s: float | None
    """init_start to run_start."""
    train_s: float | None
    """Training blocks."""
    eval_s: float | None
    gap_s: float | None
    """Between run_start and run_stop, in neither block nor evaluation."""
    steps: int | None
    step_s: float | None
    """Median step; the mean where blocks are all that is timed (`step_kind`)."""
    step_p10_s: float | None
    step_p90_s: float | None
    step_source: str
    """Where step times are from: logged steps, blocks, logged throughput, or why there are none."""
    slow_first_s: float | None
    """What the first steps took beyond the median."""
    samples_per_s: float | None
    """Training samples a second while training."""
    tflops_per_accelerator: float | None
    """Model TFLOP/s; recomputation never counted."""
    mfu: float | None
    mfu_basis: str
    """Peak and count of FLOPs used, in words; empty where no MFU is given."""
    stragglers: tuple[tuple[int, float], ...] = ()
    """(step, from 1; seconds) of steps that took more than twice the median after the first ones; the 100 slowest."""
    total_s: float | None = None
    """run_start to run_stop; train_s, eval_s and gap_s add up to it."""
    eval_off_clock_s: float | None = None
    """Evaluation before run_start or after run_stop, where there was some."""
    overlap_s: float | None = None
    """Part of eval_s during which training had begun again, where there was some."""
    stragglers_count: int = 0
    """All steps over twice the median after the first ones."""
    flops_basis: str = ""
    """How FLOPs of a sample were counted, and whether causal attention is halved; else why there are none."""
    doubt: str = ""
    """Why parts, steps and rates of this log cannot be told, in one sentence; empty where they can."""

    @property
    def step_kind(self) -> str:
        """median or mean: what `step_s` is."""
        return "mean" if self.step_source.startswith("training time over steps") else "median"


@dataclass(frozen=True)
class Convergence:
    """The reference-convergence test of one result (mlperf-logging rcp_checker)."""

    passed: bool | None
    """None where the round has no reference for the benchmark."""
    samples_mean: float | None
    """Olympic mean of the runs' samples to converge."""
    reference_mean: float | None
    reference_stdev: float | None
    reference_min: float | None
    """The fastest mean that passes the t-test."""
    reference: str
    """Which points were used: one, or two and between which batch sizes, pruned or full."""
    scaling_factor: float
    """What the time is multiplied by: 1 or more."""
    scaling_source: str
    """`scaling.json` or `computed`."""
    unit: str
    """samples, epochs or epoch_fraction."""
    evals_to_fastest: float | None = None
    """Evaluations by which the mean lies after (+) or before (-) the fastest that passes."""
    why: str = ""
    """One sentence."""


@dataclass(frozen=True)
class Energy:
    """Energy of the runs by the power rules, where power logs lie beside."""

    joules: float
    average_w: float
    runs: int
    source: str


@dataclass(frozen=True)
class Figures:
    """What is known of a result beyond its score: means over the runs that its score is made of."""

    samples: float | None = None
    """Samples to converge, in `unit`; None where unknown, as below."""
    unit: str = ""
    """samples, epochs, epoch_fraction or tokens."""
    steps: float | None = None
    """Optimizer steps to converge."""
    scale: float | None = None
    """Scaling factor in the score: 1 or more."""
    step_s: float | None = None
    """Median step, seconds."""
    samples_per_s: float | None = None
    """Training samples (sequences, images) a second, all accelerators together."""
    rate_source: str = ""
    """Where the rate comes from, in words."""
    eval_s: float | None = None
    """Evaluation, seconds a run."""
    init_s: float | None = None
    """Before the clock starts, seconds a run."""
    runs: int | None = None
    """Runs submitted, those that did not converge among them."""
    not_converged: int | None = None
    """Runs that missed the target."""
    run_min: float | None = None
    """Fastest run, minutes, unscaled."""
    run_max: float | None = None
    """Slowest run, minutes, unscaled."""
    precision: str = ""
    """Format of linear layers, e.g. fp8 or nvfp4+fp8attn; empty where unknown."""
    plan: str = ""
    """Parallel degrees, e.g. `tp8 cp2 pp8 vp8 dp4 mbs1`; empty where unknown."""
    tflops_per_accelerator: float | None = None
    """Model TFLOP/s; recomputation never counted."""
    basis: str = ""
    """Where the score comes from, in words."""


@dataclass(frozen=True)
class Result:
    """One benchmark on one system in one round."""

    path: Path
    round: str
    """v5.0; empty where unknown."""
    organization: str
    system: str
    """Name of the system's directory and description."""
    benchmark: str
    division: str
    accelerator: str
    accelerators: int | None
    nodes: int | None
    gbs: int | None
    score_min: float | None
    """Minutes, olympic mean times scaling factor; None where there is none."""
    unscaled_min: float | None
    runs: tuple[Run, ...]
    convergence: Convergence | None
    verdict: Literal["stands", "fails", "unread", "mini"]
    findings: tuple[Finding, ...]
    official: tuple[str, ...] = ()
    """First how many logs the official compliance checker passes, by our count; then what it says, word for word."""
    energy: Energy | None = None
    unverified: bool = True
    """False for rows of the bundled table of published results."""
    figures: Figures | None = None
    """Of a published row, which has no runs; None for results that were read from logs."""
    source: str = ""
    """Where a published row stands; empty for results that were read from logs."""
    system_name: str = ""
    """Title of the system by its description; empty where unknown."""
