"""Decides what each step computes.

There is no prefill phase and no decode phase. A request has `num_tokens` (prompt and output) and
`num_computed_tokens`; every step lets some requests catch up by some tokens, and one that has
caught up samples the next. Chunked prefill, prefix hits, forks and resuming after preemption are
all this one rule. docs/scheduling.md tells the whole story.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rawpaged.config import SchedulerConfig
from rawpaged.errors import InvalidRequestError
from rawpaged.request import FinishReason, Request, RequestGroup, RequestStatus
from rawpaged.scheduler.admission import Admission
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from rawpaged.scheduler.kv_stats import KVStats, collect_kv_stats
from rawpaged.scheduler.limits import check_limits
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput
from rawpaged.scheduler.pool_snapshot import PoolSnapshot, take_snapshot
from rawpaged.scheduler.preemption import Preemption
from rawpaged.scheduler.queues import GroupQueue
from rawpaged.scheduler.step import Step
from rawpaged.scheduler.stopping import check_stop
from rawpaged.scheduler.swap_space import SwapSpace


class Scheduler:
    """Owns the requests from `add` until they end; not thread-safe.

    The caller repeats schedule(), computes the step, update(). `add` and `finish` may come at any
    time between these calls. A step that failed has no update: all requests in it have to be
    finished, since copies of their blocks may not have been made. Those not in it go on.

    Or the caller runs one step ahead: schedule(), advance(), and for each step after it schedule(),
    complete() the step before, advance(). `update` is advance() and complete() in one.

    Running and waiting requests are in order of priority and arrival, groups of requests as one:
    only the last running group is ever preempted.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv_cache_manager = KVCacheManager(
            config.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            publish_generated=not config.batch_invariant,
        )
        self._requests: dict[str, Request] = {}
        self._running = GroupQueue()
        self._waiting = GroupQueue()
        self.swap_space = SwapSpace(config.num_host_blocks, self.kv_cache_manager)
        self._admission = Admission(
            self.kv_cache_manager,
            self.swap_space,
            self._waiting,
            self._running,
            config,
        )
        self._preemption = Preemption(
            config, self.kv_cache_manager, self.swap_space, self._waiting, self._running
        )
        self._under_way: list[tuple[ScheduledRequest, Request]] = []
        """Shares of the step that `advance` has counted and `complete` has not seen yet."""
        self._num_groups = 0
        self._num_never_started = 0
        # Totals since construction, for whoever keeps statistics.
        self.num_prompt_tokens = 0
        """Prompt tokens computed, recomputation after preemption included."""
        self.num_generation_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_queued_groups(self) -> int:
        """Groups of which no request has run yet."""
        return self._num_groups - self._num_never_started - self._admission.num_started_groups

    @property
    def num_used_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.num_cached_blocks

    @property
    def num_preemptions(self) -> int:
        """Requests that had to give way, however."""
        return self._preemption.num_recomputed + self._preemption.num_swapped

    @property
    def num_swap_preemptions(self) -> int:
        """Of those, the ones whose KV was copied to the host."""
        return self._preemption.num_swapped

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens of newly admitted requests that were looked up in the prefix cache."""
        return self._admission.prefix_cache_queries

    @property
    def prefix_cache_hits(self) -> int:
        """Of those, tokens found."""
        return self._admission.prefix_cache_hits

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, group: RequestGroup) -> None:
        """Queues new requests, all or none.

        Raises InvalidRequestError if one could never run to its end or its name is in use.
        """
        check_limits(group, self.config)
        for request in group.requests:
            if request.request_id in self._requests:
                raise InvalidRequestError(
                    f"request_id={request.request_id!r} is in use", "request_id"
                )
        self._num_groups += 1
        group.number = self._num_groups
        for request in group.requests:
            self._requests[request.request_id] = request
            self._waiting.add(request)

    def schedule(self) -> SchedulerOutput:
        """Allocates blocks for the next step and says what it computes.

        First come the requests that lack one token, so that none of them waits for a long prompt,
        then chunks of those that lack more, then waiting ones, unless a request was preempted: its
        blocks are what the running ones need, so an admission now would only be undone.
        """
        step = Step(self.config.max_num_batched_tokens, self.kv_cache_manager)
        self._schedule_decodes(step)
        self._schedule_chunks(step)
        if not step.preempted:
            self._admission.admit(step)
        return step.output()

    def _schedule_decodes(self, step: Step) -> None:
        """Only these need new blocks: what a request had when it started it has blocks for."""
        index = 0
        while step.budget > 0 and index < len(self._running.groups):
            group = self._running.groups[index]
            ready = self._make_room(group, self._ready_to_sample(group, step.budget), step)
            for request in ready:
                step.give(request, 1)
            index += 1

    def _ready_to_sample(self, group: RequestGroup, budget: int) -> list[Request]:
        """Those that lack one token, as many as the budget allows; in lockstep, all or none."""
        members = self._running.members(group)
        ready = [
            request
            for request in members
            if request.num_missing_tokens == 1
            and not (request.num_unknown_tokens and request.awaits_last_token)
        ]
        if members[0].waits_for_siblings:
            return ready if len(ready) == len(group.requests) <= budget else []
        return ready[:budget]

    def _schedule_chunks(self, step: Step) -> None:
        for group in self._running.groups:
            for request in self._running.members(group):
                num_tokens = request.num_missing_tokens
                if num_tokens > 1 and step.budget > 0:
                    num_tokens -= request.waits_for_siblings
                    step.give(request, min(num_tokens, step.budget))

    def _make_room(self, group: RequestGroup, ready: list[Request], step: Step) -> list[Request]:
        """Preempts from the last group on until all that are ready can write a token.

        Returns those that still are: the last running group may have to give way itself, request by
        request from its last one, or as a whole if in lockstep.
        """
        while not self.kv_cache_manager.has_slots_for(ready):
            # What is scheduled in this step already is before `group`, so never the victim.
            last = self._running.groups[-1]
            victims = self._running.members(last)
            if last is group and not group.lockstep and len(victims) > 1:
                # It shares most of its blocks with those that stay, from which it forks again.
                victims = victims[-1:]
                self._preemption.preempt(victims, step)
            else:
                self._preemption.preempt_group(victims, step)
            ready = [request for request in ready if request not in victims]
        return ready

    def update(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> list[Request]:
        """Books a computed step; returns the requests that it ended, their blocks freed.

        `sampled` holds a token for each request of `output` that samples, save those that were
        finished since `schedule` and those in lockstep, which get theirs by `reorder`.
        """
        self.advance(output)
        return self.complete(sampled)

    def advance(self, output: SchedulerOutput) -> None:
        """Counts a step that is under way as computed, so that the next one can be scheduled.

        Requests that sample in it have a token more, which `complete` will tell. Those in lockstep
        have not: their step has to be completed before the next is scheduled.
        """
        self._under_way.clear()
        for scheduled in output.scheduled:
            request = self._requests.get(scheduled.request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            end = scheduled.start + len(scheduled.token_ids)
            request.num_computed_tokens = end
            request.num_unknown_tokens = int(scheduled.samples and not request.group.lockstep)
            self.num_prompt_tokens += max(
                0, min(end, request.num_prompt_tokens) - scheduled.first_stored
            )
            self._under_way.append((scheduled, request))

    def complete(self, sampled: Mapping[str, int]) -> list[Request]:
        """Books what the step under way has brought; returns the requests that it ended.

        `sampled` is that of `update`; of requests that were finished meanwhile it is not looked at.
        """
        finished = []
        for scheduled, request in self._under_way:
            if request.is_finished:
                continue
            request.num_unknown_tokens = 0
            # One that was preempted meanwhile has no blocks, but gets its token all the same.
            if request.status is RequestStatus.RUNNING:
                # Before its blocks can be freed below: only then do they stay cached.
                self.kv_cache_manager.publish(request)
            if not scheduled.samples:
                continue
            if request.group.lockstep:
                self._start_siblings(request)
            else:
                request.token_ids.append(sampled[scheduled.request_id])
                self.num_generation_tokens += 1
                if check_stop(request):
                    finished.append(request)
        self._under_way.clear()
        for request in finished:
            self._release(request)
        return finished

    def _start_siblings(self, parent: Request) -> None:
        """Gives those in lockstep with it that wait the prompt that it has computed."""
        for request in self._waiting.members(parent.group):
            self._waiting.remove(request)
            request.num_computed_tokens = parent.num_computed_tokens
            blocks = self.kv_cache_manager.block_table(parent.request_id)
            self.kv_cache_manager.fork(parent, request, blocks)
            request.status = RequestStatus.RUNNING
            self._running.add(request)

    def reorder(
        self, requests: Sequence[Request], parents: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Request i goes on where `requests[parents[i]]` has got to, with one token more.

        For beams, between update and schedule: all unfinished requests of a group in lockstep that
        has sampled in this step. Blocks are shared and not copied.
        """
        self.kv_cache_manager.reorder(requests, parents)
        before = [(list(request.token_ids), list(request.block_hashes)) for request in requests]
        for request, parent, token_id in zip(requests, parents, token_ids, strict=True):
            tokens, hashes = before[parent]
            request.token_ids = [*tokens, token_id]
            request.block_hashes = list(hashes)
        self.num_generation_tokens += len(requests)

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """Ends a request from outside: abort, error, a stop string; None if it is not here."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._release(request)
        return request

    def _release(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self.kv_cache_manager.free(request)
        self.swap_space.free(request)
        del self._requests[request.request_id]
        request.group.requests.remove(request)
        if not request.group.requests and not request.group.has_started:
            self._num_never_started += 1
        request.num_unknown_tokens = 0
        request.status = RequestStatus.FINISHED

    def reset_prefix_cache(self) -> int:
        """No later prefix hit sees KV from before this call; running requests go on.

        Returns the number of blocks that a hit would have found.
        """
        num_blocks = len(self.kv_cache_manager.block_pool.published_blocks())
        self.kv_cache_manager.reset_prefix_cache()
        self.swap_space.stop_publishing()
        return num_blocks

    def kv_stats(self) -> KVStats:
        """The KV pool in numbers; to be called between steps. Linear in the running requests."""
        return collect_kv_stats(
            self.kv_cache_manager,
            self.swap_space,
            self._preemption,
            self._admission,
            self._running.requests(),
        )

    def pool_snapshot(self) -> PoolSnapshot:
        """Who holds which block; to be called between steps. Copies, and walks over nothing."""
        return take_snapshot(self.kv_cache_manager, self._running.requests(), len(self._waiting))

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, block tables and pool agree; for tests."""
        running, waiting = self._running.requests(), self._waiting.requests()
        self.kv_cache_manager.check_integrity(running)
        self.swap_space.check_integrity()
        swapped = [r for r in waiting if r.status is RequestStatus.SWAPPED]
        assert swapped == [r for r in running + waiting if self.swap_space.holds(r)]
        names = [request.request_id for request in running + waiting]
        assert sorted(names) == sorted(self._requests)
        assert all(r.status is RequestStatus.RUNNING for r in running)
        assert not any(r.status is RequestStatus.RUNNING for r in waiting)
        assert (len(self._running), len(self._waiting)) == (len(running), len(waiting))
        for queue in (self._running, self._waiting):
            orders = [group.order for group in queue.groups]
            assert orders == sorted(set(orders)), f"{orders=}"
