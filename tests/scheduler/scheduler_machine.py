"""A state machine that uses the scheduler at random; every request must say what it would alone.

test_machines.py runs it on the code as it is, test_planted_faults.py on broken variants of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rawpaged.config import PreemptionCosts, SchedulerConfig
from rawpaged.errors import InvalidRequestError
from rawpaged.request import FinishReason, Request, RequestStatus
from rawpaged.scheduler.output import SchedulerOutput
from tests.scheduler.harness import (
    EOS,
    Runner,
    make_group,
    make_request,
    next_token,
    shares,
    solo_beams,
    solo_run,
)


def _continued(token_ids: list[int], length: int) -> list[int]:
    while len(token_ids) < length:
        token_ids.append(next_token(token_ids))
    return token_ids


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


MAX_PROMPT = 14
TEXTS = [_continued(list(start), MAX_PROMPT) for start in ((0,), (0, 1), (2, 2, 2))]
"""Prompts are beginnings of these, so prefixes are shared, and outputs repeat longer prompts."""

GROUPS = st.fixed_dictionaries(
    {
        "text": st.sampled_from(TEXTS),
        "length": st.integers(1, MAX_PROMPT),
        "n": st.sampled_from((1, 1, 2, 3, 5)),
        "lockstep": st.sampled_from((False, False, True)),
        "max_tokens": st.integers(1, 16),
        "min_tokens": st.integers(0, 2),
        "ignore_eos": st.sampled_from((True, True, False)),
        "stop_token_ids": st.sampled_from(((), (), (), (0,))),
        "prompt_logprobs": st.sampled_from((None, None, None, 1)),
        "cache_keys": st.sampled_from(((), (), (), ("salt",))),
        "priority": st.sampled_from((0, 0, -1, 1)),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Scheduler with the fake model, which knows what every slot of every block must hold."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 9),
        max_num_seqs=st.sampled_from((1, 2, 3, 4, 8)),
        budget=st.sampled_from((1, 2, 3, 5, 8, 16, 32)),
        enable_prefix_caching=st.sampled_from((True, True, False)),
        preemption=st.sampled_from(("recompute", "swap", "auto")),
        num_host_blocks=st.integers(1, 12),
        has_priorities=st.booleans(),
        num_watermark_blocks=st.sampled_from((0, 0, 1, 3)),
        overlaps=st.booleans(),
        drafts=st.lists(GROUPS, min_size=2, max_size=4),
    )
    def create(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        enable_prefix_caching: bool,
        preemption: str,
        num_host_blocks: int,
        has_priorities: bool,
        num_watermark_blocks: int,
        overlaps: bool,
        drafts: list[dict[str, Any]],
    ) -> None:
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=num_blocks * block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy="priority" if has_priorities else "fcfs",
            num_watermark_blocks=num_watermark_blocks,
            num_host_blocks=0 if preemption == "recompute" else num_host_blocks,
            preemption_mode=preemption,
            # A block out and in again for two tokens to compute.
            preemption_costs=PreemptionCosts(1.0, 1.0) if preemption == "auto" else None,
        )
        self.runner = Runner(self.config)
        self.scheduler = self.runner.scheduler
        self.unfinished: list[Request] = []
        """In the order in which they are served."""
        self.num_groups = 0
        self.overlaps = overlaps
        """Whether a step is scheduled before it is known what the one before has sampled."""
        self.under_way: tuple[SchedulerOutput, Mapping[str, int]] | None = None
        """The last step and its samples, if the scheduler has yet to hear of these."""
        for draft in drafts:
            self._add(**draft)

    @rule(drafts=st.lists(GROUPS, min_size=1, max_size=3))
    def add_some(self, drafts: list[dict[str, Any]]) -> None:
        for draft in drafts:
            self._add(**draft)

    def _add(
        self, text: list[int], length: int, max_tokens: int, lockstep: bool, **options: Any
    ) -> None:
        length = min(length, self.config.max_model_len - 1)
        max_tokens = min(max_tokens, self.config.max_model_len - length)
        options["min_tokens"] = min(options["min_tokens"], max_tokens)
        if self.config.scheduling_policy == "fcfs":
            options["priority"] = 0
        if lockstep:
            options["n"] = min(options["n"], self._most_beams(length, max_tokens))
        group = make_group(
            f"r{self.num_groups}.",
            prompt=text[:length],
            max_tokens=max_tokens,
            eos_token_ids=frozenset([EOS]),
            lockstep=lockstep,
            **options,
        )
        self.num_groups += 1
        self.unfinished += self.runner.add_group(group)
        self.unfinished.sort(key=lambda r: (*r.group.order, r.sample_index))

    def _most_beams(self, length: int, max_tokens: int) -> int:
        """Beams that fit when they share no more than the full blocks of the prompt."""
        config = self.config
        num_shared = length // config.block_size
        num_own = -(-(length + max_tokens) // config.block_size) - num_shared
        num_that_fit = (config.num_blocks - num_shared) // num_own
        return min(num_that_fit, config.max_num_seqs, config.max_num_batched_tokens)

    @rule(length=st.integers(0, MAX_PROMPT), max_tokens=st.integers(1, 16))
    def add_what_is_refused(self, length: int, max_tokens: int) -> None:
        too_many = max(1, self.config.max_model_len - length + 1) if length else 1
        with pytest.raises(InvalidRequestError):
            self.scheduler.add(make_request("refused", [0] * length, too_many).group)
        length = min(max(1, length), self.config.max_model_len - 1)
        max_tokens = min(max_tokens, self.config.max_model_len - length)
        n = self._most_beams(length, max_tokens) + 1
        with pytest.raises(InvalidRequestError, match=f"n={n} beams"):
            self.scheduler.add(make_group("refused", n, [0] * length, max_tokens, lockstep=True))

    @rule(num_steps=st.integers(1, 6))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @precondition(lambda self: self.unfinished)
    @rule(which=st.integers(0, 99), during=st.booleans(), swapped=st.booleans())
    def abort(self, which: int, during: bool, swapped: bool) -> None:
        """A request of a group, or all in lockstep with it."""
        candidates = [
            r for r in self.unfinished if swapped and r.status is RequestStatus.SWAPPED
        ] or self.unfinished
        request = candidates[which % len(candidates)]
        aborted = list(request.group.requests) if request.group.lockstep else [request]
        if during:
            self._step(abort=aborted)
        else:
            self._abort(aborted)

    @rule(is_computed=st.booleans(), most_steps=st.integers(1, 8), with_last=st.booleans())
    def fail_a_step(self, is_computed: bool, most_steps: int, with_last: bool) -> None:
        """One that copies blocks if there is any soon: before its copies, or after all of it.

        With it goes the step under way, or that brings its tokens first.
        """
        for num_left in reversed(range(most_steps)):
            output = self.scheduler.schedule()
            if num_left == 0 or output.block_copies or output.swapped:
                break
            self._finish_step(output)
        failed = set(output.request_ids)
        if with_last and self.under_way is not None:
            failed.update(self.under_way[0].request_ids)
            self.under_way = None
        else:
            self._complete_last()
            if is_computed:
                self.runner.compute(output)
        in_lockstep = {r.group for r in self.unfinished if r.request_id in failed}
        self._abort(
            [
                r
                for r in self.unfinished
                if r.request_id in failed or (r.group.lockstep and r.group in in_lockstep)
            ]
        )

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        assert self.scheduler.num_cached_blocks == 0

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in list(requests):
            assert self.scheduler.finish(request.request_id, FinishReason.ABORT) is request
            assert self.scheduler.finish(request.request_id, FinishReason.ABORT) is None
            self.unfinished.remove(request)
            self._check_output(request)

    def _check_output(self, request: Request) -> None:
        """It is what the request says alone, or a beginning of that."""
        if not request.group.lockstep:
            output = request.output_token_ids
            assert output == solo_run(request)[0][: len(output)]

    def _step(self, abort: Sequence[Request] = ()) -> None:
        running = [r for r in self.unfinished if r.status is RequestStatus.RUNNING]
        output = self.scheduler.schedule()
        self._check_preempted(output, running)
        self._check_shares(output, running)
        self._finish_step(output, abort)

    def _finish_step(self, output: SchedulerOutput, abort: Sequence[Request] = ()) -> None:
        """Compute what has been scheduled; where steps overlap it stays under way.

        Some may be aborted while it runs.
        """
        self._complete_last()
        sampled = self.runner.compute(output)
        self._abort([request for request in abort if request in self.unfinished])
        if not output.scheduled:
            return
        self.scheduler.advance(output)
        self.under_way = output, sampled
        requests = [self.runner.requests[scheduled.request_id] for scheduled in output.scheduled]
        if not self.overlaps or any(request.group.lockstep for request in requests):
            self._complete_last()

    def _complete_last(self) -> None:
        """Tell the scheduler what the step under way has sampled, if there is one."""
        if self.under_way is None:
            return
        (output, sampled), self.under_way = self.under_way, None
        widths = {r.group: len(r.group.requests) for r in self.unfinished}
        finished = self.runner.complete(output, sampled)
        assert set(finished) == {r for r in self.unfinished if r.is_finished}
        for request in finished:
            self.unfinished.remove(request)
            if request.group.lockstep:
                prompt, num_steps = request.prompt_token_ids, request.max_tokens
                beams = solo_beams(prompt, widths[request.group], num_steps)
                assert request.token_ids == beams[request.sample_index]
            else:
                result = request.output_token_ids, request.finish_reason, request.stop_reason
                assert result == solo_run(request)

    def _check_preempted(self, output: SchedulerOutput, running: Sequence[Request]) -> None:
        """The last running ones, last first, and never the first."""
        num_kept = len(running) - len(output.preempted)
        assert list(output.preempted) == [r.request_id for r in running[num_kept:]][::-1]
        assert num_kept > 0 or not running
        kept = {request.group for request in running[:num_kept]}
        for request in running[num_kept:]:
            assert not (request.group in kept and request.group.lockstep), "beams were parted"
        if output.preempted:
            assert self.scheduler.num_running == num_kept, "admitted in a step that preempted"

    def _check_shares(self, output: SchedulerOutput, running: Sequence[Request]) -> None:
        """Single tokens, then chunks, each in order, as much as is lacking and budget allows."""
        budget = self.config.max_num_batched_tokens
        kept = running[: len(running) - len(output.preempted)]
        ready = self._ready(kept, budget)
        expected = [(r.request_id, min(r.num_computed_tokens, r.num_tokens - 1), 1) for r in ready]
        budget -= len(ready)
        for request in kept:
            lacking = request.num_tokens - request.num_computed_tokens
            if lacking > 1 and budget > 0:
                # Those in lockstep leave their last token for a step that computes all of theirs.
                lacking -= request.group.lockstep and request.num_output_tokens > 0
                num_tokens = min(lacking, budget)
                expected.append((request.request_id, request.num_computed_tokens, num_tokens))
                budget -= num_tokens
        given = shares(output)
        assert given[: len(expected)] == expected, f"{given} do not begin with {expected}"
        admitted = [self.runner.requests[name] for name, _, _ in given[len(expected) :]]
        self._check_admitted(admitted, running)
        assert self.scheduler.num_running <= self.config.max_num_seqs
        assert output.num_tokens <= self.config.max_num_batched_tokens
        if not self.unfinished:
            return
        # Those in lockstep may start with nothing to compute before their last token, and wait for
        # each other while a later request gives way.
        has_changed = self.scheduler.num_running != len(running)
        assert given or has_changed or self.under_way, "no progress"
        if output.num_tokens < self.config.max_num_batched_tokens and not output.preempted:
            self._check_nobody_is_held_back()

    def _check_admitted(self, admitted: Sequence[Request], running: Sequence[Request]) -> None:
        """In order; only those whose siblings are computing the prompt are passed over."""
        assert not set(admitted) & set(running)
        assert list(admitted) == [r for r in self.unfinished if r in admitted]
        if not admitted:
            return
        for request in self.unfinished[: self.unfinished.index(admitted[-1])]:
            if request.status is not RequestStatus.RUNNING:
                siblings = [r for r in request.group.requests if r.status is RequestStatus.RUNNING]
                computed = [r.num_computed_tokens for r in siblings]
                begins_with_all = request.group.lockstep and request.num_output_tokens == 0
                is_forked_later = siblings and (
                    begins_with_all or max(computed) < request.num_prompt_tokens
                )
                assert is_forked_later or self._is_computed_by_others(request), "overtaken"

    def _is_computed_by_others(self, request: Request) -> bool:
        """Whether a request that runs has yet to compute a full block that this one has too."""
        size = self.config.block_size
        return self.config.enable_prefix_caching and any(
            _num_common(request.token_ids, other.token_ids) // size
            > self._num_published_tokens(other) // size
            for other in self.unfinished
            if other.status is RequestStatus.RUNNING and other.cache_keys == request.cache_keys
        )

    def _num_published_tokens(self, request: Request) -> int:
        """Computed ones, but those of the step under way."""
        scheduled = self.under_way[0].scheduled if self.under_way is not None else ()
        firsts = [each.first_stored for each in scheduled if each.request_id == request.request_id]
        return firsts[0] if firsts else request.num_computed_tokens

    def _ready(self, kept: Sequence[Request], budget: int) -> list[Request]:
        """Those that get their one token before any chunk."""
        ready: list[Request] = []
        for group in dict.fromkeys(request.group for request in kept):
            members = [r for r in kept if r.group is group]
            lacking_one = [
                r
                for r in members
                if r.num_tokens - r.num_computed_tokens <= 1 and not self._awaits_its_last(r)
            ]
            if group.lockstep and members[0].num_output_tokens > 0:
                fit = len(lacking_one) == len(group.requests) <= budget - len(ready)
                ready += lacking_one if fit else []
            else:
                ready += lacking_one[: budget - len(ready)]
        return ready

    def _awaits_its_last(self, request: Request) -> bool:
        """Whether the step under way samples the last token that it may have."""
        is_sampling = self.under_way is not None and request.request_id in self.under_way[1]
        return is_sampling and len(request.output_token_ids) + 1 == request.max_tokens

    def _check_nobody_is_held_back(self) -> None:
        """The first that waits, and not for a sibling, has no seat or does not fit."""
        config, scheduler = self.config, self.scheduler
        waiting = [r for r in self.unfinished if r.status is not RequestStatus.RUNNING]
        for request in waiting:
            siblings = [r for r in request.group.requests if r.status is RequestStatus.RUNNING]
            is_swapped = request.status is RequestStatus.SWAPPED
            if request.group.lockstep or siblings or is_swapped:
                return
            if self._is_computed_by_others(request):
                return
            if scheduler.num_running < config.max_num_seqs:
                num_blocks = -(-request.num_tokens // config.block_size)
                num_unused = config.num_blocks - scheduler.num_used_blocks
                num_unused -= config.num_watermark_blocks if scheduler.num_running else 0
                assert num_blocks > num_unused, "held back though it fits"
            return

    @invariant()
    def is_sound(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        for request in self.unfinished:
            if request.status is RequestStatus.RUNNING:
                table = scheduler.kv_cache_manager.block_table(request.request_id)
                self.runner.model.check(request, table, request.num_computed_tokens)
            elif request.status is RequestStatus.SWAPPED:
                table = scheduler.swap_space.host_table(request.request_id)
                assert request.num_computed_tokens > 0
                self.runner.model.check(request, table, request.num_computed_tokens, in_host=True)
            else:
                preempted = request.num_preemptions > 0
                status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
                assert (request.status, request.num_computed_tokens) == (status, 0)
        self.runner.model.check_published(scheduler.kv_cache_manager.block_pool)
        requests = self.runner.requests.values()
        stats = scheduler.kv_stats()
        assert stats.num_preemptions == sum(r.num_preemptions for r in requests)
        assert stats.num_swap_preemptions <= stats.num_preemptions
        assert stats.num_swapped_in_blocks <= stats.num_swapped_out_blocks
        assert scheduler.prefix_cache_hits == sum(r.num_cached_tokens for r in requests)

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        most_steps = 4 * len(self.unfinished) * self.config.max_model_len
        while (self.unfinished or self.under_way) and most_steps > 0:
            most_steps -= 1
            self._step()
            self.is_sound()
        assert not self.unfinished
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.num_used_blocks == 0
        assert self.scheduler.swap_space.block_pool.num_used_blocks == 0
