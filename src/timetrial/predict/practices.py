"""What submissions of one kind do that published tables do not tell: `data/practices.toml`, each with its source."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Practice:
    """One habit."""

    workload: str
    accelerators: tuple[str, ...]
    """Parts of accelerators' names, letters and digits."""
    source: str
    recompute_layers: int = 0
    """Blocks that are computed again."""
    attention: str = ""
    """Format of attention."""


@lru_cache(maxsize=1)
def practices() -> tuple[Practice, ...]:
    """All that are known."""
    text = (resources.files("timetrial.predict") / "data" / "practices.toml").read_text(encoding="utf-8")
    return tuple(
        Practice(**{**one, "accelerators": tuple(one["accelerators"])}) for one in tomllib.loads(text)["practice"]
    )


def of(workload: str, accelerator: str) -> list[Practice]:
    """What submissions of a workload on an accelerator of that published name do."""
    name = re.sub(r"[^a-z0-9]", "", accelerator.lower())
    return [one for one in practices() if one.workload == workload and any(word in name for word in one.accelerators)]


WORDS = {"recompute_layers": "{} blocks computed again", "attention": "attention in {}"}
"""Setting -> what is said of it."""


def taken(known: list[Practice], setting: str, otherwise: Any, assumed: list[str]) -> Any:
    """What `known` practices say of one of WORDS, noted in `assumed`; `otherwise` where none does."""
    for one in known:
        if value := getattr(one, setting):
            assumed.append(f"{WORDS[setting].format(value)}, as such submissions do ({one.source})")
            return value
    return otherwise
