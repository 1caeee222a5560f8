"""The rules of a round and benchmark, read from data: `rules/ROUND/common.toml` and `rules/ROUND/BENCHMARK.toml`.

A new round is a new directory: nothing here names one. What the files may say is documented in
docs/score-rules.md; whatever else stands in them is refused by file, key and figure. Three kinds of entries:

- `[[common]]`, `[[closed]]`, `[[open]]`: what the official checker asks of a key. A later file's entry for a key
  replaces the earlier one's, as the checker does (mlp_compliance.py `overwrite_messages`).
- `[[text]]`: what the rules' text asks and the checker does not look at. A breach is a `warn`: by the text itself
  "the verifier ... is the source of truth", but a reviewer would ask.
- `[[contradiction]]`: where two sources differ and which is followed. With a key it brings a rule: it takes the
  checker's place, or, with `follow = "checker"`, is only held beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timetrial.errors import UserError
from timetrial.results import forms
from timetrial.results.records import Level

RULES = Path(__file__).parent / "rules"
MINI = "mini"
"""Directory of the rules for mini presets, which follow no round."""
COUNTS = ("exactly_one", "at_least_one", "optional", "any")
DIVISIONS = ("closed", "open")
RULE_KEYS = {
    *("key", "count", "at_least", "alternative", "check", "first", "reached", "when", "derived"),
    *("level", "source", "line", "division", "name"),
}


@dataclass(frozen=True)
class Rule:
    """What is asked of one key."""

    key: str
    count: str
    """One of COUNTS."""
    source: str
    """File and line."""
    at_least: int = 0
    """Fewest events, where more than one."""
    alternative: str = ""
    """A key that may stand in its place."""
    checks: tuple[forms.Check, ...] = ()
    """Asked of each event."""
    first: tuple[forms.Check, ...] = ()
    """Asked of the first event."""
    reached: tuple[forms.Check, ...] = ()
    """All to hold in one event at least: the target."""
    when: tuple[str, Any] | None = None
    """(key, value): asked only where the log has this value."""
    derived: str = ""
    """How its events are made of others': `metrics_by_samples`, or empty."""
    level: Level = "fail"
    name: str = ""
    """Short name for findings; the key where empty."""


@dataclass(frozen=True)
class Contradiction:
    """Two sources that say different things, and which is followed."""

    name: str
    one: str
    """What one source says, with the source."""
    another: str
    """What the other says, with the source."""
    followed: str
    """Which, and why."""
    level: Level
    source: str
    rule: Rule | None = None
    """The rule that is followed; None where nothing of a log tells the sources apart."""
    other: Rule | None = None
    """What the other source asks; None where it asks nothing of the key."""
    checker_followed: bool = False
    """`rule` is the official checker's; else `other` is."""


@dataclass(frozen=True)
class Ruleset:
    """All that is asked of a run, and of the result that its runs make."""

    round: str
    benchmark: str
    division: str
    official: str
    """The official checker's name of it, e.g. 6.0.0; empty for mini."""
    benchmarks: tuple[str, ...]
    """All of the round."""
    rules: tuple[Rule, ...]
    contradictions: tuple[Contradiction, ...]
    runs: int
    """Runs that a result is made of."""
    may_fail: int
    """Runs of them that may miss the target."""
    runs_source: str
    seeds: Level
    """What a missing seed is, in the closed division."""
    seeds_source: str
    fields: tuple[str, ...]
    """Required fields of the system's description."""
    statuses: tuple[str, ...]
    """Allowed values of its `status`; empty where any."""
    status_level: Level
    """What another status is."""
    description_source: str

    def has(self, benchmark: str) -> bool:
        return benchmark in self.benchmarks


def rounds(root: Path = RULES) -> tuple[str, ...]:
    """Every round with rules, oldest first."""
    names = (d.name for d in root.iterdir() if d.is_dir()) if root.is_dir() else iter(())
    numbered = [(int(m[1]), int(m[2]), name) for name in names if (m := re.fullmatch(r"v(\d+)\.(\d+)", name))]
    return tuple(name for *_, name in sorted(numbered))


def benchmarks(round_: str, root: Path = RULES) -> tuple[str, ...]:
    """The benchmarks of a round. Raises UserError for a round without rules."""
    table = _table(_round_directory(round_, root) / "common.toml")
    return tuple(table["round"]["benchmarks"])


def _round_directory(round_: str, root: Path) -> Path:
    if round_ != MINI and round_ not in rounds(root):
        raise UserError(f"no rules for round {round_!r}; there are {', '.join(rounds(root))}")
    return root / round_


