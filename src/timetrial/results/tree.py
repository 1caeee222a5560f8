"""Find what can be scored under some paths: a log, a run's directory, a benchmark's directory, whole trees.

Layout of a results repository (training_policies submission_rules, mlperf-logging 4.1.68 package_checker.py:56-110):

    ROUND/ORGANIZATION/systems/SYSTEM.json
    ROUND/ORGANIZATION/results/SYSTEM/BENCHMARK/result_N.txt, scaling.json, power/

Order: by round, organization, system and benchmark as the directories sort. Links are followed, each directory is
read once, by its own path before any link, so that a loop ends. Code (`benchmarks/` beside `results/`) is left out.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from timetrial.errors import UserError
from timetrial.results import rounds
from timetrial.results.read import is_log
from timetrial.results.records import Finding, Level

LAYOUT = "mlperf-logging 4.1.68 package_checker.py:56-110"
PATTERN = re.compile(r"result_.*\.txt", re.DOTALL)
"""What the official programs take for a log (result_summarizer.py:361)."""
COMPRESSED = re.compile(r"result_.*\.txt\.(gz|xz|bz2|zst|zip|lz4|Z)", re.DOTALL)
"""Logs that nobody reads as they are."""
MAX_JSON = 16 << 20
"""Largest description or scaling file that is read, bytes."""
SKIPPED = frozenset(("power", "checkpoints", "adapters", "__pycache__"))
"""Directories without logs of runs."""


@dataclass(frozen=True)
class Entry:
    """What makes one result, or what cannot (`kind` problem: findings say why)."""

    path: Path
    """The benchmark's or run's directory, or the log."""
    kind: Literal["log", "run", "benchmark", "problem"]
    """One log; a directory of `timetrial train`; a directory with result_*.txt; nothing that can be scored."""
    logs: tuple[Path, ...]
    """By number."""
    round: str = ""
    """v5.0; empty where neither path nor user says."""
    round_source: str = ""
    """given, path, config.json or guess; empty with an empty round."""
    organization: str = ""
    system: str = ""
    benchmark: str = ""
    """The directory's name where the layout says that it is one; else empty: the logs tell."""
    description: dict[str, Any] | None = None
    """systems/SYSTEM.json."""
    description_path: Path | None = None
    """Where it stands or should stand; None outside of a tree."""
    scaling: float | None = None
    """Factor of scaling.json; None without a usable one."""
    scaling_path: Path | None = None
    """scaling.json where there is one, usable or not."""
    power_logs: tuple[Path, ...] = ()
    """power/result_N/*.txt."""
    others: tuple[Path, ...] = ()
    """Files and directories in the benchmark's directory that belong to nothing known."""
    preset: str = ""
    """official or mini for a run of `timetrial train`; else empty."""
    findings: tuple[Finding, ...] = field(default=())
    unknown_round: str = ""
    """Directory above that is named after a round without rules; `round` is then empty."""


def find(paths: Iterable[Path], round_: str = "") -> list[Entry]:
    """What is to be scored under `paths`, each once; `round_` overrides what the tree says.

    Logs given one by one make one result where they share a directory. Raises UserError for a path that does not
    exist or an unknown round. A path without any log gives an entry of kind `problem`.
    """
    given = rounds.named(round_) if round_ else ""
    entries: list[Entry] = []
    seen: set[tuple[int, int]] = set()
    single: dict[Path, list[Path]] = {}
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or 'cannot be read'}; give a log or a directory") from None
        if stat.S_ISDIR(status.st_mode):
            entries += _under(path, given, seen)
        else:
            single.setdefault(path.parent, []).append(path)
    entries += [_of_logs(parent, logs, given) for parent, logs in single.items()]
    return entries


def _of_logs(parent: Path, logs: list[Path], given: str) -> Entry:
    ordered = tuple(sorted(dict.fromkeys(logs), key=_number))
    if len(ordered) > 1:
        return _entry(parent, "benchmark", ordered, (), given)
    return _entry(ordered[0], "log", ordered, (), given)


def _under(root: Path, given: str, seen: set[tuple[int, int]]) -> Iterator[Entry]:
    """Entries of a tree, then what was odd about it."""
    notes: list[Finding] = []
    again: list[Path] = []
    found = False
    for entry in _walk(root, given, seen, notes, again):
        found = True
        yield entry
    if not found and not again:  # else it came with another path
        others = _sniffed(root)
        if others:
            asked, change = "logs named result_N.txt", "rename them: no official program reads others"
            wrong = _finding("warn", "names", f"{len(others)} logs with other names", asked, change, root)
            yield _entry(root, "benchmark", others, (), given, (wrong,))
        elif not notes:
            asked, change = "result_*.txt somewhere below", "give a directory with result logs"
            yield _problem(root, _finding("fail", "no_logs", "no result logs", asked, change, root))
    for note in notes:
        yield _problem(note.path or root, note)


