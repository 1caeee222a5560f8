"""How far the heap of a process on this machine grows: glibc's allocator, as torch's tensors use it.

What a run has resident is not what it has alive. Tensors are aligned to 64 bytes, and for that glibc (malloc.c,
`_int_memalign`, 2.36) takes 96 bytes more than are asked for and gives the ends back. So the hole that a tensor
leaves is too small for the next tensor of its size, unless a neighbour is free too. And the ends are what autograd's
small objects are made of: those of a forward pass stay until the step has ended, those of a backward pass until that
has, between tensors that are long gone. Which of the two ends they take, and for how long, is not derived: it was
chosen among a few rules as what comes nearest to the heaps of twelve runs of `benchmarks/predict_local.py`, 101 to 331
MiB, which the walk of `alive.py` then gives within 12 %.

    chunk = the smallest free one that is large enough, else from the top; what lies free side by side is one hole

Blocks are kept from the kernel's sight up to a gigabyte (`train/process.keep_freed_memory`), so the top never falls.
"""

from __future__ import annotations

import bisect

HEADER = 8
GRAIN = 16
LEAST = 32
"""Bytes of the smallest chunk."""
ALIGNMENT = 64
"""Of torch's tensors."""
SMALL = 128
"""Ends up to this size go to small objects where there are some."""


class Heap:
    """The main arena. Sizes and addresses in bytes; an address is a chunk's, from 0."""

    def __init__(self) -> None:
        self.peak = 0
        """The highest top so far."""
        self._top = GRAIN
        self._free: list[tuple[int, int]] = []
        """(size, address) of holes, sorted."""
        self._begins: dict[int, int] = {}
        """Address of a hole -> its size."""
        self._ends: dict[int, int] = {}
        """End of a hole -> its address."""
        self._used: dict[int, int] = {}
        self._pinned: dict[str, list[tuple[int, int]]] = {}

    def take(self, size: int, pin: str = "") -> int:
        """A tensor of `size` bytes; its address. A small object takes the end behind it until `unpin` of `pin`."""
        wanted = (size + HEADER + GRAIN - 1) // GRAIN * GRAIN
        address, whole = self._chunk(wanted + ALIGNMENT + LEAST)
        ahead = -(address + GRAIN) % ALIGNMENT
        if ahead:
            ahead += ALIGNMENT * (ahead < LEAST)
            self._give(address, ahead)
            address, whole = address + ahead, whole - ahead
        behind = whole - wanted
        if behind > LEAST:
            if pin and behind <= SMALL:
                self._pinned.setdefault(pin, []).append((address + wanted, behind))
            else:
                self._give(address + wanted, behind)
            whole = wanted
        self._used[address] = whole
        return address

    def free(self, address: int) -> None:
        self._give(address, self._used.pop(address))

    def unpin(self, pin: str) -> None:
        """The small objects that were put there under this name go."""
        for address, size in self._pinned.pop(pin, []):
            self._give(address, size)

    def _chunk(self, size: int) -> tuple[int, int]:
        at = bisect.bisect_left(self._free, (size, -1))
        if at == len(self._free):
            address = self._top
            self._top += size
            self.peak = max(self.peak, self._top)
            return address, size
        whole, address = self._free[at]
        self._forget(address)
        if whole - size < LEAST:
            return address, whole
        self._note(address + size, whole - size)
        return address, size

    def _give(self, address: int, size: int) -> None:
        if address + size in self._begins:
            size += self._forget(address + size)
        if address in self._ends:
            address = self._ends[address]
            size += self._forget(address)
        if address + size == self._top:
            self._top = address
        else:
            self._note(address, size)

    def _note(self, address: int, size: int) -> None:
        bisect.insort(self._free, (size, address))
        self._begins[address] = size
        self._ends[address + size] = address

    def _forget(self, address: int) -> int:
        """Take a hole out; its size."""
        size = self._begins.pop(address)
        del self._ends[address + size]
        self._free.pop(bisect.bisect_left(self._free, (size, address)))
        return size
