"""Block ids and eviction order, to the letter."""

from __future__ import annotations

import pytest

from rawpaged.scheduler.block_pool import BlockPool

HASHES = [bytes([i]) * 32 for i in range(10)]


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_used_blocks, pool.num_cached_blocks, pool.num_free_blocks


def test_new_pool_gives_blocks_in_order() -> None:
    pool = BlockPool(4)
    assert pool.take_order() == [0, 1, 2, 3]
    assert pool.take(0) == []
    assert pool.take(3) == [0, 1, 2]
    assert counts(pool) == (3, 0, 1)
    assert [pool.ref_count(b) for b in range(4)] == [1, 1, 1, 0]


def test_taking_more_than_there_are_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.take(2)
    with pytest.raises(AssertionError, match="num_blocks=2"):
        pool.take(2)
    assert pool.take_order() == [2]


def test_blocks_without_hash_are_reused_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(5)
    assert pool.take(3) == [0, 1, 2]
    pool.cache_block(0, HASHES[0])
    pool.cache_block(1, HASHES[1])
    pool.free([2, 1, 0])
    assert counts(pool) == (0, 2, 3)
    assert pool.take_order() == [2, 3, 4, 1, 0]


def test_eviction_is_least_recently_freed_first_and_tails_first() -> None:
    pool = BlockPool(6)
    first, second = pool.take(3), pool.take(3)
    assert (first, second) == ([0, 1, 2], [3, 4, 5])
    for block_id in range(6):
        pool.cache_block(block_id, HASHES[block_id])
    pool.free(reversed(second))
    pool.free(reversed(first))
    assert pool.take_order() == [5, 4, 3, 2, 1, 0]

    pool.touch([3, 4])
    assert pool.take_order() == [5, 2, 1, 0]
    pool.free([4, 3])
    assert pool.take_order() == [5, 2, 1, 0, 4, 3]


def test_eviction_removes_the_hash() -> None:
    pool = BlockPool(2)
    pool.take(2)
    pool.cache_block(0, HASHES[0])
    pool.cache_block(1, HASHES[1])
    pool.free([1, 0])
    assert pool.take(1) == [1]
    assert pool.get_cached_block(HASHES[1]) is None
    assert pool.block_hash(1) is None
    assert pool.get_cached_block(HASHES[0]) == 0
    assert counts(pool) == (1, 1, 0)


def test_shared_block_is_freed_with_its_last_reference() -> None:
    pool = BlockPool(2)
    pool.take(1)
    pool.cache_block(0, HASHES[0])
    pool.touch([0])
    assert pool.ref_count(0) == 2
    pool.free([0])
    assert counts(pool) == (1, 0, 1)
    pool.free([0])
    assert counts(pool) == (0, 1, 1)
    with pytest.raises(AssertionError, match="block_id=0 is freed but not used"):
        pool.free([0])


def test_first_published_block_wins() -> None:
    pool = BlockPool(3)
    pool.take(2)
    pool.cache_block(0, HASHES[0])
    pool.cache_block(1, HASHES[0])
    assert pool.get_cached_block(HASHES[0]) == 0
    assert pool.block_hash(1) is None
    pool.free([0, 1])
    assert pool.take_order() == [1, 2, 0]


def test_publishing_needs_a_used_unpublished_block() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="not used"):
        pool.cache_block(0, HASHES[0])
    pool.take(1)
    pool.cache_block(0, HASHES[0])
    with pytest.raises(AssertionError, match="published twice"):
        pool.cache_block(0, HASHES[1])


def test_a_block_without_content_cannot_be_touched() -> None:
    with pytest.raises(KeyError):
        BlockPool(2).touch([0])


def test_reset_forgets_hashes_and_keeps_used_blocks() -> None:
    pool = BlockPool(4)
    pool.take(3)
    for block_id in range(3):
        pool.cache_block(block_id, HASHES[block_id])
    pool.free([1, 0])
    pool.reset_prefix_cache()
    assert [pool.get_cached_block(h) for h in HASHES[:3]] == [None] * 3
    assert counts(pool) == (1, 0, 3)
    assert pool.take_order() == [1, 0, 3]
    pool.check_integrity([[2]])


def test_without_caching_nothing_is_published() -> None:
    pool = BlockPool(2, enable_caching=False)
    pool.take(1)
    pool.cache_block(0, HASHES[0])
    assert pool.get_cached_block(HASHES[0]) is None
    pool.free([0])
    assert counts(pool) == (0, 0, 2)


@pytest.mark.parametrize(
    ("block_tables", "words"),
    [
        ([[0, 1]], "block_id=1 ref_count=2 but 1 block table entries"),
        ([[0, 1], [1], [2]], "block_id=2 ref_count=0 but 1 block table entries"),
        ([], "block_id=0 ref_count=1 but 0 block table entries"),
    ],
)
def test_integrity_compares_ref_counts_with_block_tables(
    block_tables: list[list[int]], words: str
) -> None:
    pool = BlockPool(3)
    pool.take(2)
    pool.touch([1])
    pool.check_integrity([[0, 1], [1]])
    with pytest.raises(AssertionError, match=words):
        pool.check_integrity(block_tables)


def test_integrity_finds_a_block_in_two_places_and_in_none() -> None:
    pool = BlockPool(3)
    pool.take(1)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="not every block is in one place"):
        pool.check_integrity([[0]])
    pool._free[:] = [1]
    with pytest.raises(AssertionError, match="not every block is in one place"):
        pool.check_integrity([[0]])


def test_integrity_finds_hash_maps_that_disagree() -> None:
    pool = BlockPool(3)
    pool.take(1)
    pool._block_of_hash[HASHES[0]] = 0
    with pytest.raises(AssertionError, match="is not the inverse"):
        pool.check_integrity([[0]])
