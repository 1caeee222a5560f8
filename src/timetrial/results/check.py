"""One run's log against the rules of its round and benchmark.

The log is walked once, in file order, as the official checker does: an expression sees the keys logged before. So
a `fail` here is what the official checker fails too; where it is not, a finding named `contradiction.NAME` says so.
What the rules' text asks and the checker does not look at is a `warn`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timetrial.errors import UserError
from timetrial.results import forms, ruleset
from timetrial.results.expressions import OWN, Seen
from timetrial.results.layout import check_result, verdict
from timetrial.results.records import Finding, LogEvent, RunLog
from timetrial.results.ruleset import MINI, Contradiction, Rule, Ruleset

__all__ = ["check_result", "check_run", "refused", "verdict"]

MINI_SUFFIX = "_mini"
NOT_REACHED = frozenset(("no eval_start", "no eval_stop", "no eval_accuracy"))
"""What a mini run that was stopped early has not come to."""
SHOWN = 120
"""Characters of a value that a finding shows."""


@dataclass
class _Breach:
    """One check that did not hold: its first event and how often."""

    check: forms.Check
    event: LogEvent
    why: str
    asked: str
    times: int = 1


@dataclass
class _Tally:
    """What became of one rule over the log."""

    rule: Rule
    values: list[Any] = field(default_factory=list)
    breaches: dict[int, _Breach] = field(default_factory=dict)
    """Index of the check -> its breach; first-event checks come after the others, -1 is the target."""
    reached: bool = False
    last: LogEvent | None = None
    thinned: int = 0
    """Events that the reader counted and did not keep."""

    @property
    def count(self) -> int:
        return len(self.values) + self.thinned


def check_run(log: RunLog, round_: str, benchmark: str = "", division: str = "") -> tuple[Finding, ...]:
    """What the rules find in one log; empty where nothing is amiss.

    Benchmark and division are the log's own; the arguments (of the directory, of the system's description) serve
    where it has none, and a difference is told. A benchmark ending in `_mini` has rules of its own, whatever the
    round. Raises UserError for a round without rules.
    """
    found: list[Finding] = []
    own = _text(log, "submission_benchmark")
    if (own or benchmark).endswith(MINI_SUFFIX):
        round_ = MINI
    elif own and benchmark and own != benchmark:
        found.append(_of_run(log, "warn", "benchmark", own, f"{benchmark}, as its directory is named", "move the log"))
    stated = _text(log, "submission_division")
    if stated and division and stated != division:
        found.append(
            _of_run(log, "warn", "division", stated, f"{division}, as its system's description says", "let them agree")
        )
    notice = log.first("notice")
    if notice is not None and round_ != MINI:
        asked, change = "the official definition on its whole data", "run the official preset unchanged"
        found.append(_of_run(log, "fail", "notice", f"the log says: {_cut(notice.value)}", asked, change))
    chosen = _division(stated, division)
    name = (own or benchmark).removesuffix(MINI_SUFFIX)
    try:
        rules = ruleset.load(round_, name, chosen)
    except UserError as error:
        known = ruleset.benchmarks(round_)  # raises where it is the round
        if name in known:
            raise
        message = "set submission_benchmark, or name the round that has it"
        return (
            *found,
            Finding("fail", "submission_benchmark", name or "none", str(error), f"rules/{round_}/common.toml", message,
                    log.path),
        )  # fmt: skip
    return (*found, *judge(log, rules))


def _division(*stated: str) -> str:
    return next((division for division in stated if division in ruleset.DIVISIONS), "closed")


def refused(log: RunLog, found: Iterable[Finding], round_: str, benchmark: str = "", division: str = "") -> bool:
    """Whether the official checker refuses the log, by what `check_run` found in it with the same arguments.

    What fails here fails there too, but for keys on which a contradiction is told: there it is the other way round,
    unless the checker is followed. Shrunken presets (`notice`) it cannot see.
    """
    found = list(found)
    fails = {finding.rule for finding in found if finding.level == "fail"} - {"notice"}
    told = {finding.rule for finding in found if finding.rule.startswith("contradiction.")}
    if not told:
        return bool(fails)
    name = _text(log, "submission_benchmark") or benchmark
    try:
        rules = ruleset.load(round_, name, _division(_text(log, "submission_division"), division))
    except UserError:
        return bool(fails)
    turned = [
        {f"{rules.benchmark}.{c.rule.name or c.rule.key}"}
        | ({f"{rules.benchmark}.target"} if c.rule.reached else set())
        for c in rules.contradictions
        if c.rule is not None and not c.checker_followed and f"contradiction.{c.name}" in told
    ]
    return bool(fails.difference(*turned)) or any(not names & fails for names in turned)


def judge(log: RunLog, rules: Ruleset) -> tuple[Finding, ...]:
    """What one ruleset finds in a log."""
    others = [c.other for c in rules.contradictions if c.other is not None]
    tallies = _walk(log, [*rules.rules, *others], rules.division)
    prefix = f"{rules.benchmark}."
    found = [f for rule in rules.rules for f in _findings(tallies[id(rule)], prefix, log, tallies)]
    for c in rules.contradictions:
        if c.rule is not None:
            found += _differing(c, tallies, prefix, log)
    size = log.last("global_batch_size")
    if rules.round != MINI and size is not None and not isinstance(size.value, int | float):
        found = [f for f in found if f.rule != f"{prefix}evaluation_points"]  # no telling; `check_result` says why
    if rules.round == MINI and _stopped(log):  # what comes after its last step is not asked of it
        found = [f for f in found if f.found not in NOT_REACHED]
    return tuple(found)


def _stopped(log: RunLog) -> bool:
    """Whether the run says that it ended before its time."""
    stop = log.last("run_stop")
    return stop is not None and stop.metadata.get("status") == "aborted"


# ---- the walk ----------------------------------------------------------------------------------------------


def _walk(log: RunLog, rules: Iterable[Rule], division: str) -> dict[int, _Tally]:
    """id of a rule -> its tally."""
    tallies = {id(rule): _Tally(rule, thinned=log.thinned.get(rule.key, 0)) for rule in rules}
    by_key: dict[str, list[_Tally]] = {}
    for tally in tallies.values():
        by_key.setdefault(tally.rule.key, []).append(tally)
    seen = Seen({}, {}, {}, division)
    derived = any(t.rule.derived for t in tallies.values())
    for event in (*log.events, *(_metrics_by_samples(log.events) if derived else ())):
        for tally in by_key.get(event.key, ()):
            _weigh(tally, event, seen)
        seen.values[event.key] = event.value
        seen.counts[event.key] = seen.counts.get(event.key, 0) + 1
        first = seen.first_ms.get(event.key, event.time_ms)
        seen.first_ms[event.key] = min(first, event.time_ms)
    for tally in tallies.values():  # rules for another value of some key say nothing here
        if tally.rule.when and not any(e.value == tally.rule.when[1] for e in log.all(tally.rule.when[0])):
            tally.breaches.clear()
    return tallies


def _weigh(tally: _Tally, event: LogEvent, seen: Seen) -> None:
    rule = tally.rule
    checks = rule.checks + (rule.first if not tally.values else ())
    for index, check in enumerate(checks):
        good, why = forms.holds(check, event, seen)
        if not good and index in tally.breaches:
            tally.breaches[index].times += 1
        elif not good:
            tally.breaches[index] = _Breach(check, event, why, forms.asks(check, seen, event))
    tally.values.append(event.value)
    tally.last = event
    if not rule.reached:
        return
    answers = [forms.holds(check, event, seen) for check in rule.reached]
    tally.reached = tally.reached or all(good for good, _ in answers)
    for check, (_, why) in zip(rule.reached, answers, strict=True):
        if why:  # a value that no target can be held to
            tally.breaches.setdefault(-1, _Breach(check, event, why, forms.asks(check, seen, event)))


def _metrics_by_samples(events: Iterable[LogEvent]) -> list[LogEvent]:
    """Stable Diffusion's FID and CLIP, logged apart, as one event a checkpoint (closed_stable_diffusion.yaml:7)."""
    gathered: dict[Any, LogEvent] = {}
    for event in events:
        metric, samples = event.metadata.get("metric"), event.metadata.get("samples_count")
        if event.key == "eval_accuracy" and isinstance(metric, str) and isinstance(samples, int | float):
            made = gathered.setdefault(
                samples,
                LogEvent(
                    event.time_ms, "point", "aggregated_eval_accuracy", {"samples_count": samples}, {}, event.line
                ),
            )
            made.value[metric] = event.value
    return list(gathered.values())


