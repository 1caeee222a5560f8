"""Text that comes with the package, so that a mini preset trains on real data without a download.

Each collection is one `bundled/NAME.jsonl.xz` (a JSON object a line) with its licence in
`bundled/NAME.LICENSE`; `bundled/sources.json` says where it came from and holds its sha256, which
is checked on every read. xz and not gzip: the text is read once a run and half the size counts in
a package. `timetrial.data.make_bundled` makes the files again from the named packages.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

from timetrial.errors import UserError

Item = TypeVar("Item")

HELD_OUT_EVERY, HELD_OUT_OFFSET = 20, 10
"""Documents 10, 30, 50, ... (counted from 0, in file order) are held out, whole."""


@dataclass(frozen=True)
class Document:
    """One text."""

    name: str
    text: str


@dataclass(frozen=True)
class Pair:
    """A text and its summary."""

    name: str
    text: str
    summary: str


def directory() -> Traversable:
    """Where the bundled files lie."""
    return resources.files("timetrial.data") / "bundled"


def sources() -> dict[str, dict[str, Any]]:
    """Collection -> where it came from: title, package, licence, sha256, counts."""
    listing: dict[str, dict[str, Any]] = json.loads((directory() / "sources.json").read_text(encoding="utf-8"))
    return listing


def documents(name: str = "sotu") -> list[Document]:
    """All documents of a collection, in file order (`sotu`: by year).

    Raises UserError when the file is missing or is not the one the package was made with.
    """
    return [Document(row["name"], row["text"]) for row in _rows(name)]


def pairs(name: str = "synopses") -> list[Pair]:
    """All text and summary pairs of a collection, in file order. Raises UserError like `documents`."""
    return [Pair(row["name"], row["text"], row["summary"]) for row in _rows(name)]


def split(items: list[Item]) -> tuple[list[Item], list[Item]]:
    """(training, held-out): every 20th item is held out, the 11th first; a fixed rule, no seed."""
    train = [item for i, item in enumerate(items) if i % HELD_OUT_EVERY != HELD_OUT_OFFSET]
    return train, items[HELD_OUT_OFFSET::HELD_OUT_EVERY]


@lru_cache(maxsize=2)
def _rows(name: str) -> list[dict[str, str]]:
    file = directory() / f"{name}.jsonl.xz"
    expected = sources().get(name, {}).get("sha256")
    try:
        packed = file.read_bytes()
    except OSError as error:
        raise UserError(f"bundled data {file} cannot be read ({error.strerror}); reinstall timetrial") from None
    found = hashlib.sha256(packed).hexdigest()
    if found != expected:
        raise UserError(f"bundled data {file} is damaged: sha256 {found}, not {expected}; reinstall timetrial")
    return [json.loads(line) for line in lzma.decompress(packed).splitlines()]
