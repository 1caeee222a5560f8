"""The order in which samples are read: a pure function of (seed, position), with nothing stored.

A run reads positions 0, 1, 2, ...; position p lies in epoch p // n, and each epoch is its own
permutation of the n samples. The permutation is a Feistel network on pairs (l, r) with l < a,
r < b, a*b >= n, where index = l*b + r:

    even rounds: l <- (l + F_k(r)) mod a      odd rounds: r <- (r + F_k(l)) mod b

Each round can be undone, so the network is a bijection of [0, a*b); results >= n go through it
again until they fall below n (cycle walking), which leaves a bijection of [0, n) (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"). F is the finalizer of SplitMix64 (Steele et
al. 2014) over a round key from BLAKE2b(seed, epoch, n).

Not a stored shuffle, as Megatron's index files are: those cost 8 bytes a sample on every node and
minutes at start; here a resumed run, or one at another data-parallel size, computes what it needs.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

_ROUNDS = 12


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where the permutation of [0, n) that belongs to (seed, epoch) sends each index; int64, any shape."""
    index = np.asarray(index, dtype=np.int64)
    if n < 1 or (index.size and (index.min() < 0 or index.max() >= n)):
        raise ValueError(f"indices must lie in [0, {n})")
    a = math.isqrt(n - 1) + 1  # ceil(sqrt(n))
    b = -(-n // a)
    keys = _round_keys(n, seed, epoch)
    out = _network(index, a, b, keys)
    while (outside := out >= n).any():
        out[outside] = _network(out[outside], a, b, keys)
    return out


@dataclass(frozen=True)
class Order:
    """The order of one run over `n` samples."""

    n: int
    seed: int

    def epoch(self, position: int) -> int:
        """Passes over the data that are complete at `position`."""
        return position // self.n

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Sample indices, int64 [stop - start], of the positions from `start` up to `stop`."""
        positions = np.arange(start, stop, dtype=np.int64)
        out = np.empty_like(positions)
        epochs, within = positions // self.n, positions % self.n
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = permute(within[chosen], self.n, self.seed, int(epoch))
        return out

    def sample_index(self, position: int) -> int:
        """The sample at one global position."""
        return int(self.indices(position, position + 1)[0])


def _round_keys(n: int, seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"timetrial order {seed} {epoch} {n}".encode(), digest_size=64).digest()
    digest += hashlib.blake2b(digest, digest_size=64).digest()
    return np.frombuffer(digest, dtype="<u8")[:_ROUNDS]


def _network(index: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    left, right = index // b, index % b
    for k, key in enumerate(keys):
        if k % 2 == 0:
            left = (left + _mix(right, key, a)) % a
        else:
            right = (right + _mix(left, key, b)) % b
    out: np.ndarray = left * b + right
    return out


def _mix(value: np.ndarray, key: np.uint64, modulus: int) -> np.ndarray:
    z = value.astype(np.uint64) + key  # wraps at 2^64, as SplitMix64 does
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z % np.uint64(modulus)).astype(np.int64)
