"""Numbers as people read them: each with its unit, as many digits as carry meaning, never more.

Units follow a no-break space, so that a figure and its unit stay on one line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

NBSP = "\u00a0"
DOT = "\u00b7"
MINUS = "\u2212"
NONE = "\u2013"
"""What stands where there is no number: an en dash."""


def significant(x: float, digits: int = 3) -> str:
    """`x` rounded to significant digits, thousands separated: 0.0123, 4.57, 12,300."""
    if not math.isfinite(x):
        return _not_finite(x)
    if x == 0:
        return "0"
    if abs(x) < 1e-4:
        mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    magnitude = int(f"{x:.{digits - 1}e}".split("e")[1])  # of the rounded value: 99.96 has that of 100
    return f"{round(x, digits - 1 - magnitude):,.{max(0, digits - 1 - magnitude)}f}"


def count(n: float) -> str:
    """A whole number of things, in full: 1,234,567."""
    return f"{n:,.0f}" if math.isfinite(n) else _not_finite(n)


def several(n: int, thing: str, plural: str = "s") -> str:
    """A number of things: 1 step, 2 steps."""
    return f"{n:,} {thing}{'' if n == 1 else plural}"


def between(low: str, high: str, unit: str = "") -> str:
    """A range; one figure where its ends read alike."""
    return f"{low if low == high else f'{low} to {high}'}{unit}"


def compact(n: float) -> str:
    """A number for an axis or a headline: 950, 12,500, 450 k, 3 M, 8.03 B."""
    if not math.isfinite(n):
        return _not_finite(n)
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e5, "k")):
        if abs(n) >= scale:
            unit = 1e3 if suffix == "k" else scale
            return f"{f'{n / unit:.3g}' if abs(n) < 1e3 * unit else f'{n / unit:,.0f}'}{NBSP}{suffix}"
    return f"{n:,.0f}" if abs(n) >= 1000 or float(n).is_integer() else f"{n:.3g}"


def duration(seconds: float) -> str:
    """A stretch of time: 850 us, 12.3 ms, 4.2 s, 3 min 41 s, 2 h 5 min."""
    if not math.isfinite(seconds):
        return _not_finite(seconds)
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds == 0:
        return f"0{NBSP}s"
    if seconds < 0.9995e-3:
        return f"{significant(seconds * 1e6)}{NBSP}\u00b5s"
    if seconds < 0.9995:
        return f"{significant(seconds * 1e3)}{NBSP}ms"
    if seconds < 59.95:
        return f"{significant(seconds)}{NBSP}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}{NBSP}min{NBSP}{whole % 60}{NBSP}s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,}{NBSP}h{NBSP}{minutes % 60}{NBSP}min"


def percent(share: float) -> str:
    """A share of one: 0.4 %, 12 %, 41.5 %."""
    if not math.isfinite(share):
        return _not_finite(share)
    value = share * 100
    if 0 < value < 0.05:
        return f"<{NBSP}0.1{NBSP}%"
    return f"{value:.1f}{NBSP}%" if value < 99.95 else f"{value:.0f}{NBSP}%"


def flops(rate: float) -> str:
    """A rate of floating-point operations: 157 GFLOP/s."""
    return _scaled(rate, "FLOP/s", 1000.0, ("", "k", "M", "G", "T", "P", "E"))


def size(n_bytes: float) -> str:
    """An amount of memory, in binary units: 23.6 GiB."""
    return _scaled(n_bytes, "B", 1024.0, ("", "Ki", "Mi", "Gi", "Ti"))


def date(value: Any) -> str:
    """An ISO date and time as `2025-01-31 17:05 UTC`; anything else as it is."""
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return plain(value)
    zone = moment.tzname() or ""
    return f"{moment:%Y-%m-%d %H:%M} {zone}".strip()


def flatten(values: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested objects, in their order."""
    for key, value in values.items():
        name = f"{head}.{key}" if head else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        else:
            yield name, value


def plain(value: Any) -> str:
    """A configuration value as `--set` takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(plain(item) for item in value)
    return str(value)


def _scaled(x: float, unit: str, step: float, prefixes: tuple[str, ...]) -> str:
    if not math.isfinite(x):
        return _not_finite(x)
    index = 0
    while abs(x) >= step and index < len(prefixes) - 1:
        x, index = x / step, index + 1
    return f"{significant(x)}{NBSP}{prefixes[index]}{unit}"


def _not_finite(x: float) -> str:
    return NONE if math.isnan(x) else ("\u221e" if x > 0 else "-\u221e")
