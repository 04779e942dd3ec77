"""A state machine that uses the block pool at random, beside a model that is slow and obvious.

test_machines.py runs it on the code as it is, test_planted_faults.py on broken variants of it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rawpaged.scheduler.block_pool import BlockPool

NUM_HASHES = 4


class BlockPoolMachine(RuleBasedStateMachine):
    """BlockPool against plain lists. Only what a careful caller does is done."""

    @initialize(num_blocks=st.integers(1, 7), enable_caching=st.booleans())
    def create(self, num_blocks: int, enable_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, enable_caching)
        self.tables: list[list[int]] = []
        self.unhashed = list(range(num_blocks))
        """Free blocks, the next to be taken first."""
        self.lru: list[int] = []
        """Cached blocks, the next to be evicted first."""
        self.hashes: dict[int, bytes] = {}
        self.num_evictions = 0
        self.ever_taken: set[int] = set()

    @rule(num_blocks=st.integers(0, 3))
    def take(self, num_blocks: int) -> None:
        order = self.unhashed + self.lru
        if num_blocks > len(order):
            with pytest.raises(AssertionError, match="num_takeable_blocks"):
                self.pool.take(num_blocks)
            return
        taken = order[:num_blocks]
        self.num_evictions += len(set(taken) & set(self.lru))
        assert self.pool.take(num_blocks) == taken
        self.ever_taken |= set(taken)
        for block_id in taken:
            self.hashes.pop(block_id, None)
        self.unhashed = [block_id for block_id in self.unhashed if block_id not in taken]
        self.lru = [block_id for block_id in self.lru if block_id not in taken]
        self.tables.append(taken)

    @rule(first=st.integers(0, NUM_HASHES - 1), length=st.integers(1, NUM_HASHES))
    def hit(self, first: int, length: int) -> None:
        numbers = [(first + i) % NUM_HASHES for i in range(length)]
        found = [self.pool.get_cached_block(bytes([number])) for number in numbers]
        block_ids = [block_id for block_id in found if block_id is not None]
        self.pool.touch(block_ids)
        self.lru = [block_id for block_id in self.lru if block_id not in block_ids]
        self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def free(self, which: int) -> None:
        table = self.tables.pop(which % len(self.tables))
        self.pool.free(reversed(table))
        for block_id in reversed(table):
            if any(block_id in other for other in self.tables):
                continue
            if block_id in self.hashes:
                self.lru.append(block_id)
            else:
                self.unhashed.insert(0, block_id)

    @rule(which=st.integers(0, 99), number=st.integers(0, NUM_HASHES - 1))
    def publish(self, which: int, number: int) -> None:
        used = sorted({block_id for table in self.tables for block_id in table} - set(self.hashes))
        if used:
            block_id, block_hash = used[which % len(used)], bytes([number])
            self.pool.cache_block(block_id, block_hash)
            if self.pool.enable_caching and block_hash not in self.hashes.values():
                self.hashes[block_id] = block_hash

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.unhashed = self.lru + self.unhashed
        self.lru = []
        self.hashes = {}

    @invariant()
    def agrees_with_the_lists(self) -> None:
        pool = self.pool
        pool.check_integrity(self.tables)
        assert pool.take_order() == self.unhashed + self.lru
        assert pool.num_free_blocks == len(self.unhashed)
        assert pool.num_cached_blocks == len(self.lru)
        assert pool.num_used_blocks == len({b for table in self.tables for b in table})
        assert pool.num_evictions == self.num_evictions
        assert pool.num_reached_blocks == max(self.ever_taken, default=-1) + 1
        assert pool.num_refs == sum(map(len, self.tables))
        refs = Counter(b for table in self.tables for b in table)
        assert pool.num_shared_blocks == sum(count > 1 for count in refs.values())
        assert set(pool.published_blocks()) == set(self.hashes)
        for block_id in range(pool.num_blocks):
            assert pool.ref_count(block_id) == sum(t.count(block_id) for t in self.tables)
            assert pool.block_hash(block_id) == self.hashes.get(block_id)
        for number in range(NUM_HASHES):
            holders = [b for b, h in self.hashes.items() if h == bytes([number])]
            found = pool.get_cached_block(bytes([number]))
            assert found == (holders[0] if holders else None)