# ---- findings ----------------------------------------------------------------------------------------------


def _findings(tally: _Tally, prefix: str, log: RunLog, tallies: dict[int, _Tally]) -> list[Finding]:
    rule = tally.rule
    if rule.when and not any(event.value == rule.when[1] for event in log.all(rule.when[0])):
        return []
    name = prefix + (rule.name or rule.key)
    found = []
    wrong = _count(tally, tallies)
    if wrong:
        level, said, asked, change = wrong
        line = tally.last.line if tally.last else None
        found.append(Finding(level, name, said, asked, rule.source, change, log.path, line))
    for breach in tally.breaches.values():
        shown = _shown(rule.key, breach)
        change = _change(rule.key, breach)
        found.append(
            Finding(rule.level, name, shown, breach.asked, breach.check.source, change, log.path, breach.event.line)
        )
    if rule.reached and tally.values and not tally.reached:
        assert tally.last is not None
        asked = " and ".join(forms.asks(check) for check in rule.reached)
        best = _best(tally)
        found.append(
            Finding(rule.level, f"{prefix}target", f"{rule.key} never got there: {best}", f"{asked}, once at least",
                    rule.reached[0].source, "train until the target is reached", log.path, tally.last.line)
        )  # fmt: skip
    return found


def _best(tally: _Tally) -> str:
    """The nearest to the target that was logged, and the last."""
    rule, numbers = tally.rule, [v for v in tally.values if isinstance(v, int | float)]
    last = f"last {_cut(tally.values[-1])}"
    if not numbers:
        return last
    higher = rule.reached[0].form in ("at_least", "above")
    return f"best {_cut(max(numbers) if higher else min(numbers))}, {last}"


