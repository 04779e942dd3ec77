"""Blocks that can be found by what they hold, and those that are about to be computed."""

from __future__ import annotations

from collections.abc import Sequence

from rawpaged.request import Request
from rawpaged.scheduler.block_hash import extend_block_hashes
from rawpaged.scheduler.block_pool import BlockPool


class PrefixCache:
    """Finds and publishes full blocks by hash, and knows who is computing which.

    A request that runs announces the full blocks of its tokens that are not computed yet, until
    it publishes them or stops. Another one that needs them next may wait for them.
    """

    def __init__(self, block_pool: BlockPool, block_size: int, publish_generated: bool) -> None:
        self._block_pool = block_pool
        self._block_size = block_size
        self._publish_generated = publish_generated
        self._owner_of_hash: dict[bytes, str] = {}
        self._announced: dict[str, list[bytes]] = {}

    def find(self, request: Request) -> list[int]:
        """Blocks of the longest published prefix, maybe of all the request's tokens."""
        if not (self._block_pool.enable_caching and request.reads_prefix_cache):
            return []
        extend_block_hashes(request, self._block_size)
        block_ids: list[int] = []
        for block_hash in request.block_hashes:
            block_id = self._block_pool.get_cached_block(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def awaits(self, request: Request, index: int) -> bool:
        """Whether a running request is about to compute what this one's block `index` will hold.

        Notes the hash in `request.awaited_hash`, so that asking again costs little.
        """
        request.awaited_hash = None
        if not (self._block_pool.enable_caching and request.reads_prefix_cache):
            return False
        hashes = request.block_hashes
        if index < len(hashes) and self.is_announced(hashes[index]):
            request.awaited_hash = hashes[index]
        return request.awaited_hash is not None

    def is_announced(self, block_hash: bytes | None) -> bool:
        """Whether a running request is about to compute the block; None is no block's hash."""
        return block_hash in self._owner_of_hash

    def announce(self, request: Request, first: int) -> None:
        """Tells that the request's blocks from index `first` on are going to be computed."""
        if not self._block_pool.enable_caching:
            return
        extend_block_hashes(request, self._block_size)
        announced = self._announced.setdefault(request.request_id, [])
        for block_hash in request.block_hashes[
            first : self._num_blocks(request.num_tokens, request)
        ]:
            if block_hash not in self._owner_of_hash:
                self._owner_of_hash[block_hash] = request.request_id
                announced.append(block_hash)

    def publish(self, request: Request, block_table: Sequence[int], first: int) -> int:
        """Lets others find the request's full blocks from `first` on that are computed.

        Returns the index of the first that is not.
        """
        end = self._num_blocks(request.num_computed_tokens, request)
        if end <= first or not self._block_pool.enable_caching:
            return max(first, end)
        extend_block_hashes(request, self._block_size)
        for index in range(first, end):
            block_id, block_hash = block_table[index], request.block_hashes[index]
            # Of those that share a block, the first publishes it.
            if self._block_pool.block_hash(block_id) is None:
                self._block_pool.cache_block(block_id, block_hash)
            if self._owner_of_hash.get(block_hash) == request.request_id:
                del self._owner_of_hash[block_hash]
        return end

    def withdraw(self, request_id: str) -> None:
        """The request stops, or publishes nothing more."""
        for block_hash in self._announced.pop(request_id, ()):
            if self._owner_of_hash.get(block_hash) == request_id:
                del self._owner_of_hash[block_hash]

    def reset(self) -> None:
        """Forgets everything."""
        self._block_pool.reset_prefix_cache()
        self._owner_of_hash.clear()
        self._announced.clear()

    def _num_blocks(self, num_tokens: int, request: Request) -> int:
        """Full blocks of so many tokens that may be published."""
        if not self._publish_generated:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        return num_tokens // self._block_size
