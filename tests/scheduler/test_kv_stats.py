"""KVStats beside a walk over every slot of every block table."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rawpaged.request import RequestStatus
from rawpaged.scheduler.kv_stats import KVStats
from tests.scheduler.harness import Runner, make_config, make_group, make_request


def walked(runner: Runner) -> KVStats:
    """The same numbers, taken from block tables alone, slot by slot."""
    scheduler = runner.scheduler
    manager, pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
    tables = {
        request.request_id: manager.block_table(request.request_id)
        for request in runner.requests.values()
        if request.status is RequestStatus.RUNNING
    }
    host_tables = [
        scheduler.swap_space.host_table(request.request_id)
        for request in runner.requests.values()
        if scheduler.swap_space.holds(request)
    ]
    refs = Counter(block_id for table in tables.values() for block_id in table)
    slots = {(block_id, slot): False for block_id in refs for slot in range(pool_size(runner))}
    for request_id, table in tables.items():
        for position in range(runner.requests[request_id].num_computed_tokens):
            slots[table[position // pool_size(runner)], position % pool_size(runner)] = True
    touched = {block_id for (block_id, _), is_used in slots.items() if is_used}
    open_slots = [block_id for (block_id, _), is_used in slots.items() if not is_used]
    return KVStats(
        num_blocks=pool.num_blocks,
        block_size=pool_size(runner),
        num_used_blocks=len(refs),
        num_cached_blocks=sum(
            pool.block_hash(b) is not None and b not in refs for b in range(pool.num_blocks)
        ),
        num_block_refs=sum(refs.values()),
        num_shared_blocks=sum(count > 1 for count in refs.values()),
        num_used_slots=sum(slots.values()),
        num_unfilled_slots=sum(block_id in touched for block_id in open_slots),
        num_reserved_slots=sum(block_id not in touched for block_id in open_slots),
        num_evictions=pool.num_evictions,
        num_host_blocks=scheduler.config.num_host_blocks,
        num_used_host_blocks=len({block_id for table in host_tables for block_id in table}),
        num_swapped_requests=len(host_tables),
        num_preemptions=sum(r.num_preemptions for r in runner.requests.values()),
        num_swap_preemptions=scheduler.num_swap_preemptions,
        num_swapped_out_blocks=scheduler.swap_space.num_blocks_out,
        num_swapped_in_blocks=scheduler.swap_space.num_blocks_in,
        num_block_copies=manager.num_block_copies,
        num_forks=manager.num_forks,
        prefix_cache_queries=scheduler.prefix_cache_queries,
        prefix_cache_hits=sum(r.num_cached_tokens for r in runner.requests.values()),
    )


def pool_size(runner: Runner) -> int:
    return runner.scheduler.config.block_size


def add_some(runner: Runner, rng: random.Random, number: int) -> None:
    """A single request, one with three samples, or a search of two beams."""
    n = rng.choice((1, 1, 2, 3))
    runner.add_group(
        make_group(
            f"r{number}",
            n,
            [number % 3] * rng.randint(1, 12),
            rng.randint(1, 12),
            lockstep=n == 2,
        )
    )


@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_every_step_of_a_crowded_pool(num_host_blocks: int) -> None:
    """Chunked prompts, prefix hits, forks, copies, beams and preemption, all in one pool."""
    rng = random.Random(7)
    runner = Runner(
        make_config(
            num_blocks=16,
            block_size=3,
            max_num_seqs=6,
            max_model_len=42,
            max_num_batched_tokens=8,
            num_host_blocks=num_host_blocks,
            preemption_mode="swap" if num_host_blocks else "recompute",
        )
    )
    seen = Counter[str]()
    most_on_host = 0
    for number in range(60):
        add_some(runner, rng, number)
        for _ in range(rng.randint(0, 6)):
            runner.step()
            stats = runner.scheduler.kv_stats()
            assert stats == walked(runner)
            all_slots = stats.num_used_slots + stats.num_unfilled_slots + stats.num_reserved_slots
            assert all_slots == stats.num_used_blocks * stats.block_size
            assert stats.num_free_blocks >= 0
            seen += Counter(
                shared=stats.num_shared_blocks,
                saved=stats.num_saved_blocks,
                unfilled=stats.num_unfilled_slots,
                reserved=stats.num_reserved_slots,
            )
            most_on_host = max(most_on_host, stats.num_used_host_blocks)
    runner.drain(max_steps=1000)
    last = runner.scheduler.kv_stats()
    assert last == walked(runner)
    assert (last.num_used_blocks, last.num_block_refs, last.num_used_slots) == (0, 0, 0)
    assert last.num_used_host_blocks == last.num_swapped_requests == 0
    assert len(seen) == 4
    assert (most_on_host > 0) is (num_host_blocks > 0)
    for total in (last.num_evictions, last.num_preemptions, last.num_forks, last.num_block_copies):
        assert total > 0


def test_the_text_book_case() -> None:
    """35 tokens in blocks of 16 leave 13 slots."""
    runner = Runner(make_config(block_size=16, max_model_len=160, max_num_batched_tokens=64))
    runner.add(make_request("a", [1] * 35))
    runner.step()
    stats = runner.scheduler.kv_stats()
    assert (stats.num_used_blocks, stats.num_used_slots, stats.num_unfilled_slots) == (3, 35, 13)
    assert stats.num_reserved_slots == 0


def test_slots_of_a_step_that_was_lost_are_reserved() -> None:
    runner = Runner(make_config(block_size=4))
    runner.add(make_request("a", [1] * 6))
    runner.scheduler.schedule()
    stats = runner.scheduler.kv_stats()
    assert (stats.num_used_slots, stats.num_unfilled_slots, stats.num_reserved_slots) == (0, 0, 8)
    assert stats == walked(runner)


def test_a_block_that_only_one_owner_has_filled() -> None:
    """The other's end of it is no waste: the slots hold tokens."""
    runner = Runner(make_config(block_size=4, max_num_batched_tokens=40))
    manager = runner.scheduler.kv_cache_manager
    first = runner.add(make_request("a", [1] * 6, 8))
    runner.step()
    fork = make_request("b", [1] * 6, 8)
    blocks, fork.num_computed_tokens = manager.get_shareable_blocks(first, 6)
    manager.fork(first, fork, blocks)
    runner.requests["b"] = fork
    fork.status = RequestStatus.RUNNING
    runner.scheduler._running.add(fork)
    stats = runner.scheduler.kv_stats()
    assert stats == walked(runner)
    assert (stats.num_shared_blocks, stats.num_saved_blocks, stats.num_unfilled_slots) == (2, 2, 2)
    first.num_computed_tokens = 7
    assert runner.scheduler.kv_stats() == walked(runner)
    assert runner.scheduler.kv_stats().num_unfilled_slots == 1
    first.num_computed_tokens = 8
    stats = runner.scheduler.kv_stats()
    assert stats == walked(runner)
    assert stats.num_unfilled_slots == 0
