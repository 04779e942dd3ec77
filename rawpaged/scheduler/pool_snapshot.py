"""Who held which block at one moment: copies, to be looked at by other threads."""

from __future__ import annotations

from dataclasses import dataclass


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
