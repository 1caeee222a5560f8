"""Named random streams: each use of randomness draws from a seed of its own.

A stream depends on the run's seed and a name alone, never on what was drawn before. So a resumed
step, a parameter on another rank or a reordered initialisation see the same numbers.
"""

from __future__ import annotations

import hashlib


def stream(seed: int, name: str) -> int:
    """A 63-bit seed for the stream `name` of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
