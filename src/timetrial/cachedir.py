"""Where things are kept that any run could make again."""

from __future__ import annotations

import os
from pathlib import Path


def root() -> Path:
    """The cache directory by the XDG convention: ~/.cache/timetrial, if not configured otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "timetrial"
