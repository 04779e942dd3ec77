"""How the systems of the PagedAttention paper, and vAttention, give KV memory to requests.

All are asked the same: room for a request that holds `num_tokens` tokens now. What they grant
beyond that is their policy. Memory is counted in slots, one for the KV of one token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from bench.capacity.buddy import BuddyAllocator
from bench.capacity.lengths import RequestSize
from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.kv_cache_manager import KVCacheManager

WATERMARK = 0.01
"""Share of a pool that grows on demand that no admission may touch, as in vLLM."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request has."""

    slots: float
    """It may fill these, without asking again."""
    taken: float
    """These are gone from the pool for it; more where the allocator rounds up."""


class Allocator(Protocol):
    """One system's KV memory."""

    @property
    def capacity(self) -> float:
        """Slots of the whole memory, those among them that can never be granted."""

    @property
    def is_static(self) -> bool:
        """Whether a batch runs to its end before the next one starts."""

    def fits(self, size: RequestSize) -> bool:
        """Whether an empty memory would hold such a request to its end."""

    def admit(self, key: int, size: RequestSize, num_tokens: int) -> Grant | None:
        """Starts a request; None if there is no room for it now."""

    def grow(self, key: int, num_tokens: int) -> Grant | None:
        """Room for a running request's next tokens; None, and all as it was, if there is none."""

    def free(self, key: int) -> None:
        """Takes back all that a request has."""


class ContiguousSlabs:
    """FasterTransformer: a slab of the longest length for each request, batches run to their end.

    The memory is cut into as many slabs as it holds, and what is left over is lost.
    """

    is_static = True

    def __init__(self, capacity: int, max_model_len: int) -> None:
        self.capacity = float(capacity)
        self.max_model_len = max_model_len
        self.num_slabs = capacity // max_model_len
        self._held: set[int] = set()

    def fits(self, size: RequestSize) -> bool:
        return self.num_slabs > 0 and size.num_kv_tokens <= self.max_model_len

    def admit(self, key: int, size: RequestSize, num_tokens: int) -> Grant | None:
        if len(self._held) == self.num_slabs:
            return None
        self._held.add(key)
        return Grant(self.max_model_len, self.max_model_len)

    def grow(self, key: int, num_tokens: int) -> Grant | None:
        raise AssertionError(f"{key=} outgrows a slab of the longest length: {num_tokens=}")

    def free(self, key: int) -> None:
        self._held.remove(key)


class OrcaReservation:
    """Orca as the paper has it: one contiguous reservation a request, of a buddy allocator.

    `max` reserves the longest length; `pow2` the prompt, and the output rounded up to a power of
    two; `oracle` what the request will really need. Batches change after every step (Yu et al.,
    Orca, OSDI 22).
    """

    is_static = False

    def __init__(self, capacity: int, max_model_len: int, policy: str) -> None:
        if policy not in ("max", "pow2", "oracle"):
            raise ValueError(f"{policy=} is not one of max, pow2, oracle")
        self.capacity = float(capacity)
        self.max_model_len = max_model_len
        self.policy = policy
        self._buddy = BuddyAllocator(capacity)
        self._offsets: dict[int, int] = {}

    def reservation(self, size: RequestSize) -> int:
        """Slots that a request reserves."""
        if self.policy == "max":
            return self.max_model_len
        if self.policy == "oracle":
            return size.num_kv_tokens
        output_len = BuddyAllocator.rounded(size.output_len)
        return min(size.prompt_len + output_len - 1, self.max_model_len)

    def fits(self, size: RequestSize) -> bool:
        largest = 1 << (int(self.capacity).bit_length() - 1)
        return size.num_kv_tokens <= self.reservation(size) <= largest

    def admit(self, key: int, size: RequestSize, num_tokens: int) -> Grant | None:
        slots = self.reservation(size)
        offset = self._buddy.take(slots)
        if offset is None:
            return None
        self._offsets[key] = offset
        return Grant(slots, BuddyAllocator.rounded(slots))

    def grow(self, key: int, num_tokens: int) -> Grant | None:
        raise AssertionError(f"{key=} outgrows its reservation: {num_tokens=}")

    def free(self, key: int) -> None:
        self._buddy.give_back(self._offsets.pop(key))


