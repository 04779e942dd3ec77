"""The KV pool as a map: each block's owners, tokens and references, in runs of equal blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.scheduler.pool_snapshot import PoolSnapshot, RequestBlocks

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NUM_REGIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOwner:
    """A request that holds blocks."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    num_preemptions: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Blocks [first_block, first_block + num_blocks), of each of which the rest is true."""

    first_block: int
    num_blocks: int
    owners: int
    """Index in `BlockMap.owners`; entry 0 is nobody."""
    ref_count: int
    num_tokens: int
    """Tokens whose KV is in it for the furthest of its owners; 0 if nobody holds it."""
    is_cached: bool
    """Whether a prefix hit would find it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRegions:
    """The whole pool in NUM_REGIONS parts at most, all but the last of `num_blocks` blocks."""

    num_blocks: int
    used: list[int]
    """Blocks of each part that requests hold."""
    cached: list[int]
    """Blocks of each part that none holds and a prefix hit would find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """Blocks [first_block, next_block) of the pool, as all of it was between two steps."""

    step: int
    """Steps run so far: maps with the same number are of the same moment, or of an idle engine."""
    num_blocks: int
    """Blocks of the whole pool."""
    block_size: int
    first_block: int
    next_block: int
    num_waiting: int
    requests: list[BlockOwner]
    """All requests that hold blocks anywhere in the pool, in the order in which they are served."""
    owners: list[list[int]]
    """Sets of indices into `requests`, each once; the first is empty."""
    runs: list[BlockRun]
    regions: PoolRegions


def make_block_map(
    snapshot: PoolSnapshot, *, step: int, first_block: int, num_blocks: int
) -> BlockMap:
    """The map of `num_blocks` blocks from `first_block` on, or of as many as there are.

    Some ten ms for 100,000 blocks, so nothing for an event loop or the engine's thread.
    """
    tables = [np.array(request.block_table, np.int64) for request in snapshot.requests]
    is_cached = np.zeros(snapshot.num_blocks, np.bool_)
    is_cached[np.array(snapshot.published_blocks, np.int64)] = True
    next_block = min(first_block + num_blocks, snapshot.num_blocks)
    window = _Window(first_block, next_block)
    for index, (request, table) in enumerate(zip(snapshot.requests, tables, strict=True)):
        window.add(index, table, request.num_computed_tokens, snapshot.block_size)
    owners, owners_of = window.owner_sets()
    return BlockMap(
        step=step,
        num_blocks=snapshot.num_blocks,
        block_size=snapshot.block_size,
        first_block=first_block,
        next_block=next_block,
        num_waiting=snapshot.num_waiting,
        requests=[_owner(request) for request in snapshot.requests],
        owners=owners,
        runs=_runs(first_block, owners, owners_of, window.num_tokens, is_cached[window.slice]),
        regions=_regions(tables, is_cached),
    )


class _Window:
    """Blocks [first, end) while requests are added, one after the other."""

    def __init__(self, first: int, end: int) -> None:
        self.slice = slice(first, end)
        self.num_tokens: Ints = np.zeros(end - first, np.int64)
        self._owners_of: Ints = np.zeros(end - first, np.int64)
        self._sets: list[list[int]] = [[]]

    def add(self, index: int, table: Ints, num_computed_tokens: int, block_size: int) -> None:
        """Make request `index` an owner of the blocks of its table.

        Blocks that had the same owners before and are in the table have the same after. So owner
        sets are split, not made for each block: there are few, for block tables share beginnings.
        """
        positions = np.flatnonzero((table >= self.slice.start) & (table < self.slice.stop))
        if len(positions) == 0:
            return
        blocks = table[positions] - self.slice.start
        num_tokens = np.clip(num_computed_tokens - positions * block_size, 0, block_size)
        self.num_tokens[blocks] = np.maximum(self.num_tokens[blocks], num_tokens)
        before, which = np.unique(self._owners_of[blocks], return_inverse=True)
        self._owners_of[blocks] = len(self._sets) + which
        self._sets += [[*self._sets[old], index] for old in before]

    def owner_sets(self) -> tuple[list[list[int]], Ints]:
        """The sets that blocks have in the end, after that of nobody, and which each block has."""
        numbers, which = np.unique(np.append(self._owners_of, 0), return_inverse=True)
        return [self._sets[number] for number in numbers], which[:-1]


def _runs(
    first_block: int, owners: list[list[int]], owners_of: Ints, num_tokens: Ints, is_cached: Flags
) -> list[BlockRun]:
    is_new = np.ones(len(owners_of), np.bool_)
    is_new[1:] = (
        (owners_of[1:] != owners_of[:-1])
        | (num_tokens[1:] != num_tokens[:-1])
        | (is_cached[1:] != is_cached[:-1])
    )
    starts = np.flatnonzero(is_new)
    lengths = np.diff(starts, append=len(owners_of))
    columns: tuple[npt.NDArray[Any], ...] = (
        starts + first_block, lengths, owners_of[starts], num_tokens[starts], is_cached[starts]
    )  # fmt: skip
    return [
        BlockRun(
            first_block=start,
            num_blocks=length,
            owners=owner,
            ref_count=len(owners[owner]),
            num_tokens=tokens,
            is_cached=cached,
        )
        for start, length, owner, tokens, cached in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _regions(tables: list[Ints], is_cached: Flags) -> PoolRegions:
    is_used = np.zeros(len(is_cached), np.bool_)
    for table in tables:
        is_used[table] = True
    size = -(-len(is_cached) // NUM_REGIONS)
    starts = np.arange(0, len(is_cached), size)
    used = np.add.reduceat(is_used, starts, dtype=np.int64)
    cached = np.add.reduceat(is_cached & ~is_used, starts, dtype=np.int64)
    return PoolRegions(num_blocks=size, used=used.tolist(), cached=cached.tolist())


def _owner(request: RequestBlocks) -> BlockOwner:
    return BlockOwner(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        num_blocks=len(request.block_table),
    )
