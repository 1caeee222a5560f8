"""Many rows at once: a CSV of published or planned runs in, the same rows with predictions out.

One bad row never stops the others. Its status is one line that says why it has no prediction; a row
that breaks the predictor itself has the exception's type and words there and is counted apart.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from timetrial.errors import UserError
from timetrial.predict.request import ALIASES, Request, clean, normal, request

ADDED = ("predicted_step_time_s", "predicted_memory_gib", "predicted_tflops_per_gpu", "predicted_ttt_min", "status")
"""Columns that `write` puts after those of the input."""

OK = "ok"
LONGEST = 300
"""Characters of a status."""


KNOWN = frozenset(alias for aliases in ALIASES.values() for alias in aliases)
"""Columns that are read, as `normal` spells them."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    line: int
    """Of the file, where the row ends; the header is line 1."""
    cells: tuple[str, ...]
    """As written, as many as the table has columns."""
    wanted: Request | None
    """None when the row has no request."""
    problem: str = ""
    """Why it has none, one line."""


@dataclass(frozen=True)
class Rows:
    """A table."""

    path: str
    """File that it was read from, "-" for standard input."""
    columns: tuple[str, ...]
    """Names as written, in order; "" over cells that have no name."""
    rows: tuple[Row, ...]
    delimiter: str = ","


@dataclass(frozen=True)
class Answer:
    """A prediction for one row; None where there is none of it."""

    step_time_s: float | None = None
    memory_bytes: float | None = None
    """Of the fullest accelerator, at its peak."""
    tflops_per_gpu: float | None = None
    """Model TFLOP/s per accelerator: no recomputation, causal attention halved."""
    ttt_min: float | None = None
    """Time to train, minutes; None for rows that do not converge."""
    status: str = OK
    """`ok`, or one line why there is no prediction."""
    broke: bool = False
    """Whether the predictor itself failed."""


@dataclass(frozen=True)
class Results:
    """Answers to the rows of a table, in its order."""

    answers: tuple[Answer, ...]

    @property
    def predicted(self) -> int:
        return sum(a.status == OK for a in self.answers)

    @property
    def broken(self) -> int:
        """Rows at which the predictor itself failed."""
        return sum(a.broke for a in self.answers)

    @property
    def summary(self) -> str:
        """`154 of 162 rows predicted, 8 without a prediction (see status)`."""
        total = len(self.answers)
        text = f"{self.predicted} of {total} row{'' if total == 1 else 's'} predicted"
        if without := total - self.predicted - self.broken:
            text += f", {without} without a prediction (see status)"
        if self.broken:
            text += f", {self.broken} broke the predictor (see status)"
        return text


def read(path: str | Path) -> Rows:
    """The table at `path`, a CSV with a header line; "-" is standard input.

    Commas, or semicolons or tabs where the header has no comma; UTF-8 or, with its mark, UTF-16. Empty lines
    are left out. Raises UserError when there is no table, or none of its columns is known.
    """
    name = str(path)
    text = _text(name)
    header = next((line for line in text.splitlines() if line.strip()), "")
    if not header:
        raise UserError(f"{name}: is empty; its first line must name columns, such as benchmark,accelerator,gbs")
    delimiter = max(",;\t", key=header.count) if "," not in header else ","
    _check_quotes(name, text, delimiter)
    lines: list[tuple[int, list[str]]] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        for cells in reader:
            if len(cells) > 1 or (cells and cells[0].strip()):
                lines.append((reader.line_num, cells))
    except csv.Error as error:
        raise UserError(f"{name} line {reader.line_num}: is no CSV ({error}); quote cells that hold quotes") from None
    columns, body = lines[0][1], lines[1:]
    if not {normal(c) for c in columns} & KNOWN:
        raise UserError(f"{name}: no column of the first line is known; it needs some of {', '.join(_main_columns())}")
    width = max(len(cells) for _, cells in lines)
    named = len(columns)
    columns += [""] * (width - named)
    rows = tuple(_row(number, columns, named, cells) for number, cells in body)
    return Rows(name, tuple(columns), rows, delimiter)


def predict_rows(rows: Rows, predict: Callable[[Request], Answer]) -> Results:
    """`predict` asked for every row that has a request. No row's failure reaches another."""
    return Results(tuple(_answer(row, predict) for row in rows.rows))


