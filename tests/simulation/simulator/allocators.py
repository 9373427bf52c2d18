"""Where contiguous pieces of KV memory are put: what servers did before memory was paged.

Both take the lowest address that serves, so the same requests give the same addresses. Invariant: pieces never
overlap, and what was freed can be given out again as one piece with its free neighbours (for buddies: with its buddy).
"""

from __future__ import annotations

from bisect import insort
from typing import Protocol


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


class Allocator(Protocol):
    """Gives out pieces of one region of slots."""

    def allocate(self, num_slots: int) -> int | None:
        """Address of a piece of at least `num_slots` slots; None when no hole is large enough."""

    def free(self, address: int) -> int:
        """Take a piece back; return how many slots it had."""


class BuddyAllocator:
    """Knuth's buddy system: every piece is a power of two of slots and stands at a multiple of its size.

    The region need not be a power of two: it starts as the largest pieces that fill it.
    """

    def __init__(self, num_slots: int) -> None:
        self._free: list[list[int]] = [[] for _ in range(num_slots.bit_length())]  # by size, 2**index: addresses
        self._orders: dict[int, int] = {}  # address -> order of the piece that stands there
        address = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].append(address)
                address += 1 << order

    def allocate(self, num_slots: int) -> int | None:
        """See Allocator."""
        wanted = next_power_of_two(num_slots).bit_length() - 1
        order = next((order for order in range(wanted, len(self._free)) if self._free[order]), None)
        if order is None:
            return None
        address = self._free[order].pop(0)
        while order > wanted:
            order -= 1
            insort(self._free[order], address + (1 << order))
        self._orders[address] = order
        return address

    def free(self, address: int) -> int:
        """See Allocator."""
        order = self._orders.pop(address)
        num_slots = 1 << order
        while (buddy := address ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            address = min(address, buddy)
            order += 1
        insort(self._free[order], address)
        return num_slots


class FirstFitAllocator:
    """Pieces of exactly the asked size, in the first hole that is large enough."""

    def __init__(self, num_slots: int) -> None:
        self._holes = [(0, num_slots)]  # address and size, by address; never two that touch
        self._sizes: dict[int, int] = {}

    def allocate(self, num_slots: int) -> int | None:
        """See Allocator."""
        for index, (address, size) in enumerate(self._holes):
            if size >= num_slots:
                self._holes[index : index + 1] = [(address + num_slots, size - num_slots)] if size > num_slots else []
                self._sizes[address] = num_slots
                return address
        return None

    def free(self, address: int) -> int:
        """See Allocator."""
        size = self._sizes.pop(address)
        joined: list[tuple[int, int]] = []
        insort(self._holes, (address, size))
        for start, length in self._holes:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._holes = joined
        return size
