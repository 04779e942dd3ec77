"""Block tables: which blocks hold the KV of which request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rawpaged.request import Request
from rawpaged.scheduler.block_pool import BlockPool
from rawpaged.scheduler.prefix_cache import PrefixCache


@dataclass(slots=True)
class _Allocation:
    """Blocks of one request."""

    block_table: tuple[int, ...]
    """Another one whenever a block changes: who holds the same one as before knows its blocks."""
    num_published: int
    """Blocks [0, num_published) came from others or have been offered to the prefix cache."""
    num_tokens: int
    """Tokens that the blocks hold, counting those that the step on its way writes."""
    publishes: bool = True
    """False once the prefix cache was reset under it."""


class KVCacheManager:
    """Gives requests blocks, lets them share what is computed already, publishes new blocks.

    A block table grows at its end, and its blocks are freed together. Only one entry is ever
    replaced: a block that others hold too, by a copy, before the request writes to it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        *,
        publish_generated: bool = True,
    ) -> None:
        """Without `publish_generated`, blocks that hold generated tokens stay private."""
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks, enable_caching)
        self._prefix_cache = PrefixCache(self.block_pool, block_size, publish_generated)
        self._allocations: dict[str, _Allocation] = {}
        self._copies: list[tuple[int, int]] = []
        # Totals since construction.
        self.num_block_copies = 0
        self.num_forks = 0

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """Blocks of the longest cached prefix, and the number of tokens they hold: maybe all.

        Takes no reference: the blocks are the request's only after `start`.
        """
        block_ids = self._prefix_cache.find(request)
        return block_ids, len(block_ids) * self.block_size

    def awaits_prefix(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request computes the block behind the first `num_tokens` tokens.

        Then it is the one that `waits_for_prefix` looks for.
        """
        return self._prefix_cache.awaits(request, num_tokens // self.block_size)

    def waits_for_prefix(self, request: Request) -> bool:
        """Whether a block that the request has been found to need is still being computed."""
        return self._prefix_cache.is_announced(request.awaited_hash)

    def get_shareable_blocks(self, parent: Request, num_tokens: int) -> tuple[list[int], int]:
        """The parent's blocks for its first `num_tokens` tokens, and how many tokens they hold.

        The last one may hold more of the parent's tokens: whoever shares it does not read that
        far. Unless it is full, or will be after this step: then it may be published, but its next
        owner would write to it.
        """
        allocation = self._allocations[parent.request_id]
        num_full, num_in_last = divmod(num_tokens, self.block_size)
        if num_in_last and allocation.num_tokens < (num_full + 1) * self.block_size:
            return list(allocation.block_table[: num_full + 1]), num_tokens
        return list(allocation.block_table[:num_full]), num_full * self.block_size

    def has_room_for(
        self,
        request: Request,
        computed_blocks: Sequence[int],
        num_tokens: int,
        num_siblings: int = 0,
        num_spare_blocks: int = 0,
    ) -> bool:
        """Whether all tokens that a waiting request has now would fit beside what runs.

        `computed_blocks` would hold the first `num_tokens` of them. `num_siblings` more requests of
        this length would share the full blocks of its prompt. `num_spare_blocks` would be left.
        """
        num_blocks = self.num_blocks_for(request.num_tokens)
        num_copies = num_tokens % self.block_size > 0
        num_new_blocks = num_blocks - len(computed_blocks) + num_copies
        num_own_blocks = num_blocks - request.num_prompt_tokens // self.block_size
        return self.can_take(
            num_new_blocks + num_siblings * num_own_blocks + num_spare_blocks, computed_blocks
        )

    def start(self, request: Request, computed_blocks: Sequence[int]) -> None:
        """Gives a request without blocks these, and new ones for the rest of its tokens.

        That is more than its first step may compute. Taken later they could be missing, and what
        was computed by then would be thrown away.
        """
        assert request.request_id not in self._allocations, f"{request.request_id} has blocks"
        num_new_blocks = self.num_blocks_for(request.num_tokens) - len(computed_blocks)
        self.block_pool.touch(computed_blocks)
        self._allocations[request.request_id] = _Allocation(
            (*computed_blocks, *self.block_pool.take(num_new_blocks)),
            request.num_computed_tokens // self.block_size,
            request.num_computed_tokens,
        )
        self._prefix_cache.announce(request, request.num_computed_tokens // self.block_size)

    def num_tokens_in_blocks(self, request: Request) -> int:
        """Tokens whose KV the request's blocks hold after the step that is being put together."""
        return self._allocations[request.request_id].num_tokens

    def fork(self, parent: Request, child: Request, computed_blocks: Sequence[int]) -> None:
        """`start` with blocks of the parent's; the child publishes no more than the parent does."""
        self.start(child, computed_blocks)
        # The parent may not live to publish what it computes in this step.
        self._allocations[child.request_id].num_published = 0
        self._set_publishes(child, self._allocations[parent.request_id].publishes)
        self.num_forks += 1

    def resume(self, request: Request, computed_blocks: Sequence[int], *, publishes: bool) -> None:
        """`start` with blocks that have been brought back, which are published once more."""
        self.start(request, computed_blocks)
        self._allocations[request.request_id].num_published = 0
        self._set_publishes(request, publishes)

    def has_slots_for(self, requests: Sequence[Request]) -> bool:
        """Whether the next token of every one of these can be written.

        A request at the end of its blocks takes a new one, and one whose last block is shared takes
        a copy, save the last of those that share it.
        """
        if len(requests) <= self.block_pool.num_takeable_blocks:
            return True
        owners: dict[int, int] = {}
        num_needed = 0
        for request in requests:
            if request.num_computed_tokens == request.num_tokens:
                continue  # computed for its logits alone
            table = self._allocations[request.request_id].block_table
            index = request.num_computed_tokens // self.block_size
            if index == len(table):
                num_needed += 1
                continue
            block_id = table[index]
            num_owners = owners.get(block_id, self.block_pool.ref_count(block_id))
            num_needed += num_owners > 1
            owners[block_id] = num_owners - 1
        return num_needed <= self.block_pool.num_takeable_blocks

    def allocate_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Makes room to write `num_new_tokens` more tokens; all or nothing.

        tokens [0, num_computed) | [num_computed, num_computed + num_new_tokens)
        blocks full | last one, maybe shared: copied first | as many as are missing, taken now
        """
        allocation = self._allocations[request.request_id]
        table, num_computed = allocation.block_table, request.num_computed_tokens
        num_new_blocks = max(0, self.num_blocks_for(num_computed + num_new_tokens) - len(table))
        index = num_computed // self.block_size
        is_shared = index < len(table) and self.block_pool.ref_count(table[index]) > 1
        if num_new_blocks or is_shared:
            if num_new_blocks + is_shared > self.block_pool.num_takeable_blocks:
                return False
            if is_shared:
                table = self._copy_on_write(table, index)
            allocation.block_table = (*table, *self.block_pool.take(num_new_blocks))
        allocation.num_tokens = num_computed + num_new_tokens
        return True

    def take_block_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of the copies that were put off since the last call, in their order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def block_table(self, request_id: str, num_tokens: int | None = None) -> tuple[int, ...]:
        """The request's blocks, in token order: all, or those for its first `num_tokens`."""
        table = self._allocations[request_id].block_table
        return table if num_tokens is None else table[: self.num_blocks_for(num_tokens)]

    def computed_blocks(self, request: Request) -> tuple[int, ...]:
        """The beginning of the request's block table that holds computed tokens."""
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        return self._allocations[request.request_id].block_table[:num_blocks]

    def count_held(self, requests: Iterable[Request]) -> tuple[int, int]:
        """(blocks, tokens) that these hold computed, what they share counted once."""
        num_tokens_in: dict[int, int] = {}
        for request in requests:
            num_left = request.num_computed_tokens
            for block_id in self.computed_blocks(request):
                num_tokens = min(num_left, self.block_size)
                num_tokens_in[block_id] = max(num_tokens_in.get(block_id, 0), num_tokens)
                num_left -= num_tokens
        return len(num_tokens_in), sum(num_tokens_in.values())

    def publishes(self, request: Request) -> bool:
        """Whether the request's blocks are for the prefix cache: not if it was reset under it."""
        return self._allocations[request.request_id].publishes

    def open_block(self, request: Request) -> tuple[int | None, int]:
        """The block that the request's next token goes to, None if there is none yet.

        And how many more of the request's blocks come after it, which nobody else has.
        """
        table = self._allocations[request.request_id].block_table
        index = request.num_computed_tokens // self.block_size
        return (table[index], len(table) - index - 1) if index < len(table) else (None, 0)

    def publish(self, request: Request) -> None:
        """Lets others find the request's full blocks below num_computed_tokens.

        [0, num_published) [num_published, num_computed_tokens // block_size) | not full
        known already      published now                                      | stays private
        """
        allocation = self._allocations[request.request_id]
        next_end = (allocation.num_published + 1) * self.block_size
        if allocation.publishes and request.num_computed_tokens >= next_end:
            allocation.num_published = self._prefix_cache.publish(
                request, allocation.block_table, allocation.num_published
            )

    def reorder(self, requests: Sequence[Request], parents: Sequence[int]) -> None:
        """Each request's blocks become what those of `requests[parent]` were before the call."""
        before = [self._allocations[request.request_id] for request in requests]
        after = [replace(before[i]) for i in parents]
        changes = [
            (old, new)
            for own, other in zip(before, after, strict=True)
            for old, new in _differences(own.block_table, other.block_table)
        ]
        self.block_pool.touch(new for _, new in changes if new is not None)
        self.block_pool.free(old for old, _ in reversed(changes) if old is not None)
        for request, allocation in zip(requests, after, strict=True):
            self._allocations[request.request_id] = allocation

    def free(self, request: Request) -> None:
        """Gives up the request's blocks, its tail first; a request without any is fine."""
        allocation = self._allocations.pop(request.request_id, None)
        if allocation is not None:
            self._prefix_cache.withdraw(request.request_id)
            self.block_pool.free(reversed(allocation.block_table))

    def reset_prefix_cache(self) -> None:
        """No later prefix hit sees KV from before this call.

        Running requests keep their blocks. What they still compute rests on KV from before, so
        they publish nothing more.
        """
        self._prefix_cache.reset()
        for allocation in self._allocations.values():
            allocation.publishes = False

    def check_integrity(self, running: Iterable[Request] = ()) -> None:
        """Raises AssertionError unless pool and block tables agree; linear in the pool's size.

        What `running` requests will write next has to be theirs alone, or to be copied first.
        """
        self.block_pool.check_integrity(
            [allocation.block_table for allocation in self._allocations.values()]
        )
        for request in running:
            table = self._allocations[request.request_id].block_table
            num_full, num_in_last = divmod(request.num_computed_tokens, self.block_size)
            assert self.num_blocks_for(request.num_computed_tokens) <= len(table), f"{request=}"
            for block_id in table[num_full:]:
                assert self.block_pool.block_hash(block_id) is None, f"{block_id=} is published"
            for block_id in table[num_full + (num_in_last > 0) :]:
                assert self.block_pool.ref_count(block_id) == 1, f"{block_id=} is shared"

    def _set_publishes(self, request: Request, publishes: bool) -> None:
        self._allocations[request.request_id].publishes = publishes
        if not publishes:
            self._prefix_cache.withdraw(request.request_id)

    def _copy_on_write(self, table: tuple[int, ...], index: int) -> tuple[int, ...]:
        """The table with a block in the place of one that others hold too, filled by a copy."""
        (target,) = self.block_pool.take(1)
        self._copies.append((table[index], target))
        self.block_pool.free([table[index]])
        self.num_block_copies += 1
        return (*table[:index], target, *table[index + 1 :])

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_take(self, num_new_blocks: int, computed_blocks: Iterable[int]) -> bool:
        """Whether there are so many blocks beside these, which are going to be held too."""
        # A hit that no one holds counts as takeable until it is touched.
        ref_count = self.block_pool.ref_count
        num_idle_hits = sum(ref_count(block_id) == 0 for block_id in computed_blocks)
        return num_new_blocks + num_idle_hits <= self.block_pool.num_takeable_blocks


def _differences(old: Sequence[int], new: Sequence[int]) -> list[tuple[int | None, int | None]]:
    """Entries of two block tables that are not the same block, by place."""
    return [pair for pair in zip_longest(old, new) if pair[0] != pair[1]]
