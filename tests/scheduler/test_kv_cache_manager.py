"""Prefix caching and allocation with literal block ids; blocks hold 4 tokens."""

from __future__ import annotations

import pytest

from rawpaged.request import Request
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from tests.scheduler.harness import make_request


def start(manager: KVCacheManager, request: Request) -> None:
    """Allocates and computes all tokens of a request in one step."""
    begin(manager, request)
    assert manager.allocate_slots(request, request.num_tokens - request.num_computed_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.publish(request)


def begin(manager: KVCacheManager, request: Request) -> None:
    """Gives a request the blocks that it finds, and more for the rest of its tokens."""
    computed_blocks, request.num_computed_tokens = manager.get_computed_blocks(request)
    assert manager.has_room_for(request, computed_blocks, request.num_computed_tokens)
    manager.start(request, computed_blocks)


def fork(manager: KVCacheManager, parent: Request, child: Request, num_tokens: int) -> None:
    blocks, child.num_computed_tokens = manager.get_shareable_blocks(parent, num_tokens)
    manager.fork(parent, child, blocks)


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

    # 6. C repeats all 12 tokens that A had in full blocks, and takes all three. Only the logits of
    # its last token are computed, which writes nothing.
    c = make_request("C", [*range(10), 20, 21])
    assert manager.get_computed_blocks(c) == ([0, 1, 2], 12)
    start(manager, c)
    assert manager.block_table("C") == (0, 1, 2)
    assert pool.take_order() == [4, 3, 5, 6, 7]

    # 7. C ends. D shares nothing and needs six blocks: the five free ones, then 2 is evicted.
    manager.free(c)
    d = make_request("D", range(100, 122))
    start(manager, d)
    assert manager.block_table("D") == (4, 3, 5, 6, 7, 2)
    assert pool.get_cached_block(a.block_hashes[2]) is None
    manager.check_integrity()


@pytest.mark.parametrize(
    ("num_tokens", "num_hits"), [(1, 0), (3, 0), (4, 1), (5, 1), (8, 2), (11, 2), (12, 3), (14, 3)]
)
def test_hits_are_whole_blocks(num_tokens: int, num_hits: int) -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    start(manager, make_request("A", range(14)))
    block_ids, num_cached = manager.get_computed_blocks(make_request("B", range(num_tokens)))
    assert block_ids == [0, 1, 2][:num_hits]
    assert num_cached == 4 * num_hits


def test_only_computed_blocks_are_published() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    a = make_request("A", range(12))
    begin(manager, a)
    b = make_request("B", range(12))
    for num_computed, num_hits in ((0, 0), (3, 0), (4, 1), (7, 1), (11, 2), (12, 3)):
        a.num_computed_tokens = num_computed
        manager.publish(a)
        assert manager.get_computed_blocks(b)[0] == [0, 1, 2][:num_hits]


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
    assert not manager.has_room_for(make_request("B", range(50, 55)), [], 0)
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
    assert not manager.has_room_for(b, hits, 8)
    assert [manager.block_pool.ref_count(block_id) for block_id in range(3)] == [0, 0, 0]
    c = make_request("C", [*range(8), *range(50, 54)])
    assert manager.has_room_for(c, hits, 8)
    begin(manager, c)
    assert manager.block_table("C") == (0, 1, 2)


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


def test_generated_tokens_may_be_kept_out_of_the_cache() -> None:
    """A block that is half a prompt's is not published either, nor what comes after it."""
    for publish_generated, found in ((True, [0, 1, 2]), (False, [0])):
        manager = KVCacheManager(8, 4, publish_generated=publish_generated)
        a = make_request("A", range(6))
        start(manager, a)
        generate(manager, a, *range(6, 13))
        assert manager.get_computed_blocks(make_request("B", range(13)))[0] == found


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


def test_a_fork_shares_every_block_and_the_first_to_write_copies() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    pool = manager.block_pool
    requests = [make_request(name, range(6)) for name in "ABC"]
    a, b, c = requests
    start(manager, a)
    fork(manager, a, b, 6)
    fork(manager, a, c, 6)
    assert [manager.block_table(name) for name in "ABC"] == [(0, 1)] * 3
    assert [pool.ref_count(0), pool.ref_count(1)] == [3, 3]
    assert (pool.num_used_blocks, manager.num_forks) == (2, 2)
    for request in requests:
        request.token_ids.append(len(request.request_id))
    assert manager.has_slots_for(requests)
    for request in requests:
        assert manager.allocate_slots(request, 1)
    # The first two took copies; the last one has the block for itself.
    assert [manager.block_table(name) for name in "ABC"] == [(0, 2), (0, 3), (0, 1)]
    assert manager.take_block_copies() == ((1, 2), (1, 3))
    assert manager.take_block_copies() == ()
    assert [pool.ref_count(block_id) for block_id in range(4)] == [3, 1, 1, 1]
    for request in requests:
        request.num_computed_tokens += 1
        manager.publish(request)
    manager.check_integrity(requests)
    for request in requests:
        manager.free(request)
    assert pool.num_used_blocks == 0


def test_a_fork_of_full_blocks_copies_nothing() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    a, b = make_request("A", range(8)), make_request("B", range(8))
    start(manager, a)
    fork(manager, a, b, 8)
    generate(manager, a, 8)
    generate(manager, b, 9)
    assert (manager.block_table("A"), manager.block_table("B")) == ((0, 1, 2), (0, 1, 3))
    assert manager.take_block_copies() == ()


@pytest.mark.parametrize("generated", [(6, 7), (6, 7, 8)])
def test_a_full_block_is_shared_whole_or_not_at_all(generated: tuple[int, ...]) -> None:
    """It is published: whoever holds only the beginning of it would write to it in time."""
    manager = KVCacheManager(num_blocks=8, block_size=4)
    a = make_request("A", range(6))
    start(manager, a)
    generate(manager, a, *generated)
    assert manager.get_shareable_blocks(a, 6) == ([0], 4)
    assert manager.get_shareable_blocks(a, 8) == ([0, 1], 8)


def test_a_block_that_this_step_fills_is_not_shared_in_part() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    a = make_request("A", range(7))
    start(manager, a)
    assert manager.get_shareable_blocks(a, 7) == ([0, 1], 7)
    a.token_ids.append(7)
    assert manager.allocate_slots(a, 1)
    assert manager.get_shareable_blocks(a, 7) == ([0], 4)


def test_room_is_counted_for_all_writers_together() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4, enable_caching=False)
    a, b, c = requests = [make_request(name, range(6)) for name in "ABC"]
    start(manager, a)
    fork(manager, a, b, 6)
    fork(manager, a, c, 6)
    for request in requests:
        request.token_ids.append(6)
    # Two copies and the block itself: the pool's last two.
    assert manager.has_slots_for(requests)
    start(manager, make_request("D", [1]))
    assert manager.has_slots_for([a])
    assert manager.has_slots_for([a, b]) is False
    assert manager.allocate_slots(a, 1)
    before = manager.block_table("B")
    assert not manager.allocate_slots(b, 1)
    assert manager.block_table("B") == before


