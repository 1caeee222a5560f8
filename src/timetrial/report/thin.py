"""Fewer points with the same picture: a long run's columns, binned before they are drawn.

Steps are put into at most `limit` bins of equal length. A bin is drawn as its mean, with the range
from its least to its greatest value behind it, so that no spike is lost; a sampled curve (every
k-th step, or largest-triangle sampling) would show some spikes, hide others, and have no mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Curve:
    """A thinned curve; every array has shape [bins]. NaN where a bin holds no finite value."""

    x: Array
    mean: Array
    low: Array
    high: Array
    thinned: bool
    """Whether a bin holds more than one value."""


def starts(n: int, limit: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Index of the first element of each bin, for `n` elements in at most `limit` bins."""
    bins = min(n, limit)
    return (np.arange(bins) * n // max(bins, 1)).astype(np.intp)


def curve(x: Array, y: Array, limit: int) -> Curve:
    """`y` over `x`, both of shape [n], in at most `limit` bins. Non-finite values of y are left out."""
    n = len(y)
    if n <= limit:
        kept = np.where(np.isfinite(y), y, np.nan)
        return Curve(x, kept, kept, kept, thinned=False)
    first = starts(n, limit)
    finite = np.isfinite(y)
    values = np.add.reduceat(finite.astype(float), first)
    total = np.add.reduceat(np.where(finite, y, 0.0), first)
    mean = np.divide(total, values, out=np.full(len(first), np.nan), where=values > 0)
    low = np.minimum.reduceat(np.where(finite, y, np.inf), first)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), first)
    low, high = np.where(values > 0, low, np.nan), np.where(values > 0, high, np.nan)
    lengths = np.diff(np.append(first, n))
    return Curve(np.add.reduceat(x, first) / lengths, mean, low, high, thinned=True)


def means(y: Array, limit: int) -> tuple[Array, np.ndarray[Any, np.dtype[np.intp]]]:
    """Bin means of `y` (finite everywhere), and the index of each bin's last element."""
    first = starts(len(y), limit)
    ends = np.append(first[1:], len(y))
    return np.add.reduceat(y, first) / (ends - first), ends - 1
