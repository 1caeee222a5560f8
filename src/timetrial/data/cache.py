"""Tokens of bundled text, kept between runs: tokenizing ten megabytes takes seconds on every rank.

They lie in the user's cache directory under a key of everything that decides them, and are verified
on use; a cache that is damaged or cannot be written costs time, never a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from timetrial.cachedir import root
from timetrial.data.samples import ArrayTokens, Tokens
from timetrial.data.tokenfile import VERSION, Meta, PartWriter, TokenFiles, write_meta
from timetrial.data.tokenizer import Tokenizer
from timetrial.errors import UserError


def cached_tokens(name: str, decided_by: list[str], tokenizer: Tokenizer, make: Callable[[], ArrayTokens]) -> Tokens:
    """`make()`, or what it returned to an earlier run with the same `decided_by` and tokenizer."""
    key = hashlib.sha256("\n".join([name, str(VERSION), tokenizer.sha256, *decided_by]).encode()).hexdigest()
    directory = root() / "tokens" / f"{name}-{key[:16]}"
    with contextlib.suppress(UserError, OSError):
        files = TokenFiles(directory)
        files.verify()
        return files
    tokens = make()
    with contextlib.suppress(UserError, OSError):
        _store(directory, name, tokenizer, tokens)
    return tokens


def _store(directory: Path, name: str, tokenizer: Tokenizer, tokens: ArrayTokens) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", suffix=".tmp", dir=directory.parent))
    try:
        writer = PartWriter(building, "all", tokenizer.vocab_size, masked=tokens.mask is not None)
        writer.add(tokens.ids, tokens.mask)
        part = writer.finish()
        meta = Meta(name, tokenizer.name, tokenizer.sha256, tokenizer.vocab_size, "any run makes it", (part,))
        write_meta(building, meta)
        if directory.exists():
            try:
                TokenFiles(directory).verify()
                return  # another rank was faster, with the same bytes
            except UserError:
                shutil.rmtree(directory)
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
