"""Published results by name: `published:v5.0/NVIDIA/llama31_405b/eos*n64*?accelerator=H100`.

    published:ROUND/SUBMITTER/BENCHMARK/SYSTEM?key=value&key=value

Parts at the end may be left out; `*` stands for anything; capitals do not count. SUBMITTER is the submitter or its
directory, SYSTEM the directory of the system or its title. Keys: accelerator (a word of the accelerator's name, so that
B200 is not GB200), accelerators, nodes, gbs, precision, division, system.

The table is `data/published.csv`, a compact copy of the facts' published_results.csv: scores recomputed from the
rounds' own result logs by the official arithmetic, v4.0 to v5.1, and a part of v6.0. Each row names its source.
"""

from __future__ import annotations

import csv
import difflib
import functools
import importlib.resources
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from timetrial.errors import UserError
from timetrial.results.records import Energy, Figures, Finding, Result

PREFIX = "published:"

SAME_BENCHMARK = {"gnn": "rgat", "ssd": "retinanet"}
"""Names of v4.0 and v4.1 whose benchmark later rounds call otherwise: the reference convergence points are the same
(mlperf-logging 4.1.68 rcp_checker/training_4.1.0 and training_5.0.0)."""

FROM_LOGS = "result logs"
"""A row's basis where its score was recomputed from all its result logs."""

PARTS = ("round", "submitter", "benchmark", "system")
KEYS = ("accelerator", "accelerators", "nodes", "gbs", "precision", "division", "system")
NUMBERS = ("accelerators", "nodes", "gbs")


@dataclass(frozen=True)
class Condition:
    """What a query asks of one column."""

    column: str
    """One of PARTS or KEYS."""
    wanted: str
    """As it was written."""
    names: Callable[[Result], tuple[str, ...]]
    """The names that a result goes by in this column."""
    holds: Callable[[str], bool]
    """Whether a name is wanted."""


def benchmark_of(name: str) -> str:
    """The benchmark's present name: rgat for gnn, retinanet for ssd."""
    return SAME_BENCHMARK.get(name, name)


def published(query: str) -> list[Result]:
    """Published results that a query names, by round, benchmark and accelerators.

    The word `published:` may be left out. Raises UserError for a query that cannot be read or names no result.
    """
    text = query.removeprefix(PREFIX)
    found: Iterable[Result] = table()
    done: list[str] = []
    for condition in _conditions(text):
        left = [result for result in found if any(condition.holds(name) for name in condition.names(result))]
        if not left:
            raise UserError(f"{PREFIX}{text}: {_none(condition, found, done)}")
        found = left
        done.append(condition.wanted)
    return list(found)


def one(query: str) -> Result:
    """The one published result that a query names. Raises UserError where it names several, or none."""
    found = published(query)
    if len(found) > 1:
        raise UserError(f"{PREFIX}{query.removeprefix(PREFIX)}: {ambiguous(found)}")
    return found[0]


def ambiguous(found: list[Result], shown: int = 4) -> str:
    """Words for several results where one is wanted."""
    names = [f"{result.path} ({result.accelerators} {result.accelerator})" for result in found[:shown]]
    more = f" and {len(found) - shown} more" if len(found) > shown else ""
    return f"names {len(found)} results where one is wanted; name its system or add ?accelerators=N: " + (
        ", ".join(names) + more
    )


def _conditions(text: str) -> list[Condition]:
    path, _, options = text.partition("?")
    parts = path.strip("/").split("/")
    if not path.strip("/") or len(parts) > len(PARTS):
        raise UserError(
            f"{PREFIX}{text}: must read {PREFIX}ROUND/SUBMITTER/BENCHMARK/SYSTEM?key=value, "
            f"e.g. {PREFIX}v5.0/NVIDIA/llama31_405b?accelerators=512"
        )
    made = [_condition(column, part.strip(), text) for column, part in zip(PARTS, parts, strict=False)]
    for option in filter(None, options.split("&")):
        key, equals, value = option.partition("=")
        if key not in KEYS or not equals or not value:
            raise UserError(f"{PREFIX}{text}: {option!r} must be key=value with a key of {', '.join(KEYS)}")
        made.append(_condition(key, value.strip(), text))
    return made


def _condition(column: str, wanted: str, text: str) -> Condition:
    if column in NUMBERS:
        try:
            number = int(wanted.replace(",", ""))
        except ValueError:
            raise UserError(f"{PREFIX}{text}: {column}={wanted} must be a whole number") from None
        return Condition(column, wanted, _NAMES[column], lambda name: name == str(number))
    pattern = _pattern(wanted)
    if column == "round" and re.fullmatch(r"[0-9.]+", wanted):
        pattern = _pattern("v" + wanted)
    if column == "accelerator" and "*" not in wanted:
        word = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9])", re.IGNORECASE)
        return Condition(column, wanted, _NAMES[column], lambda name: word.search(name) is not None)
    return Condition(column, wanted, _NAMES[column], lambda name: pattern.fullmatch(name) is not None)


