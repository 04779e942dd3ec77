"""A buddy allocator: contiguous power-of-two pieces, split in halves and merged again.

Knuth, The Art of Computer Programming 1, section 2.5. The PagedAttention paper gave its Orca
baselines this allocator.
"""

from __future__ import annotations

import heapq


class BuddyAllocator:
    """Pieces of [0, capacity), each of a power of two and aligned to its size.

    A capacity that is no power of two starts as the pieces of its binary digits, the largest first.
    Of the free pieces of a size the one with the lowest offset is taken.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"{capacity=} must be at least 1")
        self.capacity = capacity
        self.num_free = capacity
        self._free: dict[int, set[int]] = {}
        self._heaps: dict[int, list[int]] = {}
        """Free offsets of each size, lowest first; entries that are taken meanwhile stay behind."""
        self._taken: dict[int, int] = {}
        offset = 0
        for bit in reversed(range(capacity.bit_length())):
            self._free[1 << bit] = set()
            self._heaps[1 << bit] = []
            if capacity & (1 << bit):
                self._put(offset, 1 << bit)
                offset += 1 << bit

    @staticmethod
    def rounded(size: int) -> int:
        """What a piece of `size` really takes."""
        return 1 << (size - 1).bit_length()

    def take(self, size: int) -> int | None:
        """Offset of a piece of at least `size`; None if no free piece is large enough."""
        if size < 1:
            raise ValueError(f"{size=} must be at least 1")
        wanted = self.rounded(size)
        found = wanted
        while found in self._free and not self._free[found]:
            found *= 2
        if found not in self._free:
            return None
        offset = self._pop(found)
        while found > wanted:
            found //= 2
            self._put(offset + found, found)
        self._taken[offset] = wanted
        self.num_free -= wanted
        return offset

    def give_back(self, offset: int) -> None:
        """Frees a piece that `take` returned, merged with its buddy as often as that is free."""
        size = self._taken.pop(offset)
        self.num_free += size
        while 2 * size in self._free and offset ^ size in self._free[size]:
            self._free[size].remove(offset ^ size)
            offset &= ~size
            size *= 2
        self._put(offset, size)

    def free_pieces(self) -> list[tuple[int, int]]:
        """(offset, size) of each, in order of offset. For tests and debugging."""
        return sorted((offset, size) for size, offsets in self._free.items() for offset in offsets)

    def _put(self, offset: int, size: int) -> None:
        self._free[size].add(offset)
        heapq.heappush(self._heaps[size], offset)

    def _pop(self, size: int) -> int:
        heap = self._heaps[size]
        while True:
            offset = heapq.heappop(heap)
            if offset in self._free[size]:
                self._free[size].remove(offset)
                return offset
