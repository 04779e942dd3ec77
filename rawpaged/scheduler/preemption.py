"""How running requests give way: their blocks are copied to the host, or computed again."""

from __future__ import annotations

from collections.abc import Sequence

from rawpaged.config import PreemptionCosts, SchedulerConfig
from rawpaged.request import Request, RequestStatus
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from rawpaged.scheduler.queues import GroupQueue
from rawpaged.scheduler.step import Step
from rawpaged.scheduler.swap_space import SwapSpace


class Preemption:
    """Moves requests from the running back to the waiting ones."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        swap_space: SwapSpace,
        waiting: GroupQueue,
        running: GroupQueue,
    ) -> None:
        self._mode = config.preemption_mode
        self._costs = config.preemption_costs
        self._kv_cache_manager = kv_cache_manager
        self._swap_space = swap_space
        self._waiting = waiting
        self._running = running
        # Totals of requests since construction.
        self.num_recomputed = 0
        self.num_swapped = 0

    def preempt_group(self, victims: Sequence[Request], step: Step) -> None:
        """Takes the blocks of all running requests of a group, to the host where that is better."""
        pairs = self._swap_space.swap_out(victims) if self._prefers_swap(victims) else None
        if pairs is None:
            self.preempt(victims, step)
            return
        step.swap_out += pairs
        step.swapped += [request.request_id for request in victims]
        for request in reversed(victims):
            self._stop(request, RequestStatus.SWAPPED, step)
        self.num_swapped += len(victims)

    def preempt(self, victims: Sequence[Request], step: Step) -> None:
        """Takes the requests' blocks; they will compute their tokens anew."""
        for request in reversed(victims):
            self._kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            self._stop(request, RequestStatus.PREEMPTED, step)
        self.num_recomputed += len(victims)

    def _stop(self, request: Request, status: RequestStatus, step: Step) -> None:
        self._running.remove(request)
        request.num_preemptions += 1
        request.status = status
        self._waiting.add(request)
        step.preempted.append(request.request_id)

    def _prefers_swap(self, victims: Sequence[Request]) -> bool:
        if self._mode != "auto":
            return self._mode == "swap"
        assert self._costs is not None, "SchedulerConfig asks for them"
        return is_swap_cheaper(self._costs, *self._kv_cache_manager.count_held(victims))


def is_swap_cheaper(costs: PreemptionCosts, num_blocks: int, num_tokens: int) -> bool:
    """Whether copying the blocks out and in takes less time than computing their tokens."""
    return 2 * num_blocks * costs.block_copy_seconds < num_tokens * costs.token_seconds
