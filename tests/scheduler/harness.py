"""A model without arithmetic, and a KV store that knows what every slot must hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from rawpaged.config import SchedulerConfig
from rawpaged.request import FinishReason, Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.block_hash import NO_PARENT, hash_block
from rawpaged.scheduler.block_pool import BlockPool
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput
from rawpaged.scheduler.scheduler import Scheduler

VOCAB_SIZE = 6
EOS = 5


def make_config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_blocks": 10,
        "block_size": 4,
        "max_model_len": 40,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    return SchedulerConfig(**{**values, **changes})


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    cache_keys: tuple[str, ...] = (),
    **params: Any,
) -> Request:
    """Ends by length alone unless `eos_token_ids` or `stop_token_ids` say otherwise."""
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        eos_token_ids=eos_token_ids,
        cache_keys=cache_keys,
    )


def next_token(token_ids: Sequence[int]) -> int:
    """What the model says after these tokens, and nothing else matters to it."""
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


def solo_run(request: Request) -> tuple[list[int], FinishReason, int | None]:
    """Output, reason and stop_reason of a request that has the model to itself."""
    params = request.sampling_params
    prompt, output = request.prompt_token_ids, list[int]()
    while True:
        output.append(next_token(prompt + output))
        if len(output) >= params.min_tokens:
            if output[-1] in request.eos_token_ids and not params.ignore_eos:
                return output, FinishReason.STOP, None
            if output[-1] in (params.stop_token_ids or ()):
                return output, FinishReason.STOP, output[-1]
        if len(output) == request.max_tokens:
            return output, FinishReason.LENGTH, None


class FakeModel:
    """Computes steps. The KV of a position is the tuple of everything that it depends on.

    Slots past what a request has computed are poisoned before each step, so content that someone
    else still counts on is seen to be lost, and content read before it is written is seen too.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], tuple[Any, ...] | None] = {}

    def compute(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> dict[str, int]:
        """Runs a step; returns the sampled tokens."""
        for scheduled in output.scheduled:
            self._write(scheduled, requests[scheduled.request_id])
        for scheduled in output.scheduled:
            end = scheduled.start + len(scheduled.token_ids)
            self.check(requests[scheduled.request_id], scheduled.block_table, end)
        return {
            scheduled.request_id: next_token(requests[scheduled.request_id].token_ids)
            for scheduled in output.scheduled
            if scheduled.samples
        }

    def _write(self, scheduled: ScheduledRequest, request: Request) -> None:
        start, end = scheduled.start, scheduled.start + len(scheduled.token_ids)
        num_slots = len(scheduled.block_table) * self.block_size
        assert end <= num_slots, f"{scheduled=} has {num_slots} slots"
        assert list(scheduled.token_ids) == request.token_ids[start:end]
        for position in range(start, num_slots):
            self.slots[self._slot(scheduled.block_table, position)] = None
        for position in range(start, end):
            content = (request.cache_keys, *request.token_ids[: position + 1])
            self.slots[self._slot(scheduled.block_table, position)] = content

    def check(self, request: Request, block_table: Sequence[int], num_computed: int) -> None:
        """Raises AssertionError unless all computed positions hold exactly their own content."""
        for position in range(num_computed):
            slot = self._slot(block_table, position)
            content = (request.cache_keys, *request.token_ids[: position + 1])
            assert self.slots.get(slot) == content, (
                f"{request.request_id} {position=} {slot=}: {self.slots.get(slot)} != {content}"
            )

    def check_published(self, pool: BlockPool) -> None:
        """Raises AssertionError unless every published block is full of what its hash names."""
        for block_id in range(pool.num_blocks):
            published = pool.block_hash(block_id)
            if published is None:
                continue
            contents = [self.slots[block_id, offset] for offset in range(self.block_size)]
            assert contents[-1] is not None, f"{block_id=} is published with {contents=}"
            cache_keys, *token_ids = contents[-1]
            ends = range(len(token_ids) - self.block_size + 1, len(token_ids) + 1)
            assert contents == [(cache_keys, *token_ids[:end]) for end in ends]
            expected = NO_PARENT
            for start in range(0, len(token_ids), self.block_size):
                block = token_ids[start : start + self.block_size]
                expected = hash_block(expected, block, cache_keys)
            assert published == expected, f"{block_id=} is published for other tokens"

    def _slot(self, block_table: Sequence[int], position: int) -> tuple[int, int]:
        return block_table[position // self.block_size], position % self.block_size


class Runner:
    """A scheduler, a model and all requests that were ever given to them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.model = FakeModel(config.block_size)
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        return request

    def step(self) -> tuple[SchedulerOutput, list[str]]:
        """One step; returns what was scheduled and the ids of the requests that it ended."""
        output = self.scheduler.schedule()
        finished = self.scheduler.update(output, self.model.compute(output, self.requests))
        self.scheduler.check_integrity()
        return output, [request.request_id for request in finished]

    def drain(self, max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                assert self.scheduler.num_used_blocks == 0
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")


def shares(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """(request, first position, number of tokens) of each request in the step."""
    return [(s.request_id, s.start, len(s.token_ids)) for s in output.scheduled]
