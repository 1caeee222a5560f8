"""A run's state as a tree: nested dictionaries with tensors and JSON values at the leaves.

Leaves are named by their dotted place (`optimizer.groups.0.lr`), as torch.distributed.checkpoint does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from timetrial.errors import RunFailed

T = TypeVar("T")


def split(state: Mapping[str, Any], place: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors, nested as they were, and the other values by their dotted place."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise TypeError(f"state key {key!r} in {place or 'the state'} is no string")
        if isinstance(value, Mapping):
            tensors[key], inner = split(value, f"{place}{key}.")
            values.update(inner)
        elif isinstance(value, torch.Tensor):
            tensors[key] = value
        else:
            try:
                values[place + key] = json.loads(json.dumps(value))
            except TypeError as error:
                raise TypeError(f"state value {place}{key} is neither tensor nor JSON: {error}") from None
    return tensors, values


def leaves(tensors: Mapping[str, Any], place: str = "") -> dict[str, torch.Tensor]:
    """Nested tensors by their dotted place, as torch.distributed.checkpoint names them."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        flat.update(leaves(value, f"{place}{key}.") if isinstance(value, Mapping) else {place + key: value})
    return flat


def put_values(state: dict[str, Any], values: Mapping[str, Any], place: str = "") -> None:
    """Puts stored values where `state` has values; tuples stay tuples."""
    for key, value in state.items():
        if isinstance(value, dict):
            put_values(value, values, f"{place}{key}.")
        elif not isinstance(value, torch.Tensor):
            stored = values[place + key]
            state[key] = tuple(stored) if isinstance(value, tuple) else stored


def misfits(
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    stored: Mapping[str, Any],
    stored_values: Mapping[str, Any],
) -> list[str]:
    """Where a state to be filled differs from what a checkpoint has; `stored` as its metadata lists it."""
    found = [f"it has no {key}" for key in values if key not in stored_values]
    for key, tensor in tensors.items():
        entry = stored.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            found.append(f"it has no {key}")
        elif entry.size != tensor.shape:
            found.append(f"its {key} is {tuple(entry.size)}, here it is {tuple(tensor.shape)}")
        elif entry.properties.dtype != tensor.dtype:  # copying would convert, and lose bits, without a word
            found.append(f"its {key} is {entry.properties.dtype}, here it is {tensor.dtype}")
    return found


def merged(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """One dictionary from all ranks'. Raises RunFailed where two ranks differ."""
    out: dict[str, T] = {}
    for part in parts:
        for key, value in part.items():
            if out.setdefault(key, value) != value:
                raise RunFailed(f"ranks disagree on {key}: {out[key]} and {value}")
    return out


def local_bytes(tensors: Mapping[str, Any]) -> int:
    """Bytes that this rank holds; of a DTensor its own shard."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in leaves(tensors).values())
    return sum(t.numel() * t.element_size() for t in local)
