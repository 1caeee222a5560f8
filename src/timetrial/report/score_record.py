"""What the reports of a score share: verdicts in words, findings put together, means over the runs that count."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from timetrial.report import text
from timetrial.results.breakdown import explain
from timetrial.results.convergence import rejected
from timetrial.results.layout import ENDED_EARLY
from timetrial.results.records import Finding, Result, Run, RunTime

ORDER = ("fail", "warn", "note", "allowed")
"""Levels as they are shown; `allowed` is a run's failure that its result may have."""
SUMMARIES = ("result.compliance", "score.refused", "result.not_converged", "score.not_converged")
"""Rules that only sum up what single runs break; they come behind those."""
UNVERIFIED = "not verified by MLCommons"
MARKS = {"good": "\u2713", "open": "!", "bad": "\u2717"}
"""Kind of a verdict -> its mark."""
MINI_NOTICE = "a mini preset: no MLPerf result"
NOT_ASKED = (
    "Not asked were its checkers of packages, seeds, system descriptions and reference convergence: "
    "what is said of these above is Timetrial's own finding."
)


@dataclass
class Group:
    """Findings that say the same of several logs."""

    level: str
    """One of ORDER."""
    rule: str
    asked: str
    source: str
    change: str
    found: list[str] = field(default_factory=list)
    """Different words of the findings, in their order."""
    where: list[str] = field(default_factory=list)
    """`result_0.txt:31`, or the name of a file or directory."""

    @property
    def found_words(self) -> str:
        more = len(self.found) - 1
        return self.found[0] + (f" (and {more} more like it)" if more else "")

    def where_words(self, most: int = 3) -> str:
        """Where it was found, the first few by name."""
        more = len(self.where) - most
        return ", ".join(self.where[:most]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Breakdown:
    """Where the time of the runs that count went, mean seconds a run; None where the logs do not tell."""

    train_s: float | None
    eval_s: float | None
    gap_s: float | None
    total_s: float
    runs: int
    """How many runs it is the mean of."""

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """(words, seconds) of what is known; `not told` is what the logs leave open."""
        named = (("training", self.train_s), ("evaluation", self.eval_s), ("neither", self.gap_s))
        known = [(words, seconds) for words, seconds in named if seconds is not None]
        left = self.total_s - sum(seconds for _, seconds in known)
        return (*known, ("not told", left)) if left > 1e-3 * self.total_s else tuple(known)


def shown(words: str) -> str:
    """Text of a log or a file's name that any terminal and page can show."""
    return "".join(c if c.isprintable() else "\ufffd" for c in words.encode("utf-8", "replace").decode())


def scoring(result: Result) -> list[Run]:
    """The runs that the score is the mean of; of a single run itself."""
    return [run for run in result.runs if run.converged and not run.dropped and run.time_min is not None]


def allowed(result: Result) -> int:
    """How many runs may be left out at either end."""
    return rejected(result.benchmark) if len(result.runs) > 2 else 0


def one_run(result: Result) -> bool:
    """Whether these are too few runs for a score, with nothing else against them."""
    return result.verdict == "stands" and result.score_min is None


def verdict(result: Result) -> tuple[str, str]:
    """(good, open or bad; words)."""
    if result.verdict == "mini":
        missed = any(not run.converged for run in result.runs)
        broken = failing(result)
        more = ", target missed" if missed else ", breaks its own rules" if broken else ""
        return ("bad" if missed or broken else "open"), MINI_NOTICE + more
    if result.verdict == "stands":
        if one_run(result):
            runs = len(result.runs)
            return "open", f"keeps the rules; {runs} {'run is' if runs == 1 else 'runs are'} no result"
        return "good", "stands"
    return ("bad", "could not be read") if result.verdict == "unread" else ("bad", "does not stand")


def failing(result: Result) -> bool:
    """Whether some finding of level fail stands against it, of its own or of a run."""
    return any(group.level == "fail" for group in groups(result))


def exit_code(results: Sequence[Result]) -> int:
    """0 where every result stands (a mini: by its own rules), 2 where one could not be read, else 1."""
    if any(result.verdict == "unread" for result in results):
        return 2
    return 1 if any(verdict(result)[0] == "bad" for result in results) else 0


def groups(result: Result) -> list[Group]:
    """All findings of a result and its runs, those alike together, the gravest first.

    What follows from something graver is folded into it: what is missing in a log that is not whole, and keys that
    one log lacks beside the others.
    """
    found: dict[tuple[str, ...], Group] = {}
    missed = [run for run in result.runs if not run.converged]
    excusable = result.verdict != "mini" and len(missed) <= allowed(result)

    def add(finding: Finding, level: str) -> None:
        key = (level, finding.rule, finding.asked, finding.source, finding.change)
        group = found.setdefault(key, Group(level, finding.rule, finding.asked, finding.source, finding.change))
        if finding.found not in group.found:
            group.found.append(finding.found)
        name = finding.path.name if finding.path is not None else ""
        place = f"{name}:{finding.line}" if finding.line else name
        if place and place not in group.where:
            group.where.append(place)

    for run in result.runs:
        for finding in _own(run):
            early = excusable and not run.converged and ENDED_EARLY.fullmatch(finding.rule) is not None
            may = finding.level == "fail" and (result.verdict == "stands" or early)
            add(finding, "allowed" if may else finding.level)
    unread = result.verdict == "unread" and any(group.level == "fail" for group in found.values())
    for finding in _folded(result.findings):
        if not unread or finding.rule.startswith("tree."):  # the rest follows from there being nothing to read
            add(finding, finding.level)
    return sorted(found.values(), key=lambda group: (ORDER.index(group.level), group.rule in SUMMARIES))


def _own(run: Run) -> list[Finding]:
    """The findings of a run, without those that say what another one says."""
    told = {finding.found for finding in run.findings if not finding.rule.startswith("run.")}
    left = [f for f in run.findings if not f.rule.startswith("run.") or f.found not in told]
    broken = next((f for f in left if f.level == "fail" and f.rule.startswith("reader.")), None)
    lacking = [f for f in left if f.found.startswith("no ") and f.level == "fail" and f is not broken]
    if broken is None or len(lacking) < 3:
        return left
    names = ", ".join(f.found.removeprefix("no ") for f in lacking[:6]) + (", ..." if len(lacking) > 6 else "")
    found = f"{len(lacking)} required keys are not in what can be read of it: {names}"
    asked, source = "a whole log", f"the rule of each, as {lacking[0].source}"
    one = Finding("fail", "reader.lacking", found, asked, source, broken.change, run.path)
    return [f for f in left if f not in lacking] + [one]


def _folded(findings: Sequence[Finding]) -> list[Finding]:
    """Notes of keys that the same logs lack, as one."""
    lacking: dict[str, list[Finding]] = {}
    for finding in findings:
        _, within, logs = finding.found.partition(" in ")
        if finding.level == "note" and finding.found.startswith("no ") and within:
            lacking.setdefault(logs, []).append(finding)
    folded: list[Finding] = []
    done: set[int] = set()
    for logs, alike in lacking.items():
        if len(alike) > 2:
            names = ", ".join(finding.found.partition(" in ")[0].removeprefix("no ") for finding in alike)
            one = dataclasses.replace(
                alike[0], rule="result.keys", found=f"{len(alike)} keys are not in {logs}: {names}"
            )
            folded.append(one)
            done |= {id(finding) for finding in alike}
    return [finding for finding in findings if id(finding) not in done] + folded


def breakdown(runs: Iterable[Run]) -> Breakdown | None:
    """Mean parts of the time over `runs`; None where no run tells its time."""
    times = [run.time for run in runs if run.time is not None and run.time.total_s]
    if not times:
        return None
    total = _mean(times, lambda time: time.total_s)
    assert total is not None
    return Breakdown(
        _mean(times, lambda time: time.train_s),
        _mean(times, lambda time: time.eval_s),
        _mean(times, lambda time: time.gap_s),
        total,
        len(times),
    )


def _mean(times: Sequence[RunTime], get: Callable[[RunTime], float | None]) -> float | None:
    values = [value for value in map(get, times) if value is not None]
    return statistics.fmean(values) if len(values) == len(times) else None


def typical(result: Result) -> Run | None:
    """The median one of the runs that count, else of all that have a time; the lower of two."""
    runs = scoring(result) or [run for run in result.runs if run.time_min is not None]
    ordered = sorted(runs, key=lambda run: run.time_min or 0.0)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def explanation(result: Result) -> tuple[list[str], list[str]]:
    """(sentences on the time of the typical run, sentences on convergence, quality and energy)."""
    run = typical(result)
    if run is None:
        return [], []
    time = [] if run.time is None else explain(run.time)
    tested = result.convergence if result.convergence and result.convergence.samples_mean is not None else None
    alone = dataclasses.replace(run, time=None, quality=run.quality if run.converged else None)
    return time, explain(alone, tested, None, result.energy, result.benchmark, result.round)


def doubts(result: Result) -> list[str]:
    """Logs whose figures mean nothing, a sentence each; of a single log it stands in the explanation."""
    told = [(run.path.name, run.time.doubt) for run in result.runs if run.time is not None and run.time.doubt]
    return [f"{name}: {doubt}" for name, doubt in told] if len(result.runs) > 1 else []


def checker(result: Result) -> str:
    """The official checker by its version and ruleset."""
    ruleset = f", ruleset {result.round.removeprefix('v')}.0" if result.round else ""
    return f"mlperf-logging {importlib.metadata.version('mlperf-logging')}{ruleset}"


def official(result: Result) -> tuple[list[str], list[str]]:
    """(our sentences on what the official checker was asked and answered, its own lines word for word)."""
    if not result.official or result.verdict in ("unread", "mini"):  # it has no rules for minis
        return [], []
    counted, quoted = shown(result.official[0]), result.official[1:]
    if counted.startswith("not asked"):
        return [f"{counted[0].upper()}{counted[1:]}."], []
    sentence = f"{counted} its check of compliance, as Timetrial counts them"
    if result.verdict == "fails":
        sentence += "; the result does not stand, see the findings"
    return [f"{sentence}.", NOT_ASKED], [part for line in quoted for part in line.splitlines()]


def samples(value: float | None) -> str:
    """Samples or epochs to converge: large ones in full."""
    if value is None:
        return text.NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.6g}"