@functools.lru_cache(maxsize=256)
def load(round_: str, benchmark: str, division: str = "closed", root: Path = RULES) -> Ruleset:
    """The rules of a benchmark in a round and division.

    Raises UserError for a round or benchmark without rules, and for a rule file that says what is not known here:
    by file, key and figure.
    """
    if division not in DIVISIONS:
        raise UserError(f"unknown division {division!r}; there are {', '.join(DIVISIONS)}")
    directory = _round_directory(round_, root)
    common_file, file = directory / "common.toml", directory / f"{benchmark}.toml"
    common = _table(common_file)
    about = _section(common, "round", common_file)
    known = tuple(about["benchmarks"])
    if benchmark not in known or not file.exists():
        raise UserError(f"{benchmark} is no benchmark of {round_}; it has {', '.join(known)}")
    own = _table(file)
    described = common.get("description", {})
    merged: dict[tuple[str, Any], Rule] = {}
    for table, path, names in ((common, common_file, ("common", division)), (own, file, ("common", division))):
        for name in names:
            for raw in table.get(name, []):
                rule = _rule(raw, path)
                merged[(rule.key, rule.when)] = rule
    text = tuple(
        dataclasses.replace(rule, level=raw.get("level", "warn"))
        for table, path in ((common, common_file), (own, file))
        for raw in table.get("text", [])
        if raw.get("division", "closed") == division
        for rule in [_rule({"count": "optional", **raw}, path)]
    )
    contradictions = []
    for table, path in ((common, common_file), (own, file)):
        for raw in table.get("contradiction", []):
            if division in raw.get("divisions", DIVISIONS):
                contradictions.append(_contradiction(raw, path, merged))
    result = _section(own, "benchmark", file)
    seeds = common.get("seeds", {})
    return Ruleset(
        round=round_,
        benchmark=benchmark,
        division=division,
        official=about.get("ruleset", ""),
        benchmarks=known,
        rules=(*merged.values(), *text),
        contradictions=tuple(contradictions),
        runs=result.get("runs", 1),
        may_fail=result.get("may_fail", 0),
        runs_source=result.get("source", str(file.name)),
        seeds=seeds.get("missing", "warn"),
        seeds_source=seeds.get("source", ""),
        fields=tuple(described.get("fields", ())),
        statuses=tuple(described.get("statuses", ())),
        status_level=described.get("status_level", "warn"),
        description_source=described.get("source", ""),
    )


def _table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the rule file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"rule file {path} is no TOML: {error}") from None


def _section(table: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    needed = {"round": ("benchmarks",), "benchmark": ("runs",)}[name]
    section = table.get(name)
    if not isinstance(section, dict) or any(key not in section for key in needed):
        raise UserError(f"rule file {path}: [{name}] with {', '.join(needed)} is missing")
    return section


def _rule(raw: Mapping[str, Any], path: Path) -> Rule:
    where = f"rule file {path.parent.name}/{path.name}: key {raw.get('key')!r}"
    if not isinstance(raw.get("key"), str):
        raise UserError(f"{where}: every rule needs a key")
    if unknown := sorted(set(raw) - RULE_KEYS):
        raise UserError(f"{where}: unknown entry {unknown[0]!r}; there are {', '.join(sorted(RULE_KEYS))}")
    if raw.get("count", "any") not in COUNTS:
        raise UserError(f"{where}: count = {raw['count']!r} is none of {', '.join(COUNTS)}")
    if not raw.get("source"):
        raise UserError(f"{where}: a rule needs a source")
    if raw.get("derived", "") not in ("", "metrics_by_samples"):
        raise UserError(f"{where}: derived = {raw['derived']!r} is not known; there is metrics_by_samples")
    source = raw["source"]
    when = raw.get("when")
    return Rule(
        key=raw["key"],
        count=raw.get("count", "any"),
        source=source + (f":{raw['line']}" if "line" in raw else ""),
        at_least=raw.get("at_least", 0),
        alternative=raw.get("alternative", ""),
        checks=_checks(raw.get("check", []), source, where),
        first=_checks(raw.get("first", []), source, where),
        reached=_checks(raw.get("reached", []), source, where),
        when=(when["key"], when["value"]) if when else None,
        derived=raw.get("derived", ""),
        level=raw.get("level", "fail"),
        name=raw.get("name", ""),
    )


def _checks(raw: list[Mapping[str, Any]], source: str, where: str) -> tuple[forms.Check, ...]:
    found = []
    for one in raw:
        check, wrong = forms.parse(one, source, where)
        if check is None:
            raise UserError(wrong)
        found.append(check)
    return tuple(found)


def _contradiction(raw: Mapping[str, Any], path: Path, merged: dict[tuple[str, Any], Rule]) -> Contradiction:
    """One contradiction; the rule that is followed stands in `merged` then."""
    where = f"rule file {path.parent.name}/{path.name}: contradiction {raw.get('name')!r}"
    for need in ("name", "one", "another", "followed", "source"):
        if not raw.get(need):
            raise UserError(f"{where}: {need} is missing")
    rule = other = None
    checker_followed = raw.get("follow", "ours") == "checker"
    if "key" in raw:
        checkers = next((rule for (key, _), rule in merged.items() if key == raw["key"]), None)
        base = checkers or Rule(raw["key"], "any", raw["source"])
        replaced: dict[str, Any] = {"source": raw["source"]}
        for entry, attribute in (("check", "checks"), ("first", "first"), ("reached", "reached")):
            if entry in raw:
                replaced[attribute] = _checks(raw[entry], raw["source"], where)
        for entry in ("count", "alternative"):
            if entry in raw:
                replaced[entry] = raw[entry]
        ours = dataclasses.replace(base, **replaced)
        if checker_followed:
            rule, other = base, ours
        else:
            rule, other = ours, checkers
        merged[(base.key, base.when)] = rule
    return Contradiction(
        name=raw["name"],
        one=raw["one"],
        another=raw["another"],
        followed=raw["followed"],
        level=raw.get("level", "note"),
        source=raw["source"],
        rule=rule,
        other=other,
        checker_followed=checker_followed,
    )