def write(rows: Rows, results: Results, path: str | Path) -> None:
    """The table with the predictions as further columns, to `path` at once or not at all; "-" is standard output.

    Predictions of an earlier run, all five columns of them, are replaced. Raises UserError when `path` is
    the table that was read, or cannot be written.
    """
    if len(rows.rows) != len(results.answers):
        raise ValueError(f"{len(results.answers)} answers for {len(rows.rows)} rows")
    kept = [i for i, name in enumerate(rows.columns) if name not in ADDED or not set(ADDED) <= set(rows.columns)]
    out = io.StringIO()
    writer = csv.writer(out, delimiter=rows.delimiter, lineterminator="\n")
    writer.writerow([rows.columns[i] for i in kept] + list(ADDED))
    for row, answer in zip(rows.rows, results.answers, strict=True):
        writer.writerow([row.cells[i] for i in kept] + _added(answer))
    if str(path) == "-":
        sys.stdout.write(out.getvalue())
        sys.stdout.flush()
        return
    _write_file(Path(path), rows.path, out.getvalue())


def _check_quotes(name: str, text: str, delimiter: str) -> None:
    """Raise UserError where a quote opens and never closes: it would take all rows behind it into one cell."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    start = 1
    try:
        for _ in reader:
            start = reader.line_num + 1
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise UserError(f"{name} line {start}: a quote opens and never closes; close or remove it") from None


def _row(line: int, columns: Sequence[str], named: int, cells: list[str]) -> Row:
    padded = tuple(cells + [""] * (len(columns) - len(cells)))
    if any(cell.strip() for cell in padded[named:]):
        return Row(
            line, padded, None, f"line {line} has {len(cells)} cells for {named} columns; quote those with commas"
        )
    try:
        return Row(line, padded, request(_by_name(columns, padded)))
    except UserError as error:
        return Row(line, padded, None, _one_line(str(error)))


def _by_name(columns: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    """Column -> cell; of columns of one name the one that is told. Raises UserError where two tell different things."""
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, str] = {}
    for at, (name, cell) in enumerate(zip(columns, cells, strict=True)):
        before, own = first.setdefault(normal(name), (at, name))
        old = clean(found.get(own, ""))
        if not old:
            found[own] = cell
        elif normal(name) in KNOWN and clean(cell) not in ("", old):
            raise UserError(
                f"columns {before + 1} and {at + 1} are both {own.strip()} and say {old} and {clean(cell)}; keep one"
            )
    return found


def _answer(row: Row, predict: Callable[[Request], Answer]) -> Answer:
    if row.wanted is None:
        return Answer(status=row.problem)
    try:
        answer = predict(row.wanted)
        figures = (answer.step_time_s, answer.memory_bytes, answer.tflops_per_gpu, answer.ttt_min)
        if any(f is not None and not (math.isfinite(f) and f >= 0) for f in figures):
            raise ValueError(f"the prediction is no number: {answer}")
        return answer
    except UserError as error:
        return Answer(status=_one_line(str(error)))
    except Exception as error:  # one row's failure must not cost the others theirs; it is told, and counted
        return Answer(status=_one_line(f"{type(error).__name__}: {error}"), broke=True)


def _added(answer: Answer) -> list[str]:
    memory = None if answer.memory_bytes is None else answer.memory_bytes / 2**30
    figures = (answer.step_time_s, memory, answer.tflops_per_gpu, answer.ttt_min)
    return ["" if f is None else f"{f:.6g}" for f in figures] + [_one_line(answer.status)]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def _main_columns() -> list[str]:
    return [ALIASES[key][0] for key in ("benchmark", "model", "system", "accelerators", "gbs", "tp", "pp", "precision")]


def _text(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror}); give a CSV file") from None
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8 (byte {error.start}); save it as CSV in UTF-8") from None
    if "\0" in text:
        raise UserError(f"{name}: holds zero bytes, so it is no text; give a CSV file")
    return text


def _write_file(path: Path, source: str, text: str) -> None:
    try:
        if source != "-" and path.exists() and path.samefile(source):
            raise UserError(f"{path}: is the table that was read; write to another file")
        if path.exists() and not path.is_file():  # a pipe, or /dev/stdout: nothing to rename over
            path.write_text(text, encoding="utf-8")
            return
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); give another file") from None