def summed(group: Group, most: int) -> str:
    """A finding as one line: what was found and what is asked, each cut at `most` characters."""
    found, asked = (words if len(words) <= most else f"{words[:most]} ..." for words in (group.found[0], group.asked))
    return shown(f"{found}; asked is {asked}" if asked else found)


def how_scored(result: Result) -> str:
    """How the score was made, in words; empty where there is none."""
    if result.score_min is None or result.unscaled_min is None:
        return ""
    kind = "olympic mean" if len(result.runs) > 2 else "mean" if len(result.runs) > 1 else "time of the run"
    words = f"{kind} {result.unscaled_min:.4f} min"
    if len(result.runs) > 1:
        words += f" of {len(scoring(result))} of {len(result.runs)} runs"
    tested = result.convergence
    if tested is not None and tested.scaling_factor != 1.0:
        why = f"for convergence faster than the reference ({tested.scaling_source})"
        return f"{words}, times {tested.scaling_factor:.6f} {why}"
    return words


def about(result: Result) -> list[str]:
    """Facts of a result: round, division, organization, accelerators, batch size."""
    words = [f"{result.round} {result.division}".strip() or "no round", result.organization]
    if result.accelerators is not None:
        nodes = f" on {result.nodes} {'node' if result.nodes == 1 else 'nodes'}" if result.nodes else ""
        words.append(f"{result.accelerators:,} x {result.accelerator or 'accelerator'}{nodes}")
    if result.gbs is not None:
        words.append(f"batch size {result.gbs:,}")
    return [shown(word) for word in words if word]


def mark(run: Run) -> str:
    """Why a run does not count; empty where it does."""
    if not run.converged:
        left = f"; counted as the {run.dropped}" if run.dropped else ""
        said = "did not converge" if run.status in ("aborted", "no status", "success") else run.status
        return f"{said}{left}"
    return f"{run.dropped}, left out" if run.dropped else ""


def sums(results: Sequence[Result]) -> str:
    """One line on all results."""
    kinds: dict[str, int] = {}
    for result in results:
        kind = "one" if one_run(result) else result.verdict
        kinds[kind] = kinds.get(kind, 0) + 1
    told = (f"{count} {_SUMMED[kind][count > 1]}" for kind, count in kinds.items())
    return f"{len(results)} {'result' if len(results) == 1 else 'results'}: " + ", ".join(told)


_SUMMED = {
    "stands": ("stands", "stand"),
    "fails": ("does not stand", "do not stand"),
    "unread": ("could not be read", "could not be read"),
    "mini": ("of a mini preset", "of mini presets"),
    "one": ("keeps the rules with too few runs for a score", "keep the rules with too few runs for a score"),
}
"""Verdict -> words for one and for several."""
