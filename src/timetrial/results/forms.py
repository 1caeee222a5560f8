"""The closed vocabulary of rules: what a rule file may ask of an event, and how that is answered.

A rule file is data: it names one of the FORMS below with its parameters; numbers may be expressions (`expressions.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from timetrial.results.expressions import OWN, Missing, Seen, bad_expression, is_whole, number, words
from timetrial.results.records import LogEvent


@dataclass(frozen=True)
class Check:
    """One thing asked of the events of a key."""

    form: str
    """One of FORMS."""
    parameters: Mapping[str, Any]
    """Of the form; checked by `parse`."""
    source: str
    """Where it stands: file and line."""
    of: str = OWN
    """What of the event is meant: `value`, `metadata.NAME` or `value.NAME`."""
    when_has: str = ""
    """Asked only where the event's metadata has this name."""


@dataclass(frozen=True)
class Form:
    """One form: its parameters, whether it holds, and how it is said."""

    needs: tuple[str, ...]
    holds: Callable[[Any, Mapping[str, Any], Seen, LogEvent], bool]
    """(subject, parameters, seen, event); may raise TypeError, ValueError, ArithmeticError or Missing."""
    says: Callable[[Mapping[str, Any]], str]


def _near(value: Any, p: Mapping[str, Any], seen: Seen, event: LogEvent) -> bool:
    return bool(abs(value - number(p["value"], seen, value)) < number(p["within"], seen, value))


def _same_ratio(value: Any, p: Mapping[str, Any], seen: Seen, event: LogEvent) -> bool:
    wanted = number(p["value"], seen, value)
    return bool(abs(value - wanted) <= p["relative"] * abs(wanted))


def _range(value: Any, p: Mapping[str, Any], seen: Seen, event: LogEvent) -> bool:
    return bool(number(p["least"], seen, value) <= value <= number(p["most"], seen, value))


def _within_minutes(value: Any, p: Mapping[str, Any], seen: Seen, event: LogEvent) -> bool:
    if p["key"] not in seen.first_ms:
        return True  # that it is missing is another rule's matter
    return bool(event.time_ms - seen.first_ms[p["key"]] < p[seen.division] * 60 * 1e3)


def _stepping(value: Any, p: Mapping[str, Any], seen: Seen, event: LogEvent) -> bool:
    first, step = number(p["first"], seen), number(p["step"], seen)
    return bool(value == first + seen.counts.get(event.key, 0) * step)


def _every(value: Any, p: Mapping[str, Any], seen: Seen, event: LogEvent) -> bool:
    place = (event.key, p["name"])
    step, slack = number(p["step"], seen), number(p["slack"], seen)
    before = seen.last.get(place)
    seen.last[place] = value
    if before is None:
        return bool(abs(value - number(p["first"], seen)) <= slack)
    return bool(value == before or abs(value - before - step) <= 1e-3 * step)


def _compare(op: Callable[[Any, Any], bool]) -> Callable[[Any, Mapping[str, Any], Seen, LogEvent], bool]:
    return lambda value, p, seen, event: bool(op(value, number(p["value"], seen, value)))


