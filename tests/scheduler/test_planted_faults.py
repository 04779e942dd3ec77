"""Each fault here is one that a careless change could make; the state machines must notice it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from rawpaged.request import Request
from rawpaged.scheduler import block_hash
from rawpaged.scheduler.block_pool import BlockPool
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from rawpaged.scheduler.scheduler import Scheduler
from tests.scheduler.machines import BlockPoolMachine, SchedulerMachine

SETTINGS = settings(
    max_examples=20_000,
    stateful_step_count=25,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

free_rightly = BlockPool.free
touch_rightly = BlockPool.touch
evict_rightly = BlockPool._evict
cache_block_rightly = BlockPool.cache_block
release_rightly = KVCacheManager.free
preempt_rightly = Scheduler._preempt
admit_rightly = Scheduler._admit_next
hash_rightly = block_hash.hash_block


def free_one_block_too_few(pool: BlockPool, block_ids: Iterable[int]) -> None:
    free_rightly(pool, list(block_ids)[:-1])


def free_with_a_reference_left(pool: BlockPool, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        pool._ref_counts[block_id] -= 1
        pool.num_refs -= 1
        pool.num_shared_blocks -= pool._ref_counts[block_id] == 1
        if pool._ref_counts[block_id] <= 1:
            pool._free.append(block_id)


def evict_but_keep_the_hash(pool: BlockPool) -> int:
    pool.num_evictions += 1
    return pool._cached.popitem(last=False)[0]


def evict_the_most_recent(pool: BlockPool) -> int:
    pool.num_evictions += 1
    block_id, _ = pool._cached.popitem(last=True)
    del pool._block_of_hash[pool._hash_of_block.pop(block_id)]
    return block_id


def touch_but_leave_evictable(pool: BlockPool, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        pool._ref_counts[block_id] += 1
        pool.num_refs += 1
        pool.num_shared_blocks += pool._ref_counts[block_id] == 2


def touch_without_counting_the_share(pool: BlockPool, block_ids: Iterable[int]) -> None:
    num_shared = pool.num_shared_blocks
    touch_rightly(pool, block_ids)
    pool.num_shared_blocks = num_shared


def evict_without_counting(pool: BlockPool) -> int:
    block_id = evict_rightly(pool)
    pool.num_evictions -= 1
    return block_id


def publish_over_the_first(pool: BlockPool, block_id: int, block_hash: bytes) -> None:
    pool._block_of_hash.pop(block_hash, None)
    cache_block_rightly(pool, block_id, block_hash)


POOL_FAULTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (BlockPool, "free", free_one_block_too_few),
    (BlockPool, "free", free_with_a_reference_left),
    (BlockPool, "_evict", evict_but_keep_the_hash),
    (BlockPool, "_evict", evict_the_most_recent),
    (BlockPool, "touch", touch_but_leave_evictable),
    (BlockPool, "touch", touch_without_counting_the_share),
    (BlockPool, "_evict", evict_without_counting),
    (BlockPool, "cache_block", publish_over_the_first),
]


def publish_blocks_before_they_are_computed(manager: KVCacheManager, request: Request) -> None:
    allocation = manager._allocations[request.request_id]
    block_hash.extend_block_hashes(request, manager.block_size)
    pairs = list(zip(allocation.block_table, request.block_hashes, strict=False))
    if manager.block_pool.enable_caching and allocation.publishes:
        for block_id, digest in pairs[allocation.num_published :]:
            manager.block_pool.cache_block(block_id, digest)
        allocation.num_published = max(allocation.num_published, len(pairs))


def hit_up_to_the_last_token(manager: KVCacheManager, request: Request) -> tuple[list[int], int]:
    if not (manager.block_pool.enable_caching and request.reads_prefix_cache):
        return [], 0
    block_hash.extend_block_hashes(request, manager.block_size)
    block_ids = []
    for digest in request.block_hashes:
        block_id = manager.block_pool.get_cached_block(digest)
        if block_id is None:
            break
        block_ids.append(block_id)
    return block_ids, len(block_ids) * manager.block_size


def count_hits_as_room(
    manager: KVCacheManager, num_new_blocks: int, computed_blocks: Sequence[int]
) -> bool:
    return num_new_blocks <= manager.block_pool.num_takeable_blocks


def keep_blocks_of_stopped_requests(manager: KVCacheManager, request: Request) -> None:
    if request.finish_reason is None:
        release_rightly(manager, request)


def hash_without_parent(
    parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[str] = ()
) -> bytes:
    return hash_rightly(block_hash.NO_PARENT, token_ids, extra_keys)


def hash_without_keys(
    parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[str] = ()
) -> bytes:
    return hash_rightly(parent, token_ids)


def overtake_in_waiting(scheduler: Scheduler, budget: int) -> int:
    for request_id in list(scheduler._waiting):
        num_tokens = admit_rightly(scheduler, budget)
        if num_tokens:
            return num_tokens
        scheduler._waiting.move_to_end(request_id)
    return 0


def preempt_to_the_back(scheduler: Scheduler, request: Request) -> None:
    preempt_rightly(scheduler, request)
    scheduler._waiting.move_to_end(request.request_id)


def preempt_the_oldest(
    scheduler: Scheduler, request: Request, num_new_tokens: int, preempted: list[str]
) -> bool:
    while not scheduler.kv_cache_manager.allocate_slots(request, num_new_tokens):
        victim = scheduler._running[0]
        scheduler._preempt(victim)
        preempted.append(victim.request_id)
        if victim is request:
            return False
    return True


def preempt_without_freeing(scheduler: Scheduler, request: Request) -> None:
    scheduler._running.remove(request)
    scheduler._waiting[request.request_id] = request
    scheduler._waiting.move_to_end(request.request_id, last=False)


SCHEDULER_FAULTS: list[tuple[Any, str, Callable[..., Any]]] = [
    *POOL_FAULTS[:3],
    (BlockPool, "touch", touch_but_leave_evictable),
    (KVCacheManager, "publish", publish_blocks_before_they_are_computed),
    (KVCacheManager, "get_computed_blocks", hit_up_to_the_last_token),
    (KVCacheManager, "_can_take", count_hits_as_room),
    (KVCacheManager, "free", keep_blocks_of_stopped_requests),
    (block_hash, "hash_block", hash_without_parent),
    (block_hash, "hash_block", hash_without_keys),
    (Scheduler, "_admit_next", overtake_in_waiting),
    (Scheduler, "_preempt", preempt_to_the_back),
    (Scheduler, "_preempt", preempt_without_freeing),
    (Scheduler, "_make_room", preempt_the_oldest),
]


CASES = [
    *((BlockPoolMachine, *fault) for fault in POOL_FAULTS),
    *((SchedulerMachine, *fault) for fault in SCHEDULER_FAULTS),
]


@pytest.mark.parametrize(
    ("machine", "owner", "name", "fault"),
    CASES,
    ids=[f"{machine.__name__}-{fault.__name__}" for machine, _, _, fault in CASES],
)
def test_the_state_machine_notices(
    machine: type[RuleBasedStateMachine],
    owner: Any,
    name: str,
    fault: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, LookupError)):
        run_state_machine_as_test(machine, settings=SETTINGS)
