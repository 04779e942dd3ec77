"""Decides what each step computes.

There is no prefill phase and no decode phase. A request has `num_tokens` (prompt and output) and
`num_computed_tokens`; every step lets some requests catch up by some tokens, and one that has
caught up samples the next. Chunked prefill, prefix hits and resuming after preemption are all
this one rule. docs/scheduling.md tells the whole story.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from rawpaged.config import SchedulerConfig
from rawpaged.errors import InvalidRequestError
from rawpaged.request import FinishReason, Request, RequestStatus
from rawpaged.scheduler.kv_cache_manager import KVCacheManager
from rawpaged.scheduler.kv_stats import KVStats, count_open_slots
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput
from rawpaged.scheduler.pool_snapshot import PoolSnapshot, RequestBlocks


class Scheduler:
    """Owns the requests from `add` until they end; not thread-safe.

    The caller repeats schedule(), computes the step, update(). `add` and `finish` may come at any
    time between these calls. A step that failed has no update: what `schedule` then gives to the
    requests that are left is the same work again.

    Running requests, then waiting ones, are always in order of arrival: only the last running one
    is ever preempted, to the front of those that wait, and only the first waiting one is admitted.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv_cache_manager = KVCacheManager(
            config.num_blocks, config.block_size, config.enable_prefix_caching
        )
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        # Totals since construction, for whoever keeps statistics.
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Prompt tokens computed, recomputation after preemption included."""
        self.num_generation_tokens = 0
        self.prefix_cache_queries = 0
        """Tokens of newly admitted requests that were looked up in the prefix cache."""
        self.prefix_cache_hits = 0
        """Of those, tokens found."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_used_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.num_cached_blocks

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queues a new request; raises InvalidRequestError if it could never run to its end."""
        longest = request.num_prompt_tokens + request.max_tokens
        if request.num_prompt_tokens == 0:
            raise InvalidRequestError("prompt holds no tokens", "prompt")
        if request.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens={request.max_tokens} must be at least 1", "max_tokens"
            )
        if longest > self.config.max_model_len:
            raise InvalidRequestError(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens={request.max_tokens} "
                f"are more than max_model_len={self.config.max_model_len}",
                "max_tokens",
            )
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id={request.request_id!r} is in use", "request_id")
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request

    def schedule(self) -> SchedulerOutput:
        """Allocates blocks for the next step and says what it computes.

        Running requests come first, oldest first, each with as many tokens as it lacks and the
        budget leaves. Waiting ones follow, unless a request was preempted: its blocks are what
        the running ones need, so an admission now would only be undone.
        """
        budget = self.config.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preempted: list[str] = []
        while budget > 0 and len(scheduled) < len(self._running):
            request = self._running[len(scheduled)]
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if not self._make_room(request, num_new_tokens, preempted):
                break
            scheduled.append(self._share(request, num_new_tokens))
            budget -= num_new_tokens
        while budget > 0 and not preempted:
            num_new_tokens = self._admit_next(budget)
            if num_new_tokens == 0:
                break
            scheduled.append(self._share(self._running[-1], num_new_tokens))
            budget -= num_new_tokens
        return SchedulerOutput(tuple(scheduled), tuple(preempted))

    def _make_room(self, request: Request, num_new_tokens: int, preempted: list[str]) -> bool:
        """Allocates for a running request, preempting from the last one on; False if itself."""
        while not self.kv_cache_manager.allocate_slots(request, num_new_tokens):
            # Those scheduled in this step already are older than `request`, so never the victim.
            victim = self._running[-1]
            self._preempt(victim)
            preempted.append(victim.request_id)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Takes the last running request's blocks; it will compute its tokens anew."""
        self._running.remove(request)
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        self.num_preemptions += 1

    def _admit_next(self, budget: int) -> int:
        """Starts or resumes the first waiting request; returns its share, 0 if it has to wait.

        Admission asks for room for all its tokens even if the budget allows only a chunk of them:
        a request that is preempted between two chunks would have computed the first for nothing.
        """
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return 0
        request = next(iter(self._waiting.values()))
        computed_blocks, num_cached_tokens = self.kv_cache_manager.get_computed_blocks(request)
        num_new_tokens = min(request.num_tokens - num_cached_tokens, budget)
        if not (
            self.kv_cache_manager.has_room_for(request, computed_blocks)
            and self.kv_cache_manager.allocate_slots(request, num_new_tokens, computed_blocks)
        ):
            return 0
        del self._waiting[request.request_id]
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_cached_tokens
            self._count_prefix_query(request)
        request.num_computed_tokens = num_cached_tokens
        request.status = RequestStatus.RUNNING
        self._running.append(request)
        return num_new_tokens

    def _count_prefix_query(self, request: Request) -> None:
        if self.config.enable_prefix_caching and request.reads_prefix_cache:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += request.num_cached_tokens

    def _share(self, request: Request, num_new_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        end = start + num_new_tokens
        return ScheduledRequest(
            request.request_id,
            tuple(request.token_ids[start:end]),
            start,
            self.kv_cache_manager.block_table(request.request_id),
            samples=end == request.num_tokens,
        )

    def update(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> list[Request]:
        """Books a computed step; returns the requests that it ended, their blocks freed.

        `sampled` holds a token for each request of `output` that samples, save those that were
        finished since `schedule`.
        """
        finished = []
        for scheduled in output.scheduled:
            request = self._requests.get(scheduled.request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            end = scheduled.start + len(scheduled.token_ids)
            request.num_computed_tokens = end
            # Before its blocks can be freed below: only then do they stay cached.
            self.kv_cache_manager.publish(request)
            self.num_prompt_tokens += max(0, min(end, request.num_prompt_tokens) - scheduled.start)
            if scheduled.samples:
                request.token_ids.append(sampled[scheduled.request_id])
                self.num_generation_tokens += 1
                if self._check_stop(request):
                    finished.append(request)
        for request in finished:
            self._release(request)
        return finished

    def _check_stop(self, request: Request) -> bool:
        """Sets the reason and returns True if the request's last token is its last for good."""
        params = request.sampling_params
        token_id = request.token_ids[-1]
        if request.num_output_tokens >= params.min_tokens:
            if token_id in request.eos_token_ids and not params.ignore_eos:
                request.finish_reason = FinishReason.STOP
                return True
            if token_id in (params.stop_token_ids or ()):
                request.finish_reason = FinishReason.STOP
                request.stop_reason = token_id
                return True
        if request.num_output_tokens >= request.max_tokens:
            request.finish_reason = FinishReason.LENGTH
            return True
        return False

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
            del self._waiting[request.request_id]
        self.kv_cache_manager.free(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED

    def reset_prefix_cache(self) -> None:
        """No later prefix hit sees KV from before this call; running requests go on."""
        self.kv_cache_manager.reset_prefix_cache()

    def kv_stats(self) -> KVStats:
        """The KV pool in numbers; to be called between steps. Linear in the running requests."""
        manager = self.kv_cache_manager
        pool = manager.block_pool
        unfilled, reserved = count_open_slots(manager, self._running)
        return KVStats(
            num_blocks=pool.num_blocks,
            block_size=manager.block_size,
            num_used_blocks=pool.num_used_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_block_refs=pool.num_refs,
            num_shared_blocks=pool.num_shared_blocks,
            num_used_slots=pool.num_used_blocks * manager.block_size - unfilled - reserved,
            num_unfilled_slots=unfilled,
            num_reserved_slots=reserved,
            num_evictions=pool.num_evictions,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
        )

    def pool_snapshot(self) -> PoolSnapshot:
        """Who holds which block; to be called between steps. Copies, and walks over nothing."""
        manager = self.kv_cache_manager
        return PoolSnapshot(
            num_blocks=manager.block_pool.num_blocks,
            block_size=manager.block_size,
            num_waiting=len(self._waiting),
            requests=tuple(self._blocks_of(request) for request in self._running),
            published_blocks=manager.block_pool.published_blocks(),
        )

    def _blocks_of(self, request: Request) -> RequestBlocks:
        return RequestBlocks(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=request.num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            block_table=self.kv_cache_manager.block_table(request.request_id),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, block tables and pool agree; for tests."""
        self.kv_cache_manager.check_integrity()
        in_queues = [*self._running, *self._waiting.values()]
        assert sorted(r.request_id for r in in_queues) == sorted(self._requests)
        assert all(r.status is RequestStatus.RUNNING for r in self._running)
        for request in self._running:
            num_slots = len(self.kv_cache_manager.block_table(request.request_id)) * (
                self.config.block_size
            )
            assert request.num_computed_tokens <= num_slots, f"{request.request_id=} {num_slots=}"