def _walk(
    directory: Path, given: str, seen: set[tuple[int, int]], notes: list[Finding], again: list[Path]
) -> Iterator[Entry]:
    """Depth first by name; what links point to comes last, so that it keeps its own place in the tree."""
    nothing: tuple[tuple[int, int], ...] = ()
    stack = [(directory, nothing)]
    linked: deque[tuple[Path, tuple[tuple[int, int], ...]]] = deque()
    while stack or linked:
        here, parents = stack.pop() if stack else linked.popleft()
        try:
            status = here.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in seen:
                if identity in parents:
                    asked, change = "a tree without loops", "remove the link: it was not followed"
                    notes.append(
                        _finding("note", "loop", f"{here.name} links to a directory above", asked, change, here)
                    )
                else:
                    again.append(here)
                continue
            seen.add(identity)
            with os.scandir(here) as listing:
                names = sorted(listing, key=lambda item: item.name)
        except OSError as error:
            asked, change = "a directory that can be read", "check its permissions"
            notes.append(_finding("fail", "unreadable", error.strerror or "cannot be read", asked, change, here))
            continue
        logs = sorted((Path(item.path) for item in names if PATTERN.fullmatch(item.name)), key=_number)
        packed = [Path(item.path) for item in names if COMPRESSED.fullmatch(item.name)]
        if packed and not logs:
            notes.append(_packed(packed, here))
        children = [item for item in names if not PATTERN.fullmatch(item.name) and _is_directory(item)]
        if logs:
            others = [Path(item.path) for item in names if not PATTERN.fullmatch(item.name)]
            kind: Literal["run", "benchmark"] = "run" if (here / "config.json").is_file() else "benchmark"
            only = [path for path in packed if path.with_suffix("") not in logs]
            odd = (_packed(only, here),) if only else ()
            others = [path for path in others if path not in only]
            yield _entry(here, kind, tuple(logs), tuple(others), given, odd)
        elif here.parent.parent.name == "results" and here.name in rounds.known_benchmarks() and not children:
            asked, change = "result_0.txt, result_1.txt, ...", "put the logs there or remove the directory"
            yield _entry(here, "problem", (), (), given, (_finding("fail", "no_logs", "no logs", asked, change, here),))
        code = any(item.name == "results" for item in children)
        below = [
            item
            for item in children
            if item.name not in SKIPPED
            and not item.name.startswith(".")
            and not (code and item.name in ("benchmarks", "systems"))
        ]
        chain = (*parents, identity)
        stack += [(Path(item.path), chain) for item in reversed(below) if not item.is_symlink()]
        linked += [(Path(item.path), chain) for item in below if item.is_symlink()]


def _packed(packed: list[Path], here: Path) -> Finding:
    """Logs that no program reads as they are."""
    one = len(packed) == 1
    names = ", ".join(path.name for path in packed[:4])
    found = f"{names} is compressed, and was not read" if one else f"{len(packed)} compressed logs, not read: {names}"
    return _finding("fail", "compressed", found, "result_N.txt", "unpack it" if one else "unpack them", here)


