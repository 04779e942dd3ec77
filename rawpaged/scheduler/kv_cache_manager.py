"""Block tables: which blocks hold the KV of which request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rawpaged.request import Request
from rawpaged.scheduler.block_hash import extend_block_hashes
from rawpaged.scheduler.block_pool import BlockPool


@dataclass(slots=True)
class _Allocation:
    """Blocks of one request."""

    block_table: list[int]
    num_published: int
    """Blocks [0, num_published) came from the prefix cache or have been offered to it."""
    publishes: bool = True
    """False once the prefix cache was reset under it."""


class KVCacheManager:
    """Gives requests blocks, finds prefixes that are computed already, publishes new ones.

    Block tables are append-only: a block that a request holds stays where it is until all of the
    request's blocks are freed together.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks, enable_caching)
        self._allocations: dict[str, _Allocation] = {}

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """Blocks of the longest cached prefix, and the number of tokens they hold.

        Takes no reference: the blocks are the request's only after `allocate_slots`. The last
        token is never part of the prefix, since the step has to compute something to sample from.
        """
        if not (self.block_pool.enable_caching and request.reads_prefix_cache):
            return [], 0
        extend_block_hashes(request, self.block_size)
        block_ids: list[int] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block_id = self.block_pool.get_cached_block(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids, len(block_ids) * self.block_size

    def has_room_for(self, request: Request, computed_blocks: Sequence[int]) -> bool:
        """Whether all tokens that a waiting request has now would fit beside what runs."""
        num_new_blocks = self._num_blocks(request.num_tokens) - len(computed_blocks)
        return self._can_take(num_new_blocks, computed_blocks)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed_blocks: Sequence[int] = ()
    ) -> bool:
        """Makes the block table cover `num_new_tokens` more tokens; all or nothing.

        `computed_blocks` come from `get_computed_blocks`, and only a request without blocks may
        have any; its num_computed_tokens does not count them yet.

            tokens [0, num_computed) | [num_computed, num_computed + num_new_tokens)
            first: computed_blocks   | taken now
            later: block_table, last block maybe not full ... | taken now
        """
        allocation = self._allocations.get(request.request_id)
        if allocation is None:
            allocation = _Allocation(list(computed_blocks), len(computed_blocks))
        else:
            assert not computed_blocks, f"{request.request_id} has blocks already"
        num_computed = request.num_computed_tokens + len(computed_blocks) * self.block_size
        num_blocks = self._num_blocks(num_computed + num_new_tokens)
        num_new_blocks = num_blocks - len(allocation.block_table)
        if not self._can_take(num_new_blocks, computed_blocks):
            return False
        self.block_pool.touch(computed_blocks)
        allocation.block_table += self.block_pool.take(num_new_blocks)
        self._allocations[request.request_id] = allocation
        return True

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The request's blocks, in token order."""
        return tuple(self._allocations[request_id].block_table)

    def unfilled_blocks(self, request: Request) -> list[int]:
        """The end of the request's block table that its computed tokens do not fill."""
        allocation = self._allocations[request.request_id]
        return allocation.block_table[request.num_computed_tokens // self.block_size :]

    def publish(self, request: Request) -> None:
        """Lets others find the request's full blocks below num_computed_tokens.

        [0, num_published) [num_published, num_computed_tokens // block_size) | not full
        known already      published now                                      | stays private
        """
        allocation = self._allocations[request.request_id]
        num_full_blocks = request.num_computed_tokens // self.block_size
        if num_full_blocks == allocation.num_published or not allocation.publishes:
            return
        if self.block_pool.enable_caching:
            extend_block_hashes(request, self.block_size)
            for index in range(allocation.num_published, num_full_blocks):
                self.block_pool.cache_block(
                    allocation.block_table[index], request.block_hashes[index]
                )
        allocation.num_published = num_full_blocks

    def free(self, request: Request) -> None:
        """Gives up the request's blocks, its tail first; a request without any is fine."""
        allocation = self._allocations.pop(request.request_id, None)
        if allocation is not None:
            self.block_pool.free(reversed(allocation.block_table))

    def reset_prefix_cache(self) -> None:
        """No later prefix hit sees KV from before this call.

        Running requests keep their blocks. What they still compute rests on KV from before, so
        they publish nothing more.
        """
        self.block_pool.reset_prefix_cache()
        for allocation in self._allocations.values():
            allocation.publishes = False

    def check_integrity(self) -> None:
        """Raises AssertionError unless pool and block tables agree; linear in the pool's size."""
        self.block_pool.check_integrity(
            [allocation.block_table for allocation in self._allocations.values()]
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _can_take(self, num_new_blocks: int, computed_blocks: Sequence[int]) -> bool:
        # A hit that no one holds counts as takeable until it is touched.
        ref_count = self.block_pool.ref_count
        num_idle_hits = sum(ref_count(block_id) == 0 for block_id in computed_blocks)
        return num_new_blocks + num_idle_hits <= self.block_pool.num_takeable_blocks