def _one(word: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda p: f"{word} {words(p['value'])}".strip()


FORMS: Mapping[str, Form] = {
    "equals": Form(("value",), _compare(lambda a, b: a == b), _one("")),
    "near": Form(("value", "within"), _near, lambda p: f"{words(p['value'])} within {words(p['within'])}"),
    "proportional": Form(("value", "relative"), _same_ratio, lambda p: f"{words(p['value'])} (to {p['relative']!r})"),
    "one_of": Form(
        ("values",),
        lambda value, p, seen, event: value in [number(v, seen, value) for v in p["values"]],
        lambda p: "one of " + ", ".join(words(v) for v in p["values"]),
    ),
    "near_one_of": Form(
        ("values", "relative"),
        lambda value, p, seen, event: any(
            abs(value - wanted) <= p["relative"] * abs(wanted)
            for wanted in (number(v, seen, value) for v in p["values"])
        ),
        lambda p: " or ".join(words(v) for v in p["values"]),
    ),
    "below": Form(("value",), _compare(lambda a, b: a < b), _one("below")),
    "at_most": Form(("value",), _compare(lambda a, b: a <= b), _one("at most")),
    "above": Form(("value",), _compare(lambda a, b: a > b), _one("above")),
    "at_least": Form(("value",), _compare(lambda a, b: a >= b), _one("at least")),
    "range": Form(("least", "most"), _range, lambda p: f"{words(p['least'])} to {words(p['most'])}"),
    "whole": Form((), lambda value, p, seen, event: is_whole(value), lambda p: "a whole number"),
    "multiple_of": Form(("value",), _compare(lambda a, b: a % b == 0), _one("a multiple of")),
    "multiple_near": Form(("value",), _compare(lambda a, b: is_whole(a / b)), _one("a multiple of")),
    "power_of_two": Form(
        ("value",), _compare(lambda a, b: is_whole(math.log2(a / b))), lambda p: f"{words(p['value'])} * 2^N"
    ),
    "equation": Form(
        ("left", "right"),
        lambda value, p, seen, event: bool(number(p["left"], seen, value) == number(p["right"], seen, value)),
        lambda p: f"{words(p['left'])} == {words(p['right'])}, as floating-point numbers",
    ),
    "not_empty": Form((), lambda value, p, seen, event: value != "", lambda p: "not empty"),
    "has": Form(
        ("any",),
        lambda value, p, seen, event: any(name in value for name in p["any"]),
        lambda p: " or ".join(p["any"]),
    ),
    "before": Form(
        ("key",), lambda value, p, seen, event: p["key"] not in seen.first_ms, lambda p: f"before {p['key']}"
    ),
    "after": Form(("key",), lambda value, p, seen, event: p["key"] in seen.first_ms, lambda p: f"after {p['key']}"),
    "within_minutes": Form(
        ("key", "closed", "open"),
        _within_minutes,
        lambda p: f"less than {p['closed']} (closed) or {p['open']} (open) minutes after {p['key']}",
    ),
    "stepping": Form(
        ("first", "step"), _stepping, lambda p: f"{words(p['first'])}, then every {words(p['step'])}, none left out"
    ),
    "every": Form(
        ("first", "step", "slack", "name"),
        _every,
        lambda p: f"first {words(p['first'])} (give or take {words(p['slack'])}), then every {words(p['step'])}",
    ),
}


def subject(check: Check, event: LogEvent) -> Any:
    """What of the event the check is about. Raises KeyError where it is not there."""
    place, _, name = check.of.partition(".")
    inside: Any = event.metadata if place == "metadata" else event.value
    return inside[name] if name else inside


def holds(check: Check, event: LogEvent, seen: Seen) -> tuple[bool, str]:
    """Whether the event does what is asked, and, where it could not be answered, why in a few words."""
    if check.when_has and check.when_has not in event.metadata:
        return True, ""
    try:
        return FORMS[check.form].holds(subject(check, event), check.parameters, seen, event), ""
    except Missing as missing:
        return False, f"{missing} is not logged before {event.key}"
    except ZeroDivisionError:
        return False, "it divides by zero"
    except KeyError as missing:
        return False, f"{check.of.partition('.')[0]} has no {missing.args[0]}"
    except (TypeError, ValueError, OverflowError):
        return False, "its type cannot be compared"


def asks(check: Check, seen: Seen | None = None, event: LogEvent | None = None) -> str:
    """What is asked, in words; with the number that it comes to where one can be told."""
    text = FORMS[check.form].says(check.parameters)
    if check.of != OWN:
        text = f"{check.of} {text}" if check.form != "has" else f"{text} in its {check.of}"
    if seen is None or event is None:
        return text
    comes = []
    for name in ("value", "least", "most", "first", "step"):
        expression = check.parameters.get(name)
        if isinstance(expression, list):
            try:
                comes.append(exact(number(expression, seen, event.value)))
            except (Missing, TypeError, ValueError, ArithmeticError):
                return text
    return f"{text} = {', '.join(comes)}" if comes else text


def exact(value: Any) -> str:
    """A number with all its digits, so that who sets a key to it keeps the rule: 1199872, 3e-05."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


def parse(raw: Mapping[str, Any], source: str, where: str) -> tuple[Check | None, str]:
    """(check, "") of one table of a rule file, or (None, what is wrong with it)."""
    known = {"form", "of", "when_has", "line", "source"}
    name = raw.get("form")
    if not isinstance(name, str) or name not in FORMS:
        return None, f"{where}: unknown form {name!r}; there are {', '.join(FORMS)}"
    form = FORMS[name]
    parameters = {key: value for key, value in raw.items() if key not in known}
    if missing := [need for need in form.needs if need not in parameters]:
        return None, f"{where}: form {name} needs {', '.join(missing)}"
    if unknown := [key for key in parameters if key not in form.needs]:
        return None, f"{where}: form {name} knows no {', '.join(unknown)}"
    for key, value in parameters.items():
        for expression in value if key == "values" else [value]:
            if key != "any" and (bad := bad_expression(expression)):
                return None, f"{where}: {key}: {bad}"
    of = raw.get("of", OWN)
    if of.partition(".")[0] not in ("value", "metadata"):
        return None, f"{where}: of = {of!r} is neither value nor metadata"
    line = raw.get("line")
    place = raw.get("source", source) + (f":{line}" if line is not None else "")
    return Check(name, parameters, place, of, raw.get("when_has", "")), ""
