"""Which waiting requests start, and with which blocks that hold their first tokens already."""

from __future__ import annotations

from dataclasses import dataclass

from rawpaged.request import Request, RequestGroup, RequestStatus
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from rawpaged.scheduler.queues import GroupQueue
from rawpaged.scheduler.step import Step


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
    Only a request whose sibling is computing their common prompt is passed over meanwhile: it will
    take that sibling's blocks.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        waiting: GroupQueue,
        running: GroupQueue,
        max_num_seqs: int,
    ) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._waiting = waiting
        self._running = running
        self._max_num_seqs = max_num_seqs
        # Totals since construction.
        self.prefix_cache_queries = 0
        """Tokens of newly admitted requests that were looked up in the prefix cache."""
        self.prefix_cache_hits = 0
        """Of those, tokens found."""

    def admit(self, step: Step) -> None:
        """Starts requests while the step has budget."""
        for group in tuple(self._waiting.groups):
            if not self._admit_group(group, step):
                return

    def _admit_group(self, group: RequestGroup, step: Step) -> bool:
        """Starts the group's requests; False if nobody behind them may start now."""
        for request in self._waiting.members(group):
            if step.budget == 0 or self._num_seats_after(group) > self._max_num_seqs:
                return False
            start = self._find_start(request)
            if start is None:
                return True
            if not self._has_room_for(request, start):
                return False
            self._start(request, start)
            num_tokens = request.num_missing_tokens - request.waits_for_siblings
            if num_tokens > 0:
                step.give(request, min(num_tokens, step.budget))
        return True

    def _num_seats_after(self, group: RequestGroup) -> int:
        """Seats taken once one more request of the group runs, or all of it if in lockstep."""
        num_taken = sum(
            len(other.requests) if other.lockstep else len(self._running.members(other))
            for other in self._running.groups
        )
        if not group.lockstep:
            return num_taken + 1
        return num_taken + (0 if self._running.members(group) else len(group.requests))

    def _find_start(self, request: Request) -> _Start | None:
        """The best there is; None while a sibling is on its way through the prompt."""
        found = _Start(*self._kv_cache_manager.get_computed_blocks(request))
        siblings = self._running.members(request.group)
        if not siblings or request.wants_prompt_logprobs:
            return found
        num_prompt_tokens = request.num_prompt_tokens
        if all(sibling.num_computed_tokens < num_prompt_tokens for sibling in siblings):
            return None
        parent = max(siblings, key=lambda sibling: _num_common_tokens(request, sibling))
        shared = self._kv_cache_manager.get_shareable_blocks(
            parent, _num_common_tokens(request, parent)
        )
        return _Start(*shared, parent) if shared[1] > found.num_tokens else found

    def _has_room_for(self, request: Request, start: _Start) -> bool:
        # Requests in lockstep start one by one but cannot go on without each other.
        is_first = not self._running.members(request.group)
        num_siblings = len(request.group.requests) - 1 if request.group.lockstep else 0
        return self._kv_cache_manager.has_room_for(
            request,
            start.computed_blocks,
            start.num_tokens,
            num_siblings=num_siblings if is_first else 0,
        )

    def _start(self, request: Request, start: _Start) -> None:
        self._waiting.remove(request)
        request.num_computed_tokens = start.num_tokens
        if start.parent is not None:
            self._kv_cache_manager.fork(start.parent, request, start.computed_blocks)
        else:
            self._kv_cache_manager.start(request, start.computed_blocks)
            if request.status is RequestStatus.WAITING:
                self._count_prefix_query(request)
        request.status = RequestStatus.RUNNING
        self._running.add(request)

    def _count_prefix_query(self, request: Request) -> None:
        request.num_cached_tokens = request.num_computed_tokens
        if self._kv_cache_manager.block_pool.enable_caching and request.reads_prefix_cache:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += request.num_cached_tokens


def _num_common_tokens(request: Request, sibling: Request) -> int:
    """Tokens at the beginning that the sibling has computed and that are the request's too."""
    end = min(request.num_tokens, sibling.num_computed_tokens)
    first = min(end, request.num_prompt_tokens)
    pairs = zip(request.token_ids[first:end], sibling.token_ids[first:end], strict=True)
    return next((first + i for i, (own, other) in enumerate(pairs) if own != other), end)