class PagedBlocks:
    """rawpaged's own KVCacheManager: blocks from anywhere in the pool, one at a time."""

    is_static = False

    def __init__(self, capacity: int, block_size: int) -> None:
        self.capacity = float(capacity)
        self.block_size = block_size
        self.num_blocks = capacity // block_size
        self.manager = KVCacheManager(self.num_blocks, block_size, enable_caching=False)
        self.kept_free = math.ceil(WATERMARK * self.num_blocks)
        self._params = SamplingParams()
        self._requests: dict[int, Request] = {}

    def fits(self, size: RequestSize) -> bool:
        num_blocks = -(-size.num_kv_tokens // self.block_size)
        return num_blocks <= self.num_blocks - self.kept_free

    def admit(self, key: int, size: RequestSize, num_tokens: int) -> Grant | None:
        num_blocks = -(-num_tokens // self.block_size)
        if num_blocks + self.kept_free > self.manager.block_pool.num_takeable_blocks:
            return None
        # What its tokens are makes no difference where nothing is shared.
        request = Request(str(key), (), self._params, max_tokens=size.output_len)
        self.manager.start(request, ())
        self._requests[key] = request
        return self.grow(key, num_tokens)

    def grow(self, key: int, num_tokens: int) -> Grant | None:
        request = self._requests[key]
        if not self.manager.allocate_slots(request, num_tokens - request.num_computed_tokens):
            return None
        request.num_computed_tokens = num_tokens
        slots = -(-num_tokens // self.block_size) * self.block_size
        return Grant(slots, slots)

    def free(self, key: int) -> None:
        self.manager.free(self._requests.pop(key))


class DemandMappedMemory:
    """vAttention (arXiv 2405.04437): contiguous virtual memory, physical pages mapped as it fills.

    Each layer's keys, and its values, are a buffer of their own for each request; a request grows
    by one page in every buffer at once. Pages that are mapped early, or kept for the next request,
    are taken back when they are needed, so they make no difference here.
    """

    is_static = False

    def __init__(
        self, kv_bytes: int, page_bytes: int, num_layers: int, layer_kv_bytes: int
    ) -> None:
        self.capacity = kv_bytes / (2 * num_layers * layer_kv_bytes)
        self.page_bytes = page_bytes
        self.layer_kv_bytes = layer_kv_bytes
        self.num_rows = kv_bytes // (page_bytes * 2 * num_layers)
        """A row is a page in every buffer."""
        self.kept_free = math.ceil(WATERMARK * self.num_rows)
        self._num_free = self.num_rows
        self._held: dict[int, int] = {}

    def fits(self, size: RequestSize) -> bool:
        return self._rows(size.num_kv_tokens) <= self.num_rows - self.kept_free

    def admit(self, key: int, size: RequestSize, num_tokens: int) -> Grant | None:
        if self._rows(num_tokens) + self.kept_free > self._num_free:
            return None
        self._held[key] = 0
        return self.grow(key, num_tokens)

    def grow(self, key: int, num_tokens: int) -> Grant | None:
        num_new = self._rows(num_tokens) - self._held[key]
        if num_new > self._num_free:
            return None
        self._num_free -= num_new
        self._held[key] += num_new
        slots = self._held[key] * self.page_bytes / self.layer_kv_bytes
        return Grant(slots, slots)

    def free(self, key: int) -> None:
        self._num_free += self._held.pop(key)

    def _rows(self, num_tokens: int) -> int:
        return -(-num_tokens * self.layer_kv_bytes // self.page_bytes)