def _pattern(wanted: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(piece) for piece in (wanted or "*").split("*")), re.IGNORECASE)


_NAMES: dict[str, Callable[[Result], tuple[str, ...]]] = {
    "round": lambda r: (r.round,),
    "submitter": lambda r: (r.organization, _directory(r)),
    "benchmark": lambda r: (r.benchmark, benchmark_of(r.benchmark)),
    "system": lambda r: (r.system, r.system_name) if r.system_name else (r.system,),
    "accelerator": lambda r: (r.accelerator,),
    "accelerators": lambda r: (str(r.accelerators),),
    "nodes": lambda r: (str(r.nodes),),
    "gbs": lambda r: (str(r.gbs),),
    "precision": lambda r: (r.figures.precision if r.figures else "",),
    "division": lambda r: (r.division,),
}


def _directory(result: Result) -> str:
    return result.path.parts[1]


def _none(condition: Condition, found: Iterable[Result], done: list[str]) -> str:
    """Why a condition leaves nothing, and what there is instead."""
    there = sorted({name for result in found for name in condition.names(result) if name}, key=_order)
    lower = {name.lower(): name for name in there}
    close = [lower[name] for name in difflib.get_close_matches(condition.wanted.lower(), lower, n=3, cutoff=0.4)]
    close += [name for name in there if condition.wanted.lower().strip("*") in name.lower() and name not in close]
    where = f" in {'/'.join(done)}" if done else ""
    if not there:
        return f"no result{where} says its {condition.column}"
    offered = close[:4] or there[:8]
    return f"no {condition.column} {condition.wanted}{where}; {'closest' if close else 'there'}: {', '.join(offered)}"


def _order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (0, name)


@functools.cache
def table() -> tuple[Result, ...]:
    """All published results of the package, by round, benchmark and accelerators."""
    return tuple(_result(row) for row in rows("published.csv"))


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table in the package's `results/data`."""
    text = importlib.resources.files("timetrial.results").joinpath(f"data/{name}").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _result(row: dict[str, str]) -> Result:
    score = _number(row["score_min"])
    path = Path(f"{PREFIX}{row['round']}") / row["directory"] / row["benchmark"] / row["system"]
    findings: tuple[Finding, ...] = ()
    if row["basis"] != FROM_LOGS:
        findings = (
            Finding(
                level="note" if score is not None else "warn",
                rule="published.basis",
                found=row["basis"],
                asked="a score recomputed from all result logs",
                source=row["source"],
                change="nothing; the row's score is only as good as its source"
                if score is not None
                else "compare step times; there is no official score here",
                path=path,
            ),
        )
    return Result(
        path=path,
        round=row["round"],
        organization=row["submitter"],
        system=row["system"],
        system_name=row["system_name"],
        benchmark=row["benchmark"],
        division=row["division"],
        accelerator=row["accelerator"],
        accelerators=_whole(row["accelerators"]),
        nodes=_whole(row["nodes"]),
        gbs=_whole(row["gbs"]),
        score_min=score,
        unscaled_min=_number(row["unscaled_min"]),
        runs=(),
        convergence=None,
        verdict="stands" if score is not None else "unread",
        findings=findings,
        energy=_energy(row),
        unverified=False,
        figures=_figures(row),
        source=row["source"],
    )


def _energy(row: dict[str, str]) -> Energy | None:
    joules, watts, runs = _number(row["energy_j"]), _number(row["power_w"]), _whole(row["runs"])
    if joules is None or watts is None or runs is None:
        return None
    return Energy(joules, watts, runs, row["source"])


def _figures(row: dict[str, str]) -> Figures:
    return Figures(
        samples=_number(row["samples"]),
        unit=row["unit"],
        steps=_number(row["steps"]),
        scale=_number(row["scale"]),
        step_s=_number(row["step_s"]),
        samples_per_s=_number(row["samples_per_s"]),
        rate_source=row["rate_source"],
        eval_s=_number(row["eval_s"]),
        init_s=_number(row["init_s"]),
        runs=_whole(row["runs"]),
        not_converged=_whole(row["not_converged"]),
        run_min=_number(row["run_min"]),
        run_max=_number(row["run_max"]),
        precision=row["precision"],
        plan=row["plan"],
        tflops_per_accelerator=_number(row["tflops"]),
        basis=row["basis"],
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def _whole(text: str) -> int | None:
    return int(text) if text else None
