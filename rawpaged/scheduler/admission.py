"""Which waiting requests start, and with which blocks that hold their first tokens already."""

from __future__ import annotations

from dataclasses import dataclass

from rawpaged.config import SchedulerConfig
from rawpaged.request import Request, RequestGroup, RequestStatus
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from rawpaged.scheduler.queues import GroupQueue
from rawpaged.scheduler.step import Step
from rawpaged.scheduler.swap_space import SwapSpace


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a request can begin: the first `num_tokens` tokens have their KV in these blocks."""

    computed_blocks: list[int]
    num_tokens: int
    parent: Request | None = None
    """Whose blocks they are; None: they come from the prefix cache, if there are any."""


class Admission:
    """Moves requests from the waiting to the running ones, in order, while they fit.

    The first that does not fit ends a step's admissions, so that nobody is overtaken for ever.
    Only a request of whose tokens others are computing the beginning is passed over meanwhile: it
    will take their blocks. It waits for requests that run only, so it is not for ever.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        swap_space: SwapSpace,
        waiting: GroupQueue,
        running: GroupQueue,
        config: SchedulerConfig,
    ) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._swap_space = swap_space
        self._waiting = waiting
        self._running = running
        self._config = config
        self._num_seats_taken = 0
        # Totals since construction.
        self.num_started_groups = 0
        self.prefix_cache_queries = 0
        """Tokens of newly admitted requests that were looked up in the prefix cache."""
        self.prefix_cache_hits = 0
        """Of those, tokens found."""

    def admit(self, step: Step) -> None:
        """Starts requests while the step has budget."""
        if len(self._waiting) == 0:
            return
        self._num_seats_taken = sum(
            len(group.requests) if group.lockstep else len(self._running.members(group))
            for group in self._running.groups
        )
        # Looking at whoever waits for others costs time in every step, so not at any number.
        for group in tuple(self._waiting.groups[: 2 * self._config.max_num_seqs]):
            if not self._admit_group(group, step):
                return

    def _admit_group(self, group: RequestGroup, step: Step) -> bool:
        """Starts the group's requests; False if nobody behind them may start now."""
        swapped = [r for r in self._waiting.members(group) if r.status is RequestStatus.SWAPPED]
        if swapped and not self._swap_in(swapped, step):
            return False
        for request in self._waiting.members(group):
            if step.budget == 0 or not self._has_seats_for(group, 1):
                return False
            start = self._find_start(request)
            if start is None:
                return True
            if not self._has_room_for(request, start):
                return False
            self._start(request, start)
            self._give(request, step)
        return True

    def _swap_in(self, swapped: list[Request], step: Step) -> bool:
        """Brings back requests of one group together, in their own blocks; False if not now."""
        if step.budget == 0 or not self._has_seats_for(swapped[0].group, len(swapped)):
            return False
        num_spare_blocks = self._num_spare_blocks(swapped[0].group)
        plan = self._swap_space.plan_swap_in(swapped)
        while not self._swap_space.has_room_for(plan, num_spare_blocks):
            if len(self._running) > 0:
                return False
            # Not even alone do they fit together, with what they write next: the first one does.
            self._let_go(swapped.pop())
            plan = self._swap_space.plan_swap_in(swapped)
        step.swap_in += self._swap_space.swap_in(plan)
        step.swapped += [request.request_id for request in swapped]
        for request in swapped:
            self._run(request)
            if step.budget > 0:
                self._give(request, step)
        return True

    def _let_go(self, request: Request) -> None:
        """Has a swapped request compute its tokens again."""
        self._swap_space.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED

    def _give(self, request: Request, step: Step) -> None:
        num_tokens = request.num_missing_tokens - request.waits_for_siblings
        if num_tokens > 0:
            step.give(request, min(num_tokens, step.budget))

    def _has_seats_for(self, group: RequestGroup, num_requests: int) -> bool:
        """Whether so many of the group may run more than do now; in lockstep, all of it."""
        if group.lockstep:
            num_requests = 0 if self._running.members(group) else len(group.requests)
        return self._num_seats_taken + num_requests <= self._config.max_num_seqs

    def _find_start(self, request: Request) -> _Start | None:
        """The best there is; None while there will be something better soon.

        That is while a sibling is on its way through the prompt, or another request computes the
        first block that is missing.
        """
        siblings = self._running.members(request.group)
        if not siblings or request.wants_prompt_logprobs:
            if self._kv_cache_manager.waits_for_prefix(request):
                return None
            found = _Start(*self._kv_cache_manager.get_computed_blocks(request))
            is_coming = self._kv_cache_manager.awaits_prefix(request, found.num_tokens)
            return None if is_coming else found
        # Those in lockstep begin together, once the first has computed the prompt.
        is_expected = request.group.lockstep and request.num_output_tokens == 0
        common = {sibling: self._num_common_tokens(request, sibling) for sibling in siblings}
        parent = max(siblings, key=lambda sibling: common[sibling])
        if is_expected or common[parent] < request.num_prompt_tokens:
            return None
        found = _Start(*self._kv_cache_manager.get_computed_blocks(request))
        shared = self._kv_cache_manager.get_shareable_blocks(parent, common[parent])
        return _Start(*shared, parent) if shared[1] > found.num_tokens else found

    def _num_common_tokens(self, request: Request, sibling: Request) -> int:
        """Tokens at the beginning that the sibling has too, computed after this step at the latest.

        That is early enough for reading: in every layer a step stores all KV before it reads any.
        But a request that lacks tokens writes behind those, and so to a copy of a block that is not
        full, and copies are made before the step.
        """
        num_in_blocks = self._kv_cache_manager.num_tokens_in_blocks(sibling)
        # Of which the last may be a token that nobody knows yet.
        end = min(request.num_tokens, num_in_blocks, len(sibling.token_ids))
        first = min(end, request.num_prompt_tokens)
        pairs = zip(request.token_ids[first:end], sibling.token_ids[first:end], strict=True)
        common = next((first + i for i, (own, other) in enumerate(pairs) if own != other), end)
        if common == request.num_tokens:
            return common
        block_size = self._kv_cache_manager.block_size
        return max(common // block_size * block_size, min(common, sibling.num_computed_tokens))

    def _has_room_for(self, request: Request, start: _Start) -> bool:
        # Requests in lockstep start one by one but cannot go on without each other.
        is_first = not self._running.members(request.group)
        num_siblings = len(request.group.requests) - 1 if request.group.lockstep else 0
        return self._kv_cache_manager.has_room_for(
            request,
            start.computed_blocks,
            start.num_tokens,
            num_siblings=num_siblings if is_first else 0,
            num_spare_blocks=self._num_spare_blocks(request.group),
        )

    def _num_spare_blocks(self, group: RequestGroup) -> int:
        """Blocks to leave to those that run, so that they need not preempt whoever starts now."""
        is_alone = len(self._running) == 0
        # Of those in lockstep the first has looked for all.
        is_expected = group.lockstep and bool(self._running.members(group))
        return 0 if is_alone or is_expected else self._config.num_watermark_blocks

    def _start(self, request: Request, start: _Start) -> None:
        request.num_computed_tokens = start.num_tokens
        if start.parent is not None:
            self._kv_cache_manager.fork(start.parent, request, start.computed_blocks)
        else:
            self._kv_cache_manager.start(request, start.computed_blocks)
            if request.status is RequestStatus.WAITING:
                self._count_prefix_query(request)
        self._run(request)

    def _run(self, request: Request) -> None:
        if not request.group.lockstep:
            self._num_seats_taken += 1
        elif not self._running.members(request.group):
            self._num_seats_taken += len(request.group.requests)
        self.num_started_groups += not request.group.has_started
        request.group.has_started = True
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self._running.add(request)

    def _count_prefix_query(self, request: Request) -> None:
        request.num_cached_tokens = request.num_computed_tokens
        if self._kv_cache_manager.block_pool.enable_caching and request.reads_prefix_cache:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += request.num_cached_tokens
