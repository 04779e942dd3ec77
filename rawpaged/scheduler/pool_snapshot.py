"""Who held which block at one moment: copies, to be looked at by other threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rawpaged.request import Request
from rawpaged.scheduler.kv_cache_manager import KVCacheManager


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBlocks:
    """One request and its blocks. No text and no token ids."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output so far."""
    num_computed_tokens: int
    """Tokens [0, num_computed_tokens) have their KV in the blocks."""
    num_cached_tokens: int
    num_preemptions: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """All that a map of the pool is made of, as it was between two steps."""

    num_blocks: int
    block_size: int
    num_waiting: int
    """Requests that hold no blocks."""
    requests: tuple[RequestBlocks, ...]
    """All that hold blocks, in the order in which they are served."""
    published_blocks: list[int]
    """Blocks, used or cached, that a prefix hit would find; in no order."""


def take_snapshot(
    manager: KVCacheManager, running: Sequence[Request], num_waiting: int
) -> PoolSnapshot:
    """Copies of the block tables of all that hold blocks."""
    return PoolSnapshot(
        num_blocks=manager.block_pool.num_blocks,
        block_size=manager.block_size,
        num_waiting=num_waiting,
        requests=tuple(_blocks_of(manager, request) for request in running),
        published_blocks=manager.block_pool.published_blocks(),
    )


def _blocks_of(manager: KVCacheManager, request: Request) -> RequestBlocks:
    return RequestBlocks(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        block_table=manager.block_table(request.request_id),
    )
