"""Who holds which KV block, and which block is given away next.

Every block is in exactly one of three places:

    free    --take-->   used
    cached  --take-->   used      eviction: loses its hash
    cached  --touch-->  used      prefix hit: keeps its hash
    used    --free-->   cached    when the last reference goes, if it has a hash
    used    --free-->   free      when the last reference goes, if it has none

used: at least one block table holds it. cached: none does, but its content can still be found by
hash. free: its content is worthless.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts and hashes; every change is O(1) a block.

    Free blocks are given away before cached ones, cached ones least recently used first: in the
    order in which they were freed. Callers free a sequence from its tail, so that of one
    sequence the longest prefix survives longest.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self._ref_counts = [0] * num_blocks
        # A stack: a block just given back is the likeliest to be in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Keys in eviction order. A plain dict would do but for its slow `next(iter(...))` once
        # many keys have been deleted from the front.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of_block: dict[int, bytes] = {}
        self._block_of_hash: dict[bytes, int] = {}
        # Kept along, so that telling them takes no walk over the pool.
        self.num_refs = 0
        """Sum of all reference counts."""
        self.num_shared_blocks = 0
        """Blocks with more than one reference."""
        self.num_evictions = 0
        """Cached blocks that were given away, since construction."""
        self.num_reached_blocks = 0
        """Blocks from this one on have never been given away."""

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_takeable_blocks(self) -> int:
        """Free ones, and cached ones that would be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_takeable_blocks

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def block_hash(self, block_id: int) -> bytes | None:
        """The hash under which the block is published, if it is."""
        return self._hash_of_block.get(block_id)

    def published_blocks(self) -> list[int]:
        """All blocks, used or cached, that a prefix hit would find; in no order."""
        return list(self._hash_of_block)

    def take_order(self) -> list[int]:
        """All takeable blocks, the next to be given away first. For tests and debugging."""
        return [*reversed(self._free), *self._cached]

    def take(self, num_blocks: int) -> list[int]:
        """Gives away that many blocks with ref_count 1; there must be as many takeable ones."""
        assert num_blocks <= self.num_takeable_blocks, f"{num_blocks=} {self.num_takeable_blocks=}"
        block_ids = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._evict()
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        self.num_refs += num_blocks
        self.num_reached_blocks = max(self.num_reached_blocks, max(block_ids, default=-1) + 1)
        return block_ids

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        del self._block_of_hash[self._hash_of_block.pop(block_id)]
        self.num_evictions += 1
        return block_id

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds one reference to each of these used or cached blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1
            self.num_refs += 1
            self.num_shared_blocks += self._ref_counts[block_id] == 2

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each, in the order given, which becomes the eviction order."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"{block_id=} is freed but not used"
            self._ref_counts[block_id] -= 1
            self.num_refs -= 1
            self.num_shared_blocks -= self._ref_counts[block_id] == 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._hash_of_block:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The used or cached block that is published under this hash."""
        return self._block_of_hash.get(block_hash)

    def cache_block(self, block_id: int, block_hash: bytes) -> None:
        """Publishes a used block, unless its content is published already: the first one wins.

        The second stays without a hash, so its block goes straight to the free ones later.
        Replacing the first would not help: block tables are append-only, whoever holds it keeps it.
        """
        assert self._ref_counts[block_id] > 0, f"{block_id=} is published but not used"
        assert block_id not in self._hash_of_block, f"{block_id=} is published twice"
        if self.enable_caching and block_hash not in self._block_of_hash:
            self._block_of_hash[block_hash] = block_id
            self._hash_of_block[block_id] = block_hash

    def reset_prefix_cache(self) -> None:
        """Forgets all hashes; used blocks stay used, cached ones become free."""
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        self._hash_of_block.clear()
        self._block_of_hash.clear()

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the pool agrees with itself and with all block tables."""
        occurrences = Counter(block_id for table in block_tables for block_id in table)
        for block_id, ref_count in enumerate(self._ref_counts):
            assert ref_count == occurrences[block_id], (
                f"{block_id=} {ref_count=} but {occurrences[block_id]} block table entries"
            )
        assert self._block_of_hash == {h: b for b, h in self._hash_of_block.items()}, (
            f"{self._block_of_hash=} is not the inverse of {self._hash_of_block=}"
        )
        places = Counter([*self._free, *self._cached, *occurrences.keys()])
        assert places == Counter(range(self.num_blocks)), (
            f"not every block is in one place: {self._free=} {self._cached=} {occurrences=}"
        )
        for block_id in self._free:
            assert block_id not in self._hash_of_block, f"{block_id=} is free but published"
        for block_id in self._cached:
            assert block_id in self._hash_of_block, f"{block_id=} is cached but has no hash"
        assert self.num_used_blocks == len(occurrences), (
            f"{self.num_used_blocks=} but block tables hold {len(occurrences)} different blocks"
        )
        assert self.num_refs == sum(self._ref_counts), f"{self.num_refs=} {self._ref_counts=}"
        num_shared = sum(ref_count > 1 for ref_count in self._ref_counts)
        assert self.num_shared_blocks == num_shared, f"{self.num_shared_blocks=} {num_shared=}"