def _count(tally: _Tally, tallies: dict[int, _Tally]) -> tuple[Any, str, str, str] | None:
    """(level, found, asked, change) where a key is logged too rarely or too often."""
    rule, n = tally.rule, tally.count
    level = rule.level
    if rule.count == "exactly_one" and n == 0:
        return level, f"no {rule.key}", f"{rule.key} exactly once", f"log {rule.key} once"
    if rule.count == "exactly_one" and n > 1:
        different = [v for v in tally.values if v != tally.values[0]]
        said = f"{rule.key} logged {n} times, with different values" if different else f"{rule.key} logged {n} times"
        return level if different else "warn", said, f"{rule.key} exactly once", "log it from one process, once"
    if rule.count == "at_least_one" and n < max(1, rule.at_least):
        instead = next((t for t in tallies.values() if t.rule.key == rule.alternative), None)
        if rule.alternative and instead is not None and instead.count:
            return None
        asked = f"{rule.key} {f'{rule.at_least} times' if rule.at_least > 1 else 'once'} at least"
        either = f" or {rule.alternative}" if rule.alternative else ""
        return level, f"{n or 'no'} {rule.key}", asked + either, f"log {rule.key}{either}"
    return None


def _differing(c: Contradiction, tallies: dict[int, _Tally], prefix: str, log: RunLog) -> list[Finding]:
    """The finding that two sources come to different verdicts on this log, where they do."""
    if c.rule is None:
        return []
    here = _failed(tallies[id(c.rule)], tallies)
    there = _failed(tallies[id(c.other)], tallies) if c.other is not None else False
    if here == there:
        return []
    tally = tallies[id(c.rule)]
    other = tallies[id(c.other)] if c.other is not None else tally
    breach = next(iter((tally if here else other).breaches.values()), None)
    value = f"{c.rule.key} = {_cut(tally.values[-1])}" if tally.values else f"no {c.rule.key}"
    if breach is not None:  # it knows what of the event is meant
        value = _shown(c.rule.key, breach)
    said = f"{value}: {'fails' if here else 'passes'} by what is followed, {'passes' if here else 'fails'} by the other"
    asked = f"{c.one}; but {c.another}"
    line = tally.last.line if tally.last else None
    return [
        Finding(c.level, f"contradiction.{c.name}", said, asked, c.source, f"followed: {c.followed}", log.path, line)
    ]


def _failed(tally: _Tally, tallies: dict[int, _Tally]) -> bool:
    wrong = _count(tally, tallies)
    missed = bool(tally.rule.reached) and bool(tally.values) and not tally.reached
    return bool(tally.breaches) or missed or (wrong is not None and wrong[0] == "fail")


def _shown(key: str, breach: _Breach) -> str:
    check, event = breach.check, breach.event
    if check.form in ("before", "after", "within_minutes"):
        said = f"{key} in line {event.line}"
    elif check.form == "has":
        said = f"{key} with {_cut(event.metadata if check.of == 'metadata' else event.value)}"
    else:
        try:
            said = f"{key}{'' if check.of == OWN else ' with ' + check.of} = {_cut(forms.subject(check, event))}"
        except (KeyError, TypeError):
            said = f"{key} without {check.of}"
    said += f", and {breach.why}" if breach.why else ""
    return said + (f", and {breach.times - 1} more like it" if breach.times > 1 else "")


def _change(key: str, breach: _Breach) -> str:
    form, p = breach.check.form, breach.check.parameters
    if form == "after":
        return f"log {p['key']} before {key}"
    if form == "before":
        return f"log {key} before {p['key']}"
    if form == "within_minutes":
        return "let the clock start when the time for initialisation is over"
    if form == "has":
        return f"log {key} with {' or '.join(p['any'])} in its {breach.check.of}"
    if key == "run_stop" and breach.check.of == "metadata.status":
        return "train until the target is reached: a run that does not reach it says aborted"
    if form in ("every", "stepping"):
        return "evaluate at these points, and log each"
    if "is not logged before" in breach.why:
        return f"log {breach.why.split()[0]} before {key}"
    return f"run with {key} {breach.asked}" if breach.check.of == OWN else f"log {key} with {breach.asked}"


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _text(log: RunLog, key: str) -> str:
    event = log.first(key)
    return event.value if event is not None and isinstance(event.value, str) else ""


def _of_run(log: RunLog, level: Any, rule: str, found: str, asked: str, change: str) -> Finding:
    return Finding(level, rule, found, asked, "timetrial: layout of a submission", change, Path(log.path))
