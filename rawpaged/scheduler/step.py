"""One step while it is being put together."""

from __future__ import annotations

from rawpaged.request import Request
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from rawpaged.scheduler.output import UNKNOWN_TOKEN, ScheduledRequest, SchedulerOutput


class Step:
    """What requests have been given so far, and what is left of the token budget."""

    def __init__(self, budget: int, kv_cache_manager: KVCacheManager) -> None:
        self.budget = budget
        self.preempted: list[str] = []
        self.swap_out: tuple[tuple[int, int], ...] = ()
        self.swap_in: tuple[tuple[int, int], ...] = ()
        self.swapped: list[str] = []
        self._scheduled: list[ScheduledRequest] = []
        self._kv_cache_manager = kv_cache_manager

    def give(self, request: Request, num_tokens: int) -> None:
        """Schedules the next tokens of a request for which there is room."""
        # A request whose every token has KV computes its last one again, for the logits.
        first_stored, length = request.num_computed_tokens, request.num_tokens
        start = min(first_stored, length - 1)
        end = start + num_tokens
        token_ids = tuple(request.token_ids[start:end])
        if len(token_ids) < num_tokens:
            token_ids += (UNKNOWN_TOKEN,)
        if first_stored < end:
            has_room = self._kv_cache_manager.allocate_slots(request, end - first_stored)
            assert has_room, f"no room for {num_tokens} tokens of {request.request_id}"
        self._scheduled.append(
            ScheduledRequest(
                request.request_id,
                token_ids,
                start,
                self._kv_cache_manager.block_table(request.request_id, end),
                samples=end == length,
                first_stored=first_stored,
            )
        )
        self.budget -= num_tokens

    def output(self) -> SchedulerOutput:
        return SchedulerOutput(
            tuple(self._scheduled),
            tuple(self.preempted),
            swap_out=self.swap_out,
            swap_in=self.swap_in,
            block_copies=self._kv_cache_manager.take_block_copies(),
            swapped=tuple(self.swapped),
            num_reached_blocks=self._kv_cache_manager.block_pool.num_reached_blocks,
        )