def _is_directory(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False


def _sniffed(root: Path) -> tuple[Path, ...]:
    """Logs of other names right in `root`."""
    try:
        names = sorted(root.iterdir())
    except OSError:
        return ()
    texts = [path for path in names if path.suffix in (".txt", ".log", ".out", ".mllog", "")]
    return tuple(sorted((path for path in texts[:200] if is_log(path)), key=_number))


def _number(path: Path) -> tuple[str, int, str]:
    """By number where a name ends in one: result_2 before result_10."""
    match = re.fullmatch(r"(.*?)(\d{1,9})\.[a-z]+", path.name, re.ASCII | re.DOTALL)
    return (match[1], int(match[2]), path.name) if match else (path.name, -1, path.name)


def _entry(
    path: Path,
    kind: Literal["log", "run", "benchmark", "problem"],
    logs: tuple[Path, ...],
    others: tuple[Path, ...],
    given: str,
    findings: tuple[Finding, ...] = (),
) -> Entry:
    """One entry with what stands around it."""
    where = Path(os.path.abspath(path))
    directory = where.parent if kind == "log" else where
    in_tree = directory.parent.parent.name == "results"
    odd = list(findings)
    round_, source, preset, unknown = given, "given" if given else "", "", ""
    if not round_:
        above = directory.parents[2] if in_tree else directory  # systems have versions too
        round_, unknown = rounds.in_path(above), rounds.unknown_in_path(above)
        if unknown:
            round_ = ""
        source = "path" if round_ else ""
    config = _json(directory / "config.json", odd) if _is_file(directory / "config.json") else None
    if isinstance(config, dict):
        preset = str(config.get("preset") or "")
        if not given and config.get("round") in rounds.rounds():
            round_, source, unknown = config["round"], "config.json", ""
    description, description_path = None, None
    if in_tree:
        description_path = directory.parents[2] / "systems" / f"{directory.parent.name}.json"
        description = _description(description_path, odd)
    scaling_path = directory / "scaling.json"
    is_there = kind != "log" and _exists(scaling_path)
    own = {"scaling.json", "power", "package_checker_params"} if kind == "benchmark" else set()
    return Entry(
        path=path,
        kind=kind,
        logs=logs,
        round=round_,
        round_source=source,
        organization=_text(description, "submitter") or (directory.parents[2].name if in_tree else ""),
        system=directory.parent.name if in_tree else "",
        benchmark=directory.name if in_tree or directory.name in rounds.known_benchmarks() else "",
        description=description,
        description_path=description_path,
        scaling=_scaling(scaling_path, odd) if is_there else None,
        scaling_path=scaling_path if is_there else None,
        power_logs=_power(directory) if kind != "log" else (),
        others=tuple(other for other in others if other.name not in own) if kind == "benchmark" else (),
        preset=preset,
        findings=tuple(odd),
        unknown_round=unknown,
    )


def _power(directory: Path) -> tuple[Path, ...]:
    try:
        return tuple(sorted((directory / "power").glob("result_*/*.txt")))
    except OSError:
        return ()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _text(values: dict[str, Any] | None, key: str) -> str:
    value = (values or {}).get(key)
    return value if isinstance(value, str) else ""


def _json(path: Path, odd: list[Finding], missing: bool = False) -> Any:
    """What a JSON file holds; None, and a finding, where it cannot be read."""
    asked = "a JSON file"
    try:
        if not path.is_file():
            if missing or _exists(path):
                change = "write it" if not _exists(path) else "put a file there"
                odd.append(_finding("fail", "description", f"no {path.name}", "a system description", change, path))
            return None
        if path.stat().st_size > MAX_JSON:
            odd.append(_finding("fail", "json", f"{path.name} is larger than 16 MiB", asked, "check the file", path))
            return None
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        odd.append(_finding("fail", "json", f"{path.name}: {words}", asked, "mend the file", path))
        return None


def _description(path: Path, odd: list[Finding]) -> dict[str, Any] | None:
    """A system's description; a finding and None where there is none, or where it is no object."""
    before = len(odd)
    values = _json(path, odd, missing=True)
    if isinstance(values, dict):
        return values
    if len(odd) == before:
        kind = {list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(type(values), "a number")
        found = f"{path.name} holds {kind}, so that every field is missing"
        asked, change = "an object with the fields of a system description", "write the fields: {...}"
        source = "mlperf-logging 4.1.68 system_desc_checker.py:39-85"
        odd.append(Finding("fail", "tree.description", found, asked, source, change, path))
    return None


def _scaling(path: Path, odd: list[Finding]) -> float | None:
    """The factor of scaling.json; a finding and None where it is none."""
    before = len(odd)
    values = _json(path, odd)
    factor = values.get("scaling_factor") if isinstance(values, dict) else None
    if isinstance(factor, (int, float)) and not isinstance(factor, bool) and 1 <= factor < 1000:
        return float(factor)
    if len(odd) == before:
        shown = "no scaling_factor" if factor is None else f"scaling_factor {str(factor)[:40]}"
        asked = "a number of 1 or more (rcp_checker.py:460-468)"
        odd.append(_finding("fail", "scaling", shown, asked, "let the official package checker write it", path))
    return None


def _problem(path: Path, finding: Finding) -> Entry:
    return Entry(path, "problem", (), findings=(finding,))


def _finding(level: Level, rule: str, found: str, asked: str, change: str, path: Path) -> Finding:
    return Finding(level, f"tree.{rule}", found, asked, LAYOUT, change, path)
