"""Numbers in rule files: small expressions in prefix lists, `["over", ["times", 8e-5, "global_batch_size"], 1152]`.

The head is one of OPERATORS, or `key` for a bare key; a string inside a list is the last value of that key in the log
so far. Operations are those of Python on numbers in the order written, so that a rule taken over from the official
checker's configuration gives the same float. Nothing is evaluated as code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OWN = "value"
"""In an expression: the value of the event itself."""


class Missing(Exception):
    """An expression needs a key that the log did not give before."""


@dataclass
class Seen:
    """What the log told before the event at hand."""

    values: dict[str, Any]
    """Key -> its last value."""
    first_ms: dict[str, int]
    """Key -> time of its first event, Unix milliseconds."""
    counts: dict[str, int]
    """Key -> events so far."""
    division: str = "closed"
    last: dict[tuple[str, str], Any] = field(default_factory=dict)
    """(key, what of it) -> the last value that an `every` form looked at."""


def is_whole(x: float) -> bool:
    return bool(abs(round(x) - x) < 0.00001)  # the checker's own idea of an integer (mlp_compliance.py:19)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: a - b,
    "times": lambda a, b: a * b,
    "over": lambda a, b: a / b,
    "ceil": math.ceil,
    "floor": math.floor,
    "root": lambda a: a**0.5,
    "most": max,
    "least": min,
    "rounded": round,
}
"""Operator -> what it does; `key` alone, for a bare key, is read by `number`."""
WORDS = {"plus": "+", "minus": "-", "times": "*", "over": "/"}


def number(expression: Any, seen: Seen, own: Any = None) -> Any:
    """The value of an expression. Raises Missing for a key not seen yet, and what Python's arithmetic raises."""
    if not isinstance(expression, list):
        return expression
    head, *rest = expression
    if head == "key":
        return _key(rest[0], seen, own)
    return OPERATORS[head](*(_key(x, seen, own) if isinstance(x, str) else number(x, seen, own) for x in rest))


def _key(name: str, seen: Seen, own: Any) -> Any:
    if name == OWN:
        return own
    if name not in seen.values:
        raise Missing(name)
    return seen.values[name]


def keys_of(expression: Any) -> list[str]:
    """Keys that an expression needs, each once."""
    if not isinstance(expression, list):
        return []
    found: list[str] = []
    for part in expression[1:]:
        found += [part] if isinstance(part, str) and part != OWN else keys_of(part)
    return list(dict.fromkeys(found))


def words(expression: Any) -> str:
    """An expression as people write it."""
    if not isinstance(expression, list):
        return repr(expression)
    head, *rest = expression
    parts = [x if isinstance(x, str) else words(x) for x in rest]
    if head == "key":
        return parts[0]
    if head in WORDS:
        wrapped = [f"({p})" if isinstance(x, list) and x[0] in WORDS else p for p, x in zip(parts, rest, strict=True)]
        return f" {WORDS[head]} ".join(wrapped)
    return f"{head}({', '.join(parts)})"


def bad_expression(expression: Any) -> str | None:
    """What is wrong with an expression of a rule file, or None."""
    if not isinstance(expression, list):
        return None
    if not expression or not isinstance(expression[0], str):
        return f"{expression!r} does not begin with an operator"
    head, *rest = expression
    if head == "key":
        return None if len(rest) == 1 and isinstance(rest[0], str) else f"{expression!r}: `key` takes one name"
    if head not in OPERATORS:
        return f"unknown operator {head!r}; there are key, {', '.join(OPERATORS)}"
    arity = 1 if head in ("ceil", "floor", "root") else 2
    if len(rest) != arity:
        return f"{head!r} takes {arity} operand{'s' if arity > 1 else ''}, not {len(rest)}"
    return next((bad for bad in map(bad_expression, rest) if bad), None)
