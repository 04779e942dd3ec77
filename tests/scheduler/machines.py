"""State machines that use pool and scheduler at random, beside models that are slow and obvious.

test_machines.py runs them on the code as it is, test_planted_faults.py on broken variants of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rawpaged.config import SchedulerConfig
from rawpaged.errors import InvalidRequestError
from rawpaged.request import FinishReason, Request, RequestStatus
from rawpaged.scheduler.block_pool import BlockPool
from rawpaged.scheduler.output import SchedulerOutput
from tests.scheduler.harness import EOS, Runner, make_request, next_token, shares, solo_run

NUM_HASHES = 4


class BlockPoolMachine(RuleBasedStateMachine):
    """BlockPool against plain lists. Only what a careful caller does is done."""

    @initialize(num_blocks=st.integers(1, 7), enable_caching=st.booleans())
    def create(self, num_blocks: int, enable_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, enable_caching)
        self.tables: list[list[int]] = []
        self.unhashed = list(range(num_blocks))
        """Free blocks, the next to be taken first."""
        self.lru: list[int] = []
        """Cached blocks, the next to be evicted first."""
        self.hashes: dict[int, bytes] = {}
        self.num_evictions = 0

    @rule(num_blocks=st.integers(0, 3))
    def take(self, num_blocks: int) -> None:
        order = self.unhashed + self.lru
        if num_blocks > len(order):
            with pytest.raises(AssertionError, match="num_takeable_blocks"):
                self.pool.take(num_blocks)
            return
        taken = order[:num_blocks]
        self.num_evictions += len(set(taken) & set(self.lru))
        assert self.pool.take(num_blocks) == taken
        for block_id in taken:
            self.hashes.pop(block_id, None)
        self.unhashed = [block_id for block_id in self.unhashed if block_id not in taken]
        self.lru = [block_id for block_id in self.lru if block_id not in taken]
        self.tables.append(taken)

    @rule(first=st.integers(0, NUM_HASHES - 1), length=st.integers(1, NUM_HASHES))
    def hit(self, first: int, length: int) -> None:
        numbers = [(first + i) % NUM_HASHES for i in range(length)]
        found = [self.pool.get_cached_block(bytes([number])) for number in numbers]
        block_ids = [block_id for block_id in found if block_id is not None]
        self.pool.touch(block_ids)
        self.lru = [block_id for block_id in self.lru if block_id not in block_ids]
        self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def free(self, which: int) -> None:
        table = self.tables.pop(which % len(self.tables))
        self.pool.free(reversed(table))
        for block_id in reversed(table):
            if any(block_id in other for other in self.tables):
                continue
            if block_id in self.hashes:
                self.lru.append(block_id)
            else:
                self.unhashed.insert(0, block_id)

    @rule(which=st.integers(0, 99), number=st.integers(0, NUM_HASHES - 1))
    def publish(self, which: int, number: int) -> None:
        used = sorted({block_id for table in self.tables for block_id in table} - set(self.hashes))
        if used:
            block_id, block_hash = used[which % len(used)], bytes([number])
            self.pool.cache_block(block_id, block_hash)
            if self.pool.enable_caching and block_hash not in self.hashes.values():
                self.hashes[block_id] = block_hash

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.unhashed = self.lru + self.unhashed
        self.lru = []
        self.hashes = {}

    @invariant()
    def agrees_with_the_lists(self) -> None:
        pool = self.pool
        pool.check_integrity(self.tables)
        assert pool.take_order() == self.unhashed + self.lru
        assert pool.num_free_blocks == len(self.unhashed)
        assert pool.num_cached_blocks == len(self.lru)
        assert pool.num_used_blocks == len({b for table in self.tables for b in table})
        assert pool.num_evictions == self.num_evictions
        assert pool.num_refs == sum(map(len, self.tables))
        refs = Counter(b for table in self.tables for b in table)
        assert pool.num_shared_blocks == sum(count > 1 for count in refs.values())
        assert set(pool.published_blocks()) == set(self.hashes)
        for block_id in range(pool.num_blocks):
            assert pool.ref_count(block_id) == sum(t.count(block_id) for t in self.tables)
            assert pool.block_hash(block_id) == self.hashes.get(block_id)
        for number in range(NUM_HASHES):
            holders = [b for b, h in self.hashes.items() if h == bytes([number])]
            found = pool.get_cached_block(bytes([number]))
            assert found == (holders[0] if holders else None)


def _continued(token_ids: list[int], length: int) -> list[int]:
    while len(token_ids) < length:
        token_ids.append(next_token(token_ids))
    return token_ids


MAX_PROMPT = 14
TEXTS = [_continued(list(start), MAX_PROMPT) for start in ((0,), (0, 1), (2, 2, 2))]
"""Prompts are beginnings of these, so prefixes are shared, and outputs repeat longer prompts."""

REQUESTS = st.fixed_dictionaries(
    {
        "text": st.sampled_from(TEXTS),
        "length": st.integers(1, MAX_PROMPT),
        "max_tokens": st.integers(1, 16),
        "min_tokens": st.integers(0, 2),
        "ignore_eos": st.sampled_from((True, True, False)),
        "stop_token_ids": st.sampled_from(((), (), (), (0,))),
        "prompt_logprobs": st.sampled_from((None, None, None, 1)),
        "cache_keys": st.sampled_from(((), (), (), ("salt",))),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Scheduler with the fake model; every request must say what it would say alone."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 9),
        max_num_seqs=st.sampled_from((1, 2, 3, 4)),
        budget=st.sampled_from((1, 2, 3, 5, 8, 16, 32)),
        enable_prefix_caching=st.sampled_from((True, True, False)),
        drafts=st.lists(REQUESTS, min_size=2, max_size=5),
    )
    def create(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        enable_prefix_caching: bool,
        drafts: list[dict[str, Any]],
    ) -> None:
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=num_blocks * block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.runner = Runner(self.config)
        self.scheduler = self.runner.scheduler
        self.unfinished: list[Request] = []
        """In order of arrival."""
        for draft in drafts:
            self._add(**draft)

    @rule(drafts=st.lists(REQUESTS, min_size=1, max_size=4))
    def add_some(self, drafts: list[dict[str, Any]]) -> None:
        for draft in drafts:
            self._add(**draft)

    def _add(self, text: list[int], length: int, max_tokens: int, **params: Any) -> None:
        length = min(length, self.config.max_model_len - 1)
        max_tokens = min(max_tokens, self.config.max_model_len - length)
        request = make_request(
            f"r{len(self.runner.requests)}",
            text[:length],
            max_tokens,
            eos_token_ids=frozenset([EOS]),
            **{**params, "min_tokens": min(params["min_tokens"], max_tokens)},
        )
        self.runner.add(request)
        self.unfinished.append(request)

    @rule(length=st.integers(0, MAX_PROMPT))
    def add_what_is_refused(self, length: int) -> None:
        max_tokens = max(1, self.config.max_model_len - length + 1) if length else 1
        with pytest.raises(InvalidRequestError):
            self.scheduler.add(make_request("refused", [0] * length, max_tokens))

    @rule(num_steps=st.integers(1, 6))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @precondition(lambda self: self.unfinished)
    @rule(which=st.integers(0, 99), when=st.sampled_from(("between steps", "during", "lost step")))
    def abort(self, which: int, when: str) -> None:
        request = self.unfinished[which % len(self.unfinished)]
        if when == "during":
            self._step(abort=request)
            return
        if when == "lost step":
            self.scheduler.schedule()
        self._abort(request)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        assert self.scheduler.num_cached_blocks == 0

    def _abort(self, request: Request) -> None:
        assert self.scheduler.finish(request.request_id, FinishReason.ABORT) is request
        assert self.scheduler.finish(request.request_id, FinishReason.ABORT) is None
        self.unfinished.remove(request)
        output = request.output_token_ids
        assert output == solo_run(request)[0][: len(output)]

    def _step(self, abort: Request | None = None) -> None:
        running = [r for r in self.unfinished if r.status is RequestStatus.RUNNING]
        output = self.scheduler.schedule()
        self._check_preempted(output, running)
        self._check_shares(output)
        sampled = self.runner.model.compute(output, self.runner.requests)
        if abort is not None:
            self._abort(abort)
        finished = self.scheduler.update(output, sampled)
        assert [r.request_id for r in finished] == [
            r.request_id for r in self.unfinished if r.is_finished
        ]
        for request in finished:
            self.unfinished.remove(request)
            result = request.output_token_ids, request.finish_reason, request.stop_reason
            assert result == solo_run(request)

    def _check_preempted(self, output: SchedulerOutput, running: Sequence[Request]) -> None:
        """The last running ones, last first, and never the oldest."""
        num_kept = len(running) - len(output.preempted)
        assert list(output.preempted) == [r.request_id for r in running[num_kept:]][::-1]
        assert num_kept > 0 or not running
        if output.preempted:
            assert self.scheduler.num_running == num_kept, "admitted in a step that preempted"

    def _check_shares(self, output: SchedulerOutput) -> None:
        """In order of arrival, each as much as it lacks and the budget allows, nobody skipped."""
        budget = self.config.max_num_batched_tokens
        for share, request in zip(shares(output), self.unfinished, strict=False):
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            assert share == (request.request_id, request.num_computed_tokens, num_tokens)
            assert num_tokens > 0
            budget -= num_tokens
        num_scheduled = len(output.scheduled)
        assert num_scheduled <= self.scheduler.num_running <= self.config.max_num_seqs
        if num_scheduled == len(self.unfinished):
            return
        assert num_scheduled > 0, "no progress"
        if budget > 0 and not output.preempted and num_scheduled < self.config.max_num_seqs:
            num_blocks = -(-self.unfinished[num_scheduled].num_tokens // self.config.block_size)
            num_unused = self.config.num_blocks - self.scheduler.num_used_blocks
            assert num_blocks > num_unused, "held back though it fits"

    @invariant()
    def is_sound(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        running = self.unfinished[: scheduler.num_running]
        assert all(r.status is RequestStatus.RUNNING for r in running)
        for request in self.unfinished[scheduler.num_running :]:
            preempted = request.num_preemptions > 0
            status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
            assert (request.status, request.num_computed_tokens) == (status, 0)
        for request in running:
            table = scheduler.kv_cache_manager.block_table(request.request_id)
            self.runner.model.check(request, table, request.num_computed_tokens)
        self.runner.model.check_published(scheduler.kv_cache_manager.block_pool)
        preemptions = sum(r.num_preemptions for r in self.runner.requests.values())
        assert scheduler.num_preemptions == preemptions
        assert scheduler.prefix_cache_hits == sum(
            r.num_cached_tokens for r in self.runner.requests.values()
        )

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        # The oldest gains a token in every step, so nobody takes longer than this.
        for _ in range(len(self.unfinished) * self.config.max_model_len):
            self._step()
            self.is_sound()
        assert not self.unfinished
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.num_used_blocks == 0
