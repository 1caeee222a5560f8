"""Reading of system files: TOML to flat figures, `like` resolved, each figure with its source; typed access to them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from timetrial.errors import UserError
from timetrial.systems.ranges import RANGES, TEXTS, nearest


@lru_cache(maxsize=1)
def names() -> list[str]:
    """Systems that come with the package, sorted."""
    entries = (entry.name for entry in resources.files("timetrial.systems").iterdir())
    return sorted(file.removesuffix(".toml") for file in entries if file.endswith(".toml"))


@lru_cache(maxsize=64)
def bundled(name: str) -> dict[str, Any]:
    """Figures of a system of the package; not to be changed."""
    return parse((resources.files("timetrial.systems") / f"{name}.toml").read_bytes(), f"{name}.toml")


def parse(content: bytes, where: str) -> dict[str, Any]:
    """Dotted name -> value, `sources` apart; `like` resolved."""
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"system file {where} is no TOML: {error}") from None
    sources = document.pop("sources", {})
    own = _flatten(document)
    like = own.pop("like", None)
    _known(own, where)
    if not isinstance(sources, dict):
        raise UserError(f'system file {where}: sources is not a table; write [sources] and name = "where from" below')
    given = {name: str(text) for name, text in _flatten(sources).items()}
    for name in given:
        if not any(_covers(name, figure) for figure in RANGES):
            raise UserError(f"system file {where}: sources names {name!r}, which is no figure{nearest(name, RANGES)}")
    resolved: dict[str, str] = {}
    for figure in own:
        if figure in RANGES:
            resolved[figure] = _source(figure, given, where)
    if like is None:
        return {**own, "sources": resolved}
    if like not in names():
        raise UserError(f"system file {where}: like = {like!r} is no system; there are {', '.join(names())}")
    base = dict(bundled(like))
    inherited = base.pop("sources")
    for name in ("name", "title", "aliases"):
        base.pop(name, None)
    _replace(base, own)
    merged = {**base, **own}
    kept = {name: text for name, text in inherited.items() if name in merged}
    return {**merged, "sources": {**kept, **resolved}}


def _replace(base: dict[str, Any], own: dict[str, Any]) -> None:
    """Drop from `base` what `own` says in another unit, or makes void."""
    if {"accelerator.memory_gb", "accelerator.memory_gib"} & own.keys():
        base.pop("accelerator.memory_gb", None)
        base.pop("accelerator.memory_gib", None)
    if "scale_up.gb_per_s" in own:
        base.pop("scale_up.peer_gb_per_s", None)
    if own.get("scale_out.kind") == "none":
        for name in ("gb_per_s", "latency_us", "rails"):
            base.pop(f"scale_out.{name}", None)
    if any(name.startswith(("accelerator.", "node.")) for name in own):
        # measured on the other machine
        base.pop("power.average_w", None)
        base.pop("power.basis", None)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _known(figures: Mapping[str, Any], where: str) -> None:
    for name in figures:
        if name not in RANGES and name not in TEXTS:
            raise UserError(f"system file {where}: unknown figure {name!r}{nearest(name, (*RANGES, *TEXTS))}")


def _covers(prefix: str, figure: str) -> bool:
    return figure == prefix or figure.startswith(prefix + ".")


def _source(figure: str, given: Mapping[str, str], where: str) -> str:
    fitting = [name for name in given if _covers(name, figure)]
    if not fitting:
        table = figure.split(".", maxsplit=1)[0]
        raise UserError(
            f'system file {where}: {figure} has no source; add to [sources]: {table} = "where it comes from"'
            ' (ending in "assumed" where it is a guess)'
        )
    return given[max(fitting, key=len)]


@dataclass(frozen=True)
class Reader:
    """Typed reading of a flat file; each method raises UserError with the figure's name."""

    figures: Mapping[str, Any]
    where: str

    def _get(self, name: str, want: str) -> Any:
        if name not in self.figures:
            raise UserError(f"system file {self.where}: {name} is missing; give {want}")
        return self.figures[name]

    def number(self, name: str, default: float | None = None) -> float:
        allowed = RANGES[name]
        if default is not None and name not in self.figures:
            return default
        value = self._get(name, str(allowed))
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"system file {self.where}: {name} is {value!r}; give {allowed}")
        if not allowed.low <= value <= allowed.high or (allowed.whole and value != int(value)):
            raise UserError(f"system file {self.where}: {name} is {value}, out of range; give {allowed}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._get(name, "true or false")
        if not isinstance(value, bool):
            raise UserError(f"system file {self.where}: {name} is {value!r}; give true or false")
        return value

    def text(self, name: str) -> str:
        value = self._get(name, TEXTS.get(name, "a text"))
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"system file {self.where}: {name} is {value!r}; give {TEXTS.get(name, 'a text')}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.figures.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"system file {self.where}: {name} is {value!r}; give {TEXTS[name]}")
        return tuple(value)

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self._get(name, f"one of {', '.join(allowed)}")
        if value not in allowed:
            raise UserError(f"system file {self.where}: {name} is {value!r}; give one of {', '.join(allowed)}")
        return str(value)
