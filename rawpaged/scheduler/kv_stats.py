"""What the KV pool holds, what of it is waste, and what has happened to it: numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rawpaged.request import Request
from rawpaged.scheduler.admission import Admission
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from rawpaged.scheduler.preemption import Preemption
from rawpaged.scheduler.swap_space import SwapSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStats:
    """The KV pool between two steps, and totals since the engine was made.

    Every block is used, cached or free. Every slot of a used block is used, unfilled or reserved,
    so `num_used_slots + num_unfilled_slots + num_reserved_slots` is `num_used_blocks * block_size`.
    Waste in the sense of the PagedAttention paper (arXiv 2309.06180): unfilled slots are internal
    fragmentation, reserved ones reservation; external fragmentation cannot be, for any free block
    will do for any request.
    """

    num_blocks: int
    block_size: int
    """Tokens that a block has slots for."""
    num_used_blocks: int
    """Blocks held by at least one request, each counted once."""
    num_cached_blocks: int
    """Blocks held by none, and kept for prefix hits until they are evicted."""
    num_block_refs: int
    """Entries of all block tables: blocks that would be used if nothing were shared."""
    num_shared_blocks: int
    """Blocks held by more than one request."""
    num_used_slots: int
    """Slots of used blocks that hold a token's KV."""
    num_unfilled_slots: int
    """The other slots of blocks that hold a token at all."""
    num_reserved_slots: int
    """Slots of used blocks that hold none yet: those of prompts that are computed in chunks."""
    num_evictions: int
    """Cached blocks given away so far."""
    num_forks: int
    """Requests that began with the blocks of another one so far."""
    num_block_copies: int
    """Blocks copied so far because one of their owners was to write to them."""
    num_host_blocks: int
    """Blocks of the swap space in host memory."""
    num_used_host_blocks: int
    """Of those, the ones that hold blocks of swapped requests."""
    num_swapped_requests: int
    """Requests that wait with their KV in these."""
    num_preemptions: int
    """Requests that lost their blocks to others so far."""
    num_swap_preemptions: int
    """Of those, the ones whose blocks were copied to the host; the others compute them again."""
    num_swapped_out_blocks: int
    """Blocks copied to the host so far."""
    num_swapped_in_blocks: int
    """Blocks copied back so far; what the prefix cache still has is not."""
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache so far."""
    prefix_cache_hits: int
    """Of those, tokens found."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks whose content is worth nothing."""
        return self.num_blocks - self.num_used_blocks - self.num_cached_blocks

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that sharing saves: references less distinct blocks."""
        return self.num_block_refs - self.num_used_blocks


def collect_kv_stats(
    manager: KVCacheManager,
    swap_space: SwapSpace,
    preemption: Preemption,
    admission: Admission,
    running: Sequence[Request],
) -> KVStats:
    """What all parts of a scheduler have counted; `running` are all that hold blocks."""
    pool = manager.block_pool
    unfilled, reserved = count_open_slots(manager, running)
    return KVStats(
        num_blocks=pool.num_blocks,
        block_size=manager.block_size,
        num_used_blocks=pool.num_used_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_block_refs=pool.num_refs,
        num_shared_blocks=pool.num_shared_blocks,
        num_used_slots=pool.num_used_blocks * manager.block_size - unfilled - reserved,
        num_unfilled_slots=unfilled,
        num_reserved_slots=reserved,
        num_evictions=pool.num_evictions,
        num_host_blocks=swap_space.block_pool.num_blocks,
        num_used_host_blocks=swap_space.block_pool.num_used_blocks,
        num_swapped_requests=swap_space.num_requests,
        num_preemptions=preemption.num_recomputed + preemption.num_swapped,
        num_swap_preemptions=preemption.num_swapped,
        num_swapped_out_blocks=swap_space.num_blocks_out,
        num_swapped_in_blocks=swap_space.num_blocks_in,
        num_block_copies=manager.num_block_copies,
        num_forks=manager.num_forks,
        prefix_cache_queries=admission.prefix_cache_queries,
        prefix_cache_hits=admission.prefix_cache_hits,
    )


def count_open_slots(manager: KVCacheManager, requests: Iterable[Request]) -> tuple[int, int]:
    """(unfilled, reserved) slots of the blocks that `requests` hold, which are all that hold any.

    A request's blocks are full up to its open one, and empty behind it. An open block that several
    have holds what the furthest of them has in it. If one more has it, for whom it is not open, it
    is full.
    """
    num_tokens_in: dict[int, int] = {}
    num_owners: dict[int, int] = {}
    unfilled = reserved = 0
    for request in requests:
        block_id, num_empty = manager.open_block(request)
        reserved += num_empty * manager.block_size
        if block_id is not None:
            num_tokens = request.num_computed_tokens % manager.block_size
            num_tokens_in[block_id] = max(num_tokens_in.get(block_id, 0), num_tokens)
            num_owners[block_id] = num_owners.get(block_id, 0) + 1
    for block_id, num_tokens in num_tokens_in.items():
        if manager.block_pool.ref_count(block_id) > num_owners[block_id]:
            continue
        if num_tokens == 0:
            reserved += manager.block_size
        else:
            unfilled += manager.block_size - num_tokens
    return unfilled, reserved
