"""Blocks in host memory for requests that had to give theirs up, and back again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rawpaged.request import Request
from rawpaged.scheduler.block_pool import BlockPool
from rawpaged.scheduler.kv_cache_manager import KVCacheManager

Pairs = tuple[tuple[int, int], ...]
"""(source, target) blocks of copies; no block is a target twice."""


@dataclass(slots=True)
class _Swapped:
    """Host blocks of one request, which hold its computed tokens."""

    host_table: list[int]
    publishes: bool


@dataclass(frozen=True, slots=True)
class SwapIn:
    """What bringing requests back takes: found once, to be looked at and then done."""

    requests: tuple[Request, ...]
    resident: dict[int, int]
    """Host block -> block of the device that the prefix cache still has with its content."""
    num_new_blocks: int
    """Blocks to take: for copies of the rest, and for what they lack and write next."""


class SwapSpace:
    """A second pool of blocks, without caching. Every distinct block of a group is in it once.

    References are counted in it as on the device, so what was shared still is when it comes back.
    """

    def __init__(self, num_blocks: int, kv_cache_manager: KVCacheManager) -> None:
        self.block_pool = BlockPool(num_blocks, enable_caching=False)
        self._kv_cache_manager = kv_cache_manager
        self._swapped: dict[str, _Swapped] = {}
        # Totals since construction.
        self.num_blocks_out = 0
        self.num_blocks_in = 0

    @property
    def num_requests(self) -> int:
        """Requests whose KV is here."""
        return len(self._swapped)

    def swap_out(self, requests: Sequence[Request]) -> Pairs | None:
        """Gives up the requests' blocks for host blocks; None, and no change, if these are too few.

        Returns the copies, device to host.
        """
        manager, pool = self._kv_cache_manager, self.block_pool
        tables = {request: manager.computed_blocks(request) for request in requests}
        device_blocks = list(dict.fromkeys(b for table in tables.values() for b in table))
        if len(device_blocks) > pool.num_takeable_blocks:
            return None
        host_blocks = dict(zip(device_blocks, pool.take(len(device_blocks)), strict=True))
        for request, table in tables.items():
            host_table = [host_blocks[block_id] for block_id in table]
            pool.touch(host_table)
            publishes = manager.publishes(request)
            self._swapped[request.request_id] = _Swapped(host_table, publishes)
            manager.free(request)
        pool.free(host_blocks.values())
        self.num_blocks_out += len(host_blocks)
        return tuple(host_blocks.items())

    def plan_swap_in(self, requests: Sequence[Request]) -> SwapIn:
        """What is needed for the requests, which were swapped out together, to go on."""
        manager = self._kv_cache_manager
        resident: dict[int, int] = {}
        partly_filled: Counter[int] = Counter()
        num_new_blocks = 0
        for request in requests:
            host_table = self._swapped[request.request_id].host_table
            found, _ = manager.get_computed_blocks(request)
            num_full = request.num_computed_tokens // manager.block_size
            resident.update(zip(host_table[:num_full], found, strict=False))
            partly_filled.update(host_table[num_full:])
            num_new_blocks += manager.num_blocks_for(request.num_tokens) - len(host_table)
        distinct = {b for request in requests for b in self._swapped[request.request_id].host_table}
        # Of those that share a block all but one write to a copy of it.
        num_copies = partly_filled.total() - len(partly_filled)
        num_new_blocks += len(distinct - resident.keys()) + num_copies
        return SwapIn(tuple(requests), resident, num_new_blocks)

    def has_room_for(self, plan: SwapIn, num_spare_blocks: int = 0) -> bool:
        """Whether the requests could come back, with so many blocks left over."""
        num_blocks = plan.num_new_blocks + num_spare_blocks
        return self._kv_cache_manager.can_take(num_blocks, set(plan.resident.values()))

    def swap_in(self, plan: SwapIn) -> Pairs:
        """Gives the requests blocks of the device again; there must be room for them.

        Returns the copies, host to device.
        """
        pool = self._kv_cache_manager.block_pool
        swapped = [self._swapped.pop(request.request_id) for request in plan.requests]
        hosts = list(dict.fromkeys(b for each in swapped for b in each.host_table))
        missing = [block_id for block_id in hosts if block_id not in plan.resident]
        # Held until the requests hold them, so that none is evicted to make room for another.
        pool.touch(plan.resident.values())
        taken = pool.take(len(missing))
        device_blocks = {**plan.resident, **dict(zip(missing, taken, strict=True))}
        for request, each in zip(plan.requests, swapped, strict=True):
            table = [device_blocks[block_id] for block_id in each.host_table]
            self._kv_cache_manager.resume(request, table, publishes=each.publishes)
            self.block_pool.free(reversed(each.host_table))
        pool.free(device_blocks.values())
        self.num_blocks_in += len(missing)
        return tuple((block_id, device_blocks[block_id]) for block_id in missing)

    def host_table(self, request_id: str) -> tuple[int, ...]:
        """Host blocks that hold the computed tokens of a swapped request, in token order."""
        return tuple(self._swapped[request_id].host_table)

    def holds(self, request: Request) -> bool:
        return request.request_id in self._swapped

    def free(self, request: Request) -> None:
        """Gives up what is kept for the request; one without anything is fine."""
        swapped = self._swapped.pop(request.request_id, None)
        if swapped is not None:
            self.block_pool.free(reversed(swapped.host_table))

    def stop_publishing(self) -> None:
        """What is kept was computed before the prefix cache was reset."""
        for swapped in self._swapped.values():
            swapped.publishes = False

    def check_integrity(self) -> None:
        """Raises AssertionError unless the pool and what is kept agree."""
        self.block_pool.check_integrity([each.host_table for each in self._swapped.values()])
