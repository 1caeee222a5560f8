"""Results side by side: how much faster, and whether by throughput, by convergence or by the batch size.

A score is (samples x time per sample + evaluations + gaps) x scaling factor, and the scaling factor lifts a run that
needed fewer samples than the reference up to the reference's. So

    per accelerator = throughput x convergence x other

where convergence compares the samples that the scores stand for (the runs' own times the scaling factor) and other is
what is left: evaluations, gaps, rounding. Factors above 1 say that the result is better than the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from timetrial.errors import UserError
from timetrial.results.lookup import PREFIX, ambiguous, benchmark_of, published
from timetrial.results.records import Result
from timetrial.results.reference import reference_samples, smallest, target
from timetrial.results.sides import Side, name, side

DOUBTFUL = 0.15
"""Part of the run time that throughput and evaluation may miss before a warning. 19 published rows miss more, 11 of
them of dlrm_dcnv2, whose logged throughput has evaluation in it."""


@dataclass(frozen=True)
class Pair:
    """One result against the base; factors above 1 are in its favour, None where a figure is missing."""

    base: int
    """Index of the base in `Comparison.sides`."""
    own: int
    """Index of the result."""
    speedup: float | None = None
    """Base's score over the result's."""
    per_accelerator: float | None = None
    """The same of scores times accelerators."""
    efficiency: float | None = None
    """Strong scaling, (t_base n_base) / (t n); only between numbers of one accelerator in one round."""
    throughput: float | None = None
    """Training samples a second and accelerator, result's over base's."""
    convergence: float | None = None
    """Samples that the scores stand for, base's over the result's."""
    other: float | None = None
    """per_accelerator / (throughput x convergence): evaluations, gaps."""
    equal_batch_min: float | None = None
    """Result's score at the base's batch size, minutes: times reference samples at the base's over those at its own,
    by the reference of its round; throughput is taken to stay."""
    equal_batch_speedup: float | None = None
    """Speed-up with equal_batch_min."""
    equal_batch_per_accelerator: float | None = None
    """Per accelerator with equal_batch_min."""
    equal_batch_efficiency: float | None = None
    """Efficiency with equal_batch_min."""
    equal_batch_basis: str = ""
    """How the batch size was taken out, or why it could not be."""
    equal_samples_per_accelerator: float | None = None
    """per_accelerator / convergence: what it would be if both scores stood for the same number of samples."""
    energy: float | None = None
    """Energy, base's over the result's."""
    warnings: tuple[str, ...] = ()
    """Why the two are not like for like."""


@dataclass(frozen=True)
class Comparison:
    """Results against one of them."""

    sides: tuple[Side, ...]
    """In the order given."""
    base: int
    """Index of the side that the others are compared with."""
    pairs: tuple[Pair, ...]
    """Every other side against the base, in order."""
    warnings: tuple[str, ...]
    """About single results: unverified, mini, no score."""


@dataclass(frozen=True)
class ScalingRow:
    """One number of accelerators."""

    side: Side
    accelerators: int
    speedup: float | None
    """Over the smallest number."""
    ideal: float
    """Accelerators over the smallest number."""
    efficiency: float | None
    """Speed-up over ideal."""
    equal_batch: float | None
    """Efficiency at the batch size of the smallest number."""
    throughput: float | None
    """Samples a second and accelerator over those of the smallest number."""
    convergence: float | None
    """Samples of the smallest number's score over this one's."""


@dataclass(frozen=True)
class ScalingTable:
    """Strong scaling of one benchmark on one kind of accelerator."""

    benchmark: str
    accelerator: str
    rows: tuple[ScalingRow, ...]
    """By accelerators; the first is the base."""
    warnings: tuple[str, ...]


def compare(results: Sequence[Result], base: int = 0) -> Comparison:
    """`results` against `results[base]`. Raises UserError for fewer than two or a base that is not there."""
    if len(results) < 2:
        raise UserError(f"compare: {len(results)} result; give at least two")
    if not 0 <= base < len(results):
        raise UserError(f"compare: base {base} is not there; results are numbered 0 to {len(results) - 1}")
    sides = tuple(side(result) for result in results)
    pairs = tuple(_pair(sides, base, own) for own in range(len(sides)) if own != base)
    warnings = tuple(dict.fromkeys(warning for one in sides for warning in one.warnings))
    return Comparison(sides, base, pairs, warnings)


def scaling_table(results: Sequence[Result]) -> ScalingTable:
    """Strong scaling over numbers of accelerators, from the smallest, the fastest where it stands twice.

    Raises UserError for results of several benchmarks or accelerators, and where accelerators or scores are unknown.
    """
    usable = sorted(
        (result for result in results if result.accelerators is not None and result.score_min is not None),
        key=lambda result: (result.accelerators or 0, result.score_min or 0.0),
    )
    for what, found in (
        ("benchmark", {benchmark_of(result.benchmark) for result in usable}),
        ("accelerator", {result.accelerator for result in usable}),
        ("preset", {"mini" if result.verdict == "mini" else "official" for result in usable}),
    ):
        if len(found) > 1:
            raise UserError(f"scaling: several {what}s ({', '.join(sorted(found))}); give results of one")
    if len({result.accelerators for result in usable}) < 2:
        raise UserError(
            f"scaling: {len(usable)} of {len(results)} results have a score and a number of accelerators; "
            "give at least two numbers of accelerators"
        )
    compared = compare(usable)
    first = compared.sides[0]
    made = [ScalingRow(first, _count(first), 1.0, 1.0, 1.0, 1.0, _alone(first.rate), _alone(first.scored_samples))]
    for pair in compared.pairs:
        here = compared.sides[pair.own]
        made.append(
            ScalingRow(
                side=here,
                accelerators=_count(here),
                speedup=pair.speedup,
                ideal=_count(here) / _count(first),
                efficiency=pair.per_accelerator,
                equal_batch=pair.equal_batch_per_accelerator,
                throughput=pair.throughput,
                convergence=pair.convergence,
            )
        )
    warnings = [warning for pair in compared.pairs for warning in pair.warnings]
    return ScalingTable(
        benchmark=benchmark_of(first.result.benchmark),
        accelerator=first.result.accelerator,
        rows=tuple(made),
        warnings=tuple(dict.fromkeys([*compared.warnings, *warnings])),
    )


def parse(arguments: Sequence[str], score: Callable[[Path], Iterable[Result]]) -> list[Result]:
    """The results that a command line names: paths, which `score` scores, and `published:` queries.

    The first of several arguments is the base and must name one result. Raises UserError for what is not there.
    """
    found: list[Result] = []
    for number, argument in enumerate(arguments):
        if argument.startswith(PREFIX):
            here = published(argument)
        else:
            path = Path(argument)
            if not path.exists():
                raise UserError(f"{argument}: no such path; give results on disk or {PREFIX}ROUND/SUBMITTER/BENCHMARK")
            here = list(score(path))
            if not here:
                raise UserError(f"{argument}: no result in it; give a log, a directory of logs or a results tree")
        if number == 0 and len(arguments) > 1 and len(here) > 1:
            raise UserError(f"{argument}: the first is what the others are compared with, and it {ambiguous(here)}")
        found += here
    if len(found) < 2:
        raise UserError(f"compare: {len(found)} result; give at least two")
    return found


def _count(one: Side) -> int:
    if one.result.accelerators is None:
        raise ValueError("a side without a number of accelerators")
    return one.result.accelerators


def _alone(figure: float | None) -> float | None:
    return None if figure is None else 1.0


def _pair(sides: Sequence[Side], base: int, own: int) -> Pair:
    a, b = sides[base], sides[own]
    if not _comparable(a.result, b.result):
        return Pair(base, own, equal_batch_basis="nothing to compare", warnings=tuple(_unlike(a, b)))
    speedup = _ratio(a.result.score_min, b.result.score_min)
    per_accelerator = _ratio(a.accelerator_min, b.accelerator_min)
    scaled = _system(a.result) == _system(b.result) and a.result.accelerators != b.result.accelerators
    efficiency = per_accelerator if scaled else None
    throughput = _ratio(b.rate, a.rate)
    convergence = _ratio(a.scored_samples, b.scored_samples) if a.figures.unit == b.figures.unit else None
    factor, basis = _batch_factor(a.result, b.result)
    warnings = _unlike(a, b, factor, basis)
    joules = [one.result.energy.joules if one.result.energy is not None else None for one in (a, b)]
    return Pair(
        base=base,
        own=own,
        speedup=speedup,
        per_accelerator=per_accelerator,
        efficiency=efficiency,
        throughput=throughput,
        convergence=convergence,
        other=_ratio(_ratio(per_accelerator, throughput), convergence),
        equal_batch_min=_times(b.result.score_min, factor),
        equal_batch_speedup=_ratio(speedup, factor),
        equal_batch_per_accelerator=_ratio(per_accelerator, factor),
        equal_batch_efficiency=_ratio(efficiency, factor),
        equal_batch_basis=basis,
        equal_samples_per_accelerator=_ratio(per_accelerator, convergence),
        energy=_ratio(joules[0], joules[1]),
        warnings=tuple(warnings),
    )


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _times(figure: float | None, factor: float | None) -> float | None:
    return None if figure is None or factor is None else figure * factor


def _system(result: Result) -> tuple[str, str]:
    return result.round, result.accelerator


def _figure(samples: float) -> str:
    return f"{samples:,.0f}" if samples >= 1000 else f"{samples:.4g}"


def _comparable(a: Result, b: Result) -> bool:
    return benchmark_of(a.benchmark) == benchmark_of(b.benchmark) and (a.verdict == "mini") == (b.verdict == "mini")


def _batch_factor(a: Result, b: Result) -> tuple[float | None, str]:
    """What b's time is multiplied by at a's batch size, and how that is known."""
    if a.gbs is None or b.gbs is None:
        return None, "a batch size is unknown"
    if a.gbs == b.gbs:
        return 1.0, f"both at batch size {a.gbs:,}"
    if "mini" in (a.verdict, b.verdict):
        return None, "mini presets have no reference"
    there, here = (reference_samples(b.benchmark, b.round, gbs) for gbs in (a.gbs, b.gbs))
    least = smallest(b.benchmark, b.round)
    if least is None:
        return None, f"no reference of {b.benchmark} in {b.round or 'an unknown round'}"
    if there is None or here is None:
        return None, f"batch size {max(a.gbs, b.gbs):,} is above the largest of {b.round}'s reference"
    words = f"{b.round}'s reference: {_figure(there)} at batch size {a.gbs:,}, {_figure(here)} at {b.gbs:,}"
    if min(a.gbs, b.gbs) < least:
        words += f" (below {least:,} that of {least:,} counts)"
    return there / here, words


def _unlike(a: Side, b: Side, factor: float | None = None, basis: str = "") -> list[str]:
    """Why a pair is not like for like, one line each; `factor` and `basis` are those of `_batch_factor`."""
    one, two = a.result, b.result
    if benchmark_of(one.benchmark) != benchmark_of(two.benchmark):
        return [f"different benchmarks, {one.benchmark} and {two.benchmark}: nothing to compare"]
    if (one.verdict == "mini") != (two.verdict == "mini"):
        return ["a mini preset has a model, data and target of its own: nothing to compare with an official one"]
    said = _rules(one, two)
    if one.division != two.division:
        said.append(f"different divisions: {one.division or 'unknown'} and {two.division or 'unknown'}")
    if one.unverified != two.unverified:
        said.append(f"{name(one if one.unverified else two)} is unverified, the other one is published")
    if one.gbs != two.gbs and None not in (one.gbs, two.gbs):
        said.append(f"different batch sizes, {one.gbs:,} and {two.gbs:,}" + _batch_words(a, b, factor, basis))
    sources = {s.rate_source for s in (a, b) if s.rate is not None}
    if len(sources) > 1 or any("evaluation perhaps" in source for source in sources):
        said.append(f"throughput is from {' and '.join(sorted(sources))}")
    said += [
        f"{name(s.result)}: its throughput and evaluation make {s.explained:.0%} of its time; throughput is doubtful"
        for s in (a, b)
        if s.explained is not None and abs(s.explained - 1) > DOUBTFUL
    ]
    return said


def _batch_words(a: Side, b: Side, factor: float | None, basis: str) -> str:
    """What becomes of different batch sizes: a reader is sent to figures only where there are some."""
    if factor is None:
        return f"; there are no figures at equal batch size: {basis}"
    if factor == 1.0:
        return f", but as many samples by {basis}"
    if a.accelerator_min is None or b.accelerator_min is None:
        return f", and other samples by {basis}"
    return ": see the figures at equal batch size"


def _rules(one: Result, two: Result) -> list[str]:
    if one.round == two.round or "mini" in (one.verdict, two.verdict):
        return []
    asked = [target(result.benchmark, result.round) for result in (one, two)]
    if asked[0] is None or asked[1] is None:
        missing = one if asked[0] is None else two
        return [f"targets of {missing.benchmark} in {missing.round or 'an unknown round'} are not known"]
    said = []
    rounds = f"{one.round} and {two.round}"
    if (asked[0].metric, asked[0].target) != (asked[1].metric, asked[1].target):
        said.append(f"different targets in {rounds}: {asked[0].target} and {asked[1].target} ({asked[1].metric})")
    if asked[0].evaluation != asked[1].evaluation:
        said.append(f"evaluation after {asked[0].evaluation} in {one.round}; {asked[1].evaluation} in {two.round}")
    if one.gbs is not None:
        samples = [reference_samples(one.benchmark, round_, one.gbs) for round_ in (one.round, two.round)]
        if samples[0] is not None and samples[1] is not None and abs(samples[1] / samples[0] - 1) > 1e-3:
            said.append(
                f"the reference needs {_figure(samples[0])} at batch size {one.gbs:,} in {one.round}, "
                f"{_figure(samples[1])} in {two.round}"
            )
    return said
