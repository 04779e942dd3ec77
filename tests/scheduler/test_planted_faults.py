"""Each fault here is one that a careless change could make; the state machines must notice it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from rawpaged.request import Request, RequestGroup, RequestStatus
from rawpaged.scheduler import block_hash
from rawpaged.scheduler.admission import Admission
from rawpaged.scheduler.block_pool import BlockPool
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from rawpaged.scheduler.output import SchedulerOutput
from rawpaged.scheduler.preemption import Preemption
from rawpaged.scheduler.prefix_cache import PrefixCache
from rawpaged.scheduler.scheduler import Scheduler
from rawpaged.scheduler.step import Step
from rawpaged.scheduler.swap_space import SwapIn, SwapSpace
from tests.scheduler.pool_machine import BlockPoolMachine
from tests.scheduler.scheduler_machine import SchedulerMachine

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
preempt_rightly = Preemption.preempt
admit_rightly = Admission._admit_group
append_rightly = KVCacheManager.allocate_slots
start_rightly = KVCacheManager.start
give_rightly = Step.give
publish_rightly = PrefixCache.publish
swap_out_rightly = SwapSpace.swap_out
swap_in_rightly = SwapSpace.swap_in
swap_group_rightly = Preemption.preempt_group
complete_rightly = Scheduler.complete
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


POOL_FAULTS: list[tuple[Any, str, Any]] = [
    (BlockPool, "free", free_one_block_too_few),
    (BlockPool, "free", free_with_a_reference_left),
    (BlockPool, "_evict", evict_but_keep_the_hash),
    (BlockPool, "_evict", evict_the_most_recent),
    (BlockPool, "touch", touch_but_leave_evictable),
    (BlockPool, "touch", touch_without_counting_the_share),
    (BlockPool, "_evict", evict_without_counting),
    (BlockPool, "cache_block", publish_over_the_first),
]


def publish_blocks_before_they_are_computed(
    cache: PrefixCache, request: Request, block_table: Sequence[int], first: int
) -> int:
    num_computed_tokens = request.num_computed_tokens
    request.num_computed_tokens = min(request.num_tokens, len(block_table) * cache._block_size)
    end = publish_rightly(cache, request, block_table, first)
    request.num_computed_tokens = num_computed_tokens
    return end


def announce_for_ever(cache: PrefixCache, request_id: str) -> None:
    pass


def wait_for_what_nobody_computes(cache: PrefixCache, block_hash: bytes | None) -> bool:
    return block_hash is not None


def count_hits_as_room(
    manager: KVCacheManager, num_new_blocks: int, computed_blocks: Iterable[int]
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


def overtake_in_waiting(admission: Admission, group: RequestGroup, step: Step) -> bool:
    admit_rightly(admission, group, step)
    return True


def preempt_to_the_back(preemption: Preemption, victims: Sequence[Request], step: Step) -> None:
    preempt_rightly(preemption, victims, step)
    group = victims[0].group
    if not preemption._running.members(group):
        members = preemption._waiting.members(group)
        for request in members:
            preemption._waiting.remove(request)
        group.number += 1_000_000
        for request in members:
            preemption._waiting.add(request)


def preempt_the_oldest(
    scheduler: Scheduler, group: RequestGroup, ready: list[Request], step: Step
) -> list[Request]:
    while not scheduler.kv_cache_manager.has_slots_for(ready):
        victims = scheduler._running.members(scheduler._running.groups[0])
        scheduler._preemption.preempt(victims, step)
        ready = [request for request in ready if request not in victims]
    return ready


def preempt_without_freeing(preemption: Preemption, victims: Sequence[Request], step: Step) -> None:
    for request in reversed(victims):
        preemption._stop(request, RequestStatus.PREEMPTED, step)


def part_those_in_lockstep(
    scheduler: Scheduler, group: RequestGroup, ready: list[Request], step: Step
) -> list[Request]:
    while not scheduler.kv_cache_manager.has_slots_for(ready):
        last = scheduler._running.members(scheduler._running.groups[-1])[-1:]
        scheduler._preemption.preempt(last, step)
        ready = [request for request in ready if request not in last]
    return ready


def write_to_shared_blocks(manager: KVCacheManager, request: Request, num_new_tokens: int) -> bool:
    ref_count = manager.block_pool.ref_count
    manager.block_pool.ref_count = lambda block_id: 1  # type: ignore[method-assign]
    try:
        return append_rightly(manager, request, num_new_tokens)
    finally:
        manager.block_pool.ref_count = ref_count  # type: ignore[method-assign]


def replace_a_shared_block_without_copying(
    manager: KVCacheManager, table: tuple[int, ...], index: int
) -> tuple[int, ...]:
    (target,) = manager.block_pool.take(1)
    manager.block_pool.free([table[index]])
    return (*table[:index], target, *table[index + 1 :])


def copy_the_wrong_way_round(
    manager: KVCacheManager, table: tuple[int, ...], index: int
) -> tuple[int, ...]:
    (target,) = manager.block_pool.take(1)
    manager._copies.append((target, table[index]))
    manager.block_pool.free([table[index]])
    return (*table[:index], target, *table[index + 1 :])


def copy_and_keep_the_reference(
    manager: KVCacheManager, table: tuple[int, ...], index: int
) -> tuple[int, ...]:
    (target,) = manager.block_pool.take(1)
    manager._copies.append((table[index], target))
    return (*table[:index], target, *table[index + 1 :])


def copy_again_in_every_step(manager: KVCacheManager) -> tuple[tuple[int, int], ...]:
    return tuple(manager._copies)


def count_no_room_for_copies(manager: KVCacheManager, requests: Iterable[Request]) -> bool:
    num_needed = sum(
        request.num_computed_tokens
        == len(manager.block_table(request.request_id)) * manager.block_size
        for request in requests
    )
    return num_needed <= manager.block_pool.num_takeable_blocks


def share_blocks_that_get_full(
    manager: KVCacheManager, parent: Request, num_tokens: int
) -> tuple[list[int], int]:
    num_blocks = -(-num_tokens // manager.block_size)
    return list(manager.block_table(parent.request_id)[:num_blocks]), num_tokens


def fork_without_references(
    manager: KVCacheManager, parent: Request, child: Request, computed_blocks: Sequence[int]
) -> None:
    start_rightly(manager, child, [])
    allocation = manager._allocations[child.request_id]
    own = allocation.block_table
    manager.block_pool.free(own[: len(computed_blocks)])
    allocation.block_table = (*computed_blocks, *own[len(computed_blocks) :])


def fork_from_other_tokens(admission: Admission, request: Request, sibling: Request) -> int:
    return min(request.num_tokens, sibling.num_computed_tokens)


def copy_what_this_step_computes(admission: Admission, request: Request, sibling: Request) -> int:
    end = admission._kv_cache_manager.num_tokens_in_blocks(sibling)
    pairs = zip(request.token_ids, sibling.token_ids[:end], strict=False)
    equal = [own == other for own, other in pairs]
    return equal.index(False) if False in equal else len(equal)


def store_what_is_stored(step: Step, request: Request, num_tokens: int) -> None:
    num_computed = request.num_computed_tokens
    if num_computed == request.num_tokens:
        request.num_computed_tokens -= 1
        give_rightly(step, request, num_tokens)
        request.num_computed_tokens = num_computed
        # The copy that was made for it is what a careless change would leave out.
        copies = dict((new, old) for old, new in step._kv_cache_manager._copies)
        scheduled = step._scheduled.pop()
        table = tuple(copies.get(block_id, block_id) for block_id in scheduled.block_table)
        step._scheduled.append(scheduled._replace(block_table=table))
    else:
        give_rightly(step, request, num_tokens)


def reorder_and_free_first(
    manager: KVCacheManager, requests: Sequence[Request], parents: Sequence[int]
) -> None:
    before = [manager._allocations[request.request_id] for request in requests]
    tables = [before[parent].block_table for parent in parents]
    for allocation in before:
        manager.block_pool.free(reversed(allocation.block_table))
    for request, table in zip(requests, tables, strict=True):
        manager._allocations[request.request_id].block_table = table
        for block_id in table:
            manager.block_pool._ref_counts[block_id] += 1
            manager.block_pool.num_refs += 1


def reorder_tables_only(
    scheduler: Scheduler,
    requests: Sequence[Request],
    parents: Sequence[int],
    token_ids: Sequence[int],
) -> None:
    scheduler.kv_cache_manager.reorder(requests, parents)
    tokens = [list(request.token_ids) for request in requests]
    for request, parent, token_id in zip(requests, parents, token_ids, strict=True):
        request.token_ids = [*tokens[parent], token_id]


def swap_out_without_copies(swap_space: SwapSpace, requests: Sequence[Request]) -> Any:
    pairs = swap_out_rightly(swap_space, requests)
    return pairs and pairs[1:]


def swap_in_without_copies(swap_space: SwapSpace, plan: SwapIn) -> Any:
    return swap_in_rightly(swap_space, plan)[1:]


def swap_in_from_evicted_blocks(swap_space: SwapSpace, plan: SwapIn) -> Any:
    pool = swap_space._kv_cache_manager.block_pool
    num_new_blocks = min(plan.num_new_blocks, pool.num_takeable_blocks)
    pool.free(pool.take(num_new_blocks))
    return swap_in_rightly(swap_space, plan)


def keep_host_blocks_of_ended_requests(swap_space: SwapSpace, request: Request) -> None:
    swap_space._swapped.pop(request.request_id, None)


def share_no_references_in_the_swap_space(
    swap_space: SwapSpace, requests: Sequence[Request]
) -> Any:
    pairs = swap_out_rightly(swap_space, requests)
    if pairs is not None:
        pool = swap_space.block_pool
        for _, block_id in pairs:
            pool.free([block_id] * (pool.ref_count(block_id) - 1))
    return pairs


def swap_in_without_room(swap_space: SwapSpace, plan: SwapIn, num_spare_blocks: int = 0) -> bool:
    return True


def swap_only_the_last(preemption: Preemption, victims: Sequence[Request], step: Step) -> None:
    swap_group_rightly(preemption, victims[-1:], step)
    if victims[:-1]:
        preemption.preempt(victims[:-1], step)


def let_swapped_ones_outlive_a_failed_step(output: SchedulerOutput) -> tuple[str, ...]:
    return tuple(scheduled.request_id for scheduled in output.scheduled)


def forget_what_the_preempted_have_sampled(scheduler: Scheduler, sampled: Any) -> list[Request]:
    under_way = scheduler._under_way
    under_way[:] = [
        (scheduled, request)
        for scheduled, request in under_way
        if request.status in (RequestStatus.RUNNING, RequestStatus.FINISHED)
    ]
    return complete_rightly(scheduler, sampled)


def go_on_after_the_last_token(request: Request) -> bool:
    return False


def sample_out_of_step(scheduler: Scheduler, group: RequestGroup, budget: int) -> list[Request]:
    members = scheduler._running.members(group)
    return [request for request in members if request.num_missing_tokens == 1][:budget]


SCHEDULER_FAULTS: list[tuple[Any, str, Any]] = [
    *POOL_FAULTS[:3],
    (BlockPool, "touch", touch_but_leave_evictable),
    (PrefixCache, "publish", publish_blocks_before_they_are_computed),
    (PrefixCache, "withdraw", announce_for_ever),
    (PrefixCache, "is_announced", wait_for_what_nobody_computes),
    (KVCacheManager, "can_take", count_hits_as_room),
    (KVCacheManager, "free", keep_blocks_of_stopped_requests),
    (block_hash, "hash_block", hash_without_parent),
    (block_hash, "hash_block", hash_without_keys),
    (Admission, "_admit_group", overtake_in_waiting),
    (Preemption, "preempt", preempt_to_the_back),
    (Preemption, "preempt", preempt_without_freeing),
    (Scheduler, "_make_room", preempt_the_oldest),
    (Scheduler, "_make_room", part_those_in_lockstep),
    (KVCacheManager, "allocate_slots", write_to_shared_blocks),
    (KVCacheManager, "_copy_on_write", replace_a_shared_block_without_copying),
    (KVCacheManager, "_copy_on_write", copy_the_wrong_way_round),
    (KVCacheManager, "_copy_on_write", copy_and_keep_the_reference),
    (KVCacheManager, "take_block_copies", copy_again_in_every_step),
    (KVCacheManager, "has_slots_for", count_no_room_for_copies),
    (KVCacheManager, "get_shareable_blocks", share_blocks_that_get_full),
    (KVCacheManager, "fork", fork_without_references),
    (Admission, "_num_common_tokens", fork_from_other_tokens),
    (Admission, "_num_common_tokens", copy_what_this_step_computes),
    (Step, "give", store_what_is_stored),
    (KVCacheManager, "reorder", reorder_and_free_first),
    (Scheduler, "reorder", reorder_tables_only),
    (Scheduler, "_ready_to_sample", sample_out_of_step),
    (Scheduler, "complete", forget_what_the_preempted_have_sampled),
    (Request, "awaits_last_token", property(go_on_after_the_last_token)),
    (SwapSpace, "swap_out", swap_out_without_copies),
    (SwapSpace, "swap_in", swap_in_without_copies),
    (SwapSpace, "swap_in", swap_in_from_evicted_blocks),
    (SwapSpace, "free", keep_host_blocks_of_ended_requests),
    (SwapSpace, "swap_out", share_no_references_in_the_swap_space),
    (SwapSpace, "has_room_for", swap_in_without_room),
    (Preemption, "preempt_group", swap_only_the_last),
    (SchedulerOutput, "request_ids", property(let_swapped_ones_outlive_a_failed_step)),
]


CASES = [
    *((BlockPoolMachine, *fault) for fault in POOL_FAULTS),
    *((SchedulerMachine, *fault) for fault in SCHEDULER_FAULTS),
]


@pytest.mark.parametrize(
    ("machine", "owner", "name", "fault"),
    CASES,
    ids=[
        f"{machine.__name__}-{getattr(fault, 'fget', fault).__name__}"
        for machine, _, _, fault in CASES
    ],
)
def test_the_state_machine_notices(
    machine: type[RuleBasedStateMachine],
    owner: Any,
    name: str,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        run_state_machine_as_test(machine, settings=SETTINGS)
