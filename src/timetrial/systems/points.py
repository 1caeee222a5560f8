"""Rates from points measured on a machine: what a calibration run or a user's own measurements hold.

A JSON file of
    {"matmul": {"bf16": [[m, n, k, microseconds], ...]},
     "attention": {"bf16": [[batch, heads, kv_heads, tokens, kv_tokens, head_dim, causal, backward, us], ...]},
     "memory": [[bytes moved, microseconds], ...],
     "collectives": {"all_reduce": {"2": [[bytes of the whole tensor, microseconds], ...]}}}
of which matmul and memory must be there; causal and backward are 0 or 1. What eager code costs beside these stands
in `eager.py`, notes of the measurement under "notes", which are for people. Between points, rates are averaged by
distance in the logarithms of the sizes; the spread is that of each point predicted from the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timetrial.errors import UserError
from timetrial.systems import eager
from timetrial.systems.curves import Attention, Line, Matmul

Point = tuple[tuple[float, ...], float]
"""(logarithms of the sizes, logarithm of FLOP/s)."""


@dataclass(frozen=True)
class MatmulPoints:
    """Products at the rate of the nearest measured ones."""

    points: tuple[Point, ...]

    def seconds(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """See curves.Matmul; a batch is one product after another."""
        return 2 * batch * m * n * k / _rate(self.points, (math.log(m), math.log(n), math.log(k)))


@dataclass(frozen=True)
class AttentionPoints:
    """Attention at the rate of the nearest measured kernels of the same pass and mask."""

    groups: Mapping[tuple[bool, bool], tuple[Point, ...]]
    """(causal, backward) -> points; what was not measured takes the other mask's, then the forward pass's rate."""

    def seconds(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        tokens: int,
        kv_tokens: int,
        head_dim: int,
        causal: bool,
        backward: bool,
    ) -> float:
        """See curves.Attention."""
        wanted = [(causal, backward), (not causal, backward), (causal, False), (not causal, False)]
        points = next(self.groups[key] for key in wanted if key in self.groups)
        where = (math.log(batch * heads), math.log(tokens), math.log(kv_tokens), math.log(head_dim))
        return _attention_flops(batch, heads, tokens, kv_tokens, head_dim, causal, backward) / _rate(points, where)


@dataclass(frozen=True)
class Points:
    """A file's content, ready for use."""

    matmul: dict[str, Matmul]
    attention: dict[str, Attention]
    memory: Line
    collectives: dict[str, dict[int, Line]]
    spread: dict[str, float]
    eager: eager.Eager | None
    """None where the file is not of a calibration."""


def read(path: Path) -> Mapping[str, Any]:
    """The content of a file of points. Raises UserError where it cannot be read or is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"rates file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"rates file {path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"rates file {path} holds no object; see docs/systems.md for its form")
    return content


def parse(content: Mapping[str, Any], where: str) -> Points:
    """Raises UserError naming the table and row that is not as described above."""
    for table in ("matmul", "memory"):
        if not content.get(table):
            raise UserError(f"rates file {where} has no {table}; measure at least one point")
    spread: dict[str, float] = {}
    matmul: dict[str, Matmul] = {}
    for fmt, rows in _table(content, "matmul", where).items():
        points = []
        for m, n, k, us in _rows(rows, 4, f"{where}: matmul.{fmt}"):
            points.append(((math.log(m), math.log(n), math.log(k)), math.log(2 * m * n * k / us * 1e6)))
        matmul[fmt] = MatmulPoints(tuple(points))
        _note(spread, f"matmul.{fmt}", points)
    attention: dict[str, Attention] = {}
    for fmt, rows in _table(content, "attention", where).items():
        groups: dict[tuple[bool, bool], list[Point]] = {}
        for row in _rows(rows, 9, f"{where}: attention.{fmt}", flags=(6, 7)):
            batch, heads, _, tokens, kv_tokens, head_dim, causal, backward, us = row
            flops = _attention_flops(batch, heads, tokens, kv_tokens, head_dim, bool(causal), bool(backward))
            sizes = (math.log(batch * heads), math.log(tokens), math.log(kv_tokens), math.log(head_dim))
            groups.setdefault((bool(causal), bool(backward)), []).append((sizes, math.log(flops / us * 1e6)))
        if not any(not backward for _, backward in groups):
            raise UserError(f"rates file {where}: attention.{fmt} has no forward kernel; measure one")
        attention[fmt] = AttentionPoints({key: tuple(points) for key, points in groups.items()})
        for back, name in ((False, f"attention.{fmt}"), (True, f"attention.{fmt}.backward")):
            _note(spread, name, [p for (_, b), points in groups.items() if b == back for p in points])
    memory = _line(content["memory"], f"{where}: memory")
    collectives = {
        kind: {_ranks(n, where): _line(rows, f"{where}: collectives.{kind}.{n}") for n, rows in by_ranks.items()}
        for kind, by_ranks in _table(content, "collectives", where).items()
    }
    return Points(matmul, attention, memory, collectives, spread, eager.parse(content, where, _line))


def _rate(points: Sequence[Point], where: tuple[float, ...]) -> float:
    """FLOP/s, the geometric mean of the points' by the inverse square of their distances."""
    weights = total = 0.0
    for sizes, rate in points:
        squared = 1e-6
        for a, b in zip(sizes, where, strict=True):
            squared += (a - b) * (a - b)
        weight = 1 / (squared * squared)
        weights += weight
        total += weight * rate
    return math.exp(total / weights)


def _attention_flops(
    batch: float, heads: float, tokens: float, kv_tokens: float, head_dim: float, causal: bool, backward: bool
) -> float:
    square = (10 if backward else 4) * batch * heads * tokens * kv_tokens * head_dim
    return square / 2 if causal else square


def _note(spread: dict[str, float], key: str, points: Sequence[Point]) -> None:
    """Error of each point predicted from the others; 1 where there are no others."""
    errors = sorted(
        abs(math.exp(rate) / _rate([*points[:i], *points[i + 1 :]], sizes) - 1)
        for i, (sizes, rate) in enumerate(points)
        if len(points) > 1
    )
    spread[key] = errors[len(errors) // 2] if errors else 1.0
    spread[f"{key}.p90"] = errors[int(len(errors) * 0.9)] if errors else 1.0


def _table(content: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"rates file {where}: {name} is no object; see docs/systems.md for its form")
    return table


def _ranks(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise UserError(f"rates file {where}: collectives over {text!r} ranks; give a number from 2")
    return int(text)


def _rows(rows: Any, width: int, where: str, flags: tuple[int, ...] = ()) -> list[list[float]]:
    if not isinstance(rows, list) or not rows:
        raise UserError(f"rates file {where} holds no rows")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width:
            raise UserError(f"rates file {where}, row {i + 1}: {row!r}; give {width} numbers")
        for column, value in enumerate(row):
            good: Callable[[Any], bool] = _flag if column in flags else _positive
            if not good(value):
                want = "0 or 1" if column in flags else "a number above 0"
                raise UserError(f"rates file {where}, row {i + 1}, column {column + 1}: {value!r}; give {want}")
    return rows


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _flag(value: Any) -> bool:
    return value in (0, 1)


def _line(rows: Any, where: str) -> Line:
    ordered = sorted(_rows(rows, 2, where))
    sizes = tuple(size for size, _ in ordered)
    if len(set(sizes)) < len(sizes):
        raise UserError(f"rates file {where} holds a size twice")
    return Line(sizes, tuple(us / 1e6 for _, us in ordered))