def test_a_fork_publishes_no_more_than_its_parent() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    a, b = make_request("A", range(6)), make_request("B", range(6))
    start(manager, a)
    manager.reset_prefix_cache()
    fork(manager, a, b, 6)
    generate(manager, b, 6, 7)
    assert manager.block_pool.published_blocks() == []


def test_reorder() -> None:
    """Beams: 0 and 1 go on from what was 1, and 2 from what was 0."""
    manager = KVCacheManager(num_blocks=10, block_size=4)
    pool = manager.block_pool
    a, b, c = beams = [make_request(name, range(6)) for name in "ABC"]
    start(manager, a)
    fork(manager, a, b, 6)
    fork(manager, a, c, 6)
    for i, request in enumerate(beams):
        generate(manager, request, 10 + i, 20 + i, 30 + i)
    manager.take_block_copies()
    tables = [manager.block_table(name) for name in "ABC"]
    assert len({block_id for table in tables for block_id in table}) == 7
    manager.reorder(beams, [1, 1, 0])
    assert [manager.block_table(name) for name in "ABC"] == [tables[1], tables[1], tables[0]]
    assert [pool.ref_count(block_id) for block_id in tables[1]] == [3, 2, 2]
    assert [pool.ref_count(block_id) for block_id in tables[2][1:]] == [0, 0]
    manager.check_integrity()
    manager.reorder(beams, [0, 1, 2])
    assert [manager.block_table(name) for name in "ABC"] == [tables[1], tables[1], tables[0]]
    for request in beams:
        manager.free(request)
    assert pool.num_used_blocks == 0
