"""How the bundled `synopses` are extracted: documentation of scientific Python -> its summary line.

A docstring by PEP 257 is a one-line summary, an empty line and a description: a real, if small,
summarization task, written by people, under one licence. The document is the description's prose,
up to its first section heading, example or directive; the summary is the first paragraph. Taken
from the source text of pinned wheels, without importing them. Folders of vendored code and files
that mention another licence are left out.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

MIN_TEXT, MAX_TEXT = 120, 1200
MIN_SUMMARY, MAX_SUMMARY = 15, 120
_SKIPPED = re.compile(
    r"/(tests?|externals|_external|_vendored|_lib|multipledispatch|parsing)/|(^|/)(conftest|setup|isympy)\.py$"
)
_OTHER_LICENCE = re.compile(r"MIT [Ll]icense|Apache License|GNU |\bGPL")
_HEADING = re.compile(r"^[A-Z][\w ]*\n *[-=~^]{3,}", re.MULTILINE)
_REFERENCE = re.compile(r"\s*\[\d+\]_")


def extract(wheels: list[Path]) -> list[dict[str, str]]:
    """All pairs of these wheels as name, text and summary, by name; a text or summary occurs once."""
    rows: dict[str, dict[str, str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".py") and not _SKIPPED.search(member):
                    module = member.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                    source = archive.read(member).decode("utf-8")
                    if _OTHER_LICENCE.search(source):
                        continue
                    for name, docstring in _docstrings(source, module):
                        if pair := _pair(docstring):
                            rows.setdefault(name, {"name": name, "text": pair[0], "summary": pair[1]})
    seen: set[str] = set()
    kept = []
    for row in (rows[name] for name in sorted(rows)):
        if not {row["text"], row["summary"]} & seen:
            seen |= {row["text"], row["summary"]}
            kept.append(row)
    return kept


def _docstrings(source: str, module: str) -> Iterator[tuple[str, str]]:
    nodes: list[tuple[str, ast.AST]] = [(module, ast.parse(source))]
    while nodes:
        name, node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield name, text
        for child in ast.iter_child_nodes(node):
            nodes.append((f"{name}.{child.name}" if isinstance(child, ast.ClassDef | ast.FunctionDef) else name, child))


def _pair(docstring: str) -> tuple[str, str] | None:
    head, _, body = docstring.partition("\n\n")
    summary = _prose(head)
    paragraphs = []
    for paragraph in body.split("\n\n"):
        if _HEADING.search(paragraph.strip()) or ">>>" in paragraph or paragraph.strip().startswith(".. "):
            break
        paragraphs.append(_prose(paragraph))
    text = "\n".join(p for p in paragraphs if p)
    if not (MIN_SUMMARY <= len(summary) <= MAX_SUMMARY and summary.endswith(".")):
        return None
    return (text, summary) if MIN_TEXT <= len(text) <= MAX_TEXT else None


def _prose(paragraph: str) -> str:
    """One line, without footnote marks."""
    return " ".join(_REFERENCE.sub("", paragraph).split())
