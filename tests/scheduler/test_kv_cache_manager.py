"""Prefix caching and allocation with literal block ids; blocks hold 4 tokens."""

from __future__ import annotations

import pytest

from rawpaged.request import Request
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from tests.scheduler.harness import make_request


def start(manager: KVCacheManager, request: Request) -> None:
    """Allocates and computes all tokens of a request in one step."""
    computed_blocks, num_cached = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - num_cached, computed_blocks)
    request.num_computed_tokens = request.num_tokens
    manager.publish(request)


def generate(manager: KVCacheManager, request: Request, *token_ids: int) -> None:
    """Samples and computes these tokens, one step each."""
    for token_id in token_ids:
        request.token_ids.append(token_id)
        assert manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        manager.publish(request)
    manager.check_integrity()


def test_worked_example_of_prefix_caching() -> None:
    """The example of docs/scheduling.md."""
    manager = KVCacheManager(num_blocks=8, block_size=4)
    pool = manager.block_pool

    # 1. A, 10 prompt tokens: two full blocks and one half full.
    a = make_request("A", range(10))
    start(manager, a)
    assert manager.block_table("A") == (0, 1, 2)
    assert [pool.block_hash(b) for b in (0, 1, 2)] == [*a.block_hashes, None]

    # 2. Two output tokens fill block 2; the third needs block 3.
    generate(manager, a, 20, 21)
    assert pool.get_cached_block(a.block_hashes[2]) == 2
    generate(manager, a, 22)
    assert manager.block_table("A") == (0, 1, 2, 3)

    # 3. B begins with the same 8 tokens and goes on differently.
    b = make_request("B", [*range(8), 30, 31])
    assert manager.get_computed_blocks(b) == ([0, 1], 8)
    start(manager, b)
    assert manager.block_table("B") == (0, 1, 4)
    assert [pool.ref_count(block_id) for block_id in range(5)] == [2, 2, 1, 1, 1]

    # 4. A ends: 3 is free, 2 cached; 0 and 1 are still B's.
    manager.free(a)
    assert pool.take_order() == [3, 5, 6, 7, 2]
    assert (pool.num_used_blocks, pool.num_cached_blocks, pool.num_free_blocks) == (3, 1, 4)

    # 5. B ends: 4 is free; 1 and 0 are cached behind 2, tail first.
    manager.free(b)
    assert pool.take_order() == [4, 3, 5, 6, 7, 2, 1, 0]

    # 6. C repeats all 12 tokens that A had in full blocks. The last block is computed again all
    # the same: its last token has to be, and only whole blocks are shared.
    c = make_request("C", [*range(10), 20, 21])
    assert manager.get_computed_blocks(c) == ([0, 1], 8)
    start(manager, c)
    assert manager.block_table("C") == (0, 1, 4)
    assert pool.block_hash(4) is None, "block 2 was there first"
    assert pool.take_order() == [3, 5, 6, 7, 2]

    # 7. D shares nothing and needs five blocks: the four free ones, then 2 is evicted.
    d = make_request("D", range(100, 118))
    start(manager, d)
    assert manager.block_table("D") == (3, 5, 6, 7, 2)
    assert pool.get_cached_block(a.block_hashes[2]) is None
    manager.check_integrity()


@pytest.mark.parametrize(
    ("num_tokens", "num_hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (14, 3)]
)
def test_hits_are_whole_blocks_and_leave_the_last_token(num_tokens: int, num_hits: int) -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    start(manager, make_request("A", range(14)))
    block_ids, num_cached = manager.get_computed_blocks(make_request("B", range(num_tokens)))
    assert block_ids == [0, 1, 2][:num_hits]
    assert num_cached == 4 * num_hits


def test_only_computed_blocks_are_published() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    a = make_request("A", range(12))
    assert manager.allocate_slots(a, 12)
    b = make_request("B", range(12))
    for num_computed, num_hits in ((0, 0), (3, 0), (4, 1), (7, 1), (11, 2), (12, 2)):
        a.num_computed_tokens = num_computed
        manager.publish(a)
        assert manager.get_computed_blocks(b)[0] == [0, 1][:num_hits]


def test_a_gap_in_the_cached_prefix_ends_it() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    a = make_request("A", range(12))
    start(manager, a)
    manager.free(a)
    start(manager, make_request("B", range(50, 58)))
    # B took free block 3, then evicted A's tail, block 2.
    assert manager.block_table("B") == (3, 2)
    assert manager.get_computed_blocks(make_request("C", range(14))) == ([0, 1], 8)
    start(manager, make_request("D", range(60, 62)))
    assert manager.get_computed_blocks(make_request("C", range(14))) == ([0], 4)


def test_allocation_is_all_or_nothing() -> None:
    manager = KVCacheManager(num_blocks=3, block_size=4)
    a = make_request("A", range(6))
    start(manager, a)
    before = manager.block_pool.take_order()
    assert not manager.allocate_slots(make_request("B", range(50, 55)), 5)
    assert manager.block_pool.take_order() == before
    assert not manager.allocate_slots(a, 7)
    assert manager.block_table("A") == (0, 1)
    assert manager.allocate_slots(a, 6)
    assert manager.block_table("A") == (0, 1, 2)
    manager.check_integrity()


def test_hits_that_nobody_holds_are_not_counted_as_room() -> None:
    manager = KVCacheManager(num_blocks=3, block_size=4)
    a = make_request("A", range(8))
    start(manager, a)
    manager.free(a)
    # Three takeable blocks, two of them the hits themselves: one is left for new tokens.
    b = make_request("B", [*range(8), *range(50, 55)])
    hits, _ = manager.get_computed_blocks(b)
    assert hits == [0, 1]
    assert not manager.has_room_for(b, hits)
    assert not manager.allocate_slots(b, 5, hits)
    assert [manager.block_pool.ref_count(block_id) for block_id in range(3)] == [0, 0, 0]
    assert manager.allocate_slots(b, 4, hits)
    assert manager.block_table("B") == (0, 1, 2)


def test_cache_keys_keep_requests_apart() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    start(manager, make_request("A", range(9), cache_keys=("salt",)))
    for cache_keys, num_hits in ((("salt",), 2), ((), 0), (("other",), 0), (("salt", "x"), 0)):
        request = make_request("B", range(9), cache_keys=cache_keys)
        assert len(manager.get_computed_blocks(request)[0]) == num_hits


def test_prompt_logprobs_publish_but_do_not_read() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    start(manager, make_request("A", range(9), prompt_logprobs=0))
    assert manager.get_computed_blocks(make_request("B", range(9))) == ([0, 1], 8)
    assert manager.get_computed_blocks(make_request("C", range(9), prompt_logprobs=0)) == ([], 0)


def test_without_caching_nothing_is_hashed_or_found() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4, enable_caching=False)
    a = make_request("A", range(9))
    start(manager, a)
    assert a.block_hashes == []
    assert manager.get_computed_blocks(make_request("B", range(9))) == ([], 0)
    manager.free(a)
    assert manager.block_pool.num_free_blocks == 8


def test_reset_hides_what_running_requests_computed_and_will_compute() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    a = make_request("A", range(6))
    start(manager, a)
    manager.reset_prefix_cache()
    generate(manager, a, 6, 7, 8)
    # B computes A's first block anew; A's second must not be found behind it.
    start(manager, make_request("B", range(5)))
    assert manager.get_computed_blocks(make_request("C", range(9))) == ([3], 4)


def test_freeing_a_request_without_blocks_is_fine() -> None:
    KVCacheManager(num_blocks=1, block_size=4).free(make_request("A", [1]))
