"""A model without arithmetic, and a KV store that knows what every slot must hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from rawpaged.config import SchedulerConfig
from rawpaged.request import FinishReason, Request, RequestGroup
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.block_hash import NO_PARENT, hash_block
from rawpaged.scheduler.block_pool import BlockPool
from rawpaged.scheduler.output import UNKNOWN_TOKEN, ScheduledRequest, SchedulerOutput
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
    sample_index: int = 0,
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
        sample_index=sample_index,
    )


def make_group(
    name: str, n: int, prompt: Sequence[int], max_tokens: int = 4, **options: Any
) -> RequestGroup:
    """Requests name0, name1, ...; `lockstep` and `priority` are the group's, the rest theirs."""
    of_group = {key: options.pop(key) for key in ("lockstep", "priority") if key in options}
    requests = [
        make_request(f"{name}{i}", prompt, max_tokens, sample_index=i, **options) for i in range(n)
    ]
    return RequestGroup(requests, **of_group)


def next_token(token_ids: Sequence[int], sample_index: int = 0) -> int:
    """What the model says after these tokens, and nothing else matters to it."""
    return zlib.crc32(bytes(token_ids), sample_index) % VOCAB_SIZE


def next_beams(beams: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """(parents, tokens) of beams that have these tokens now: a search that searches for nothing."""
    seed = zlib.crc32(bytes(token_id for beam in beams for token_id in beam))
    parents = [zlib.crc32(bytes([i]), seed) % len(beams) for i in range(len(beams))]
    return parents, [next_token(beams[parent], i) for i, parent in enumerate(parents)]


def solo_run(request: Request) -> tuple[list[int], FinishReason, int | None]:
    """Output, reason and stop_reason of a request that has the model to itself."""
    params = request.sampling_params
    prompt, output = request.prompt_token_ids, list[int]()
    while True:
        output.append(next_token(prompt + output, request.sample_index))
        if len(output) >= params.min_tokens:
            if output[-1] in request.eos_token_ids and not params.ignore_eos:
                return output, FinishReason.STOP, None
            if output[-1] in (params.stop_token_ids or ()):
                return output, FinishReason.STOP, output[-1]
        if len(output) == request.max_tokens:
            return output, FinishReason.LENGTH, None


def solo_beams(prompt: Sequence[int], width: int, num_steps: int) -> list[list[int]]:
    """Prompt and output of every beam after so many steps, alone."""
    beams = [list(prompt) for _ in range(width)]
    for _ in range(num_steps):
        parents, tokens = next_beams(beams)
        beams = [[*beams[parent], token] for parent, token in zip(parents, tokens, strict=True)]
    return beams


def _known(scheduled: ScheduledRequest, request: Request) -> list[int]:
    """The token ids of a share, what was not known when it was scheduled put in."""
    *token_ids, last = scheduled.token_ids
    end = scheduled.start + len(scheduled.token_ids)
    return [*token_ids, request.token_ids[end - 1] if last == UNKNOWN_TOKEN else last]


Slots = dict[tuple[int, int], tuple[Any, ...] | None]
"""(block, offset) -> what is stored there; None: poison."""


class FakeModel:
    """Computes steps. The KV of a position is the tuple of everything that it depends on.

    Blocks that nobody holds are poisoned, and so are slots past what a request has computed:
    content that someone else counts on is seen to be lost, and what is read too early too.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: Slots = {}
        self.host_slots: Slots = {}

    def compute(
        self,
        output: SchedulerOutput,
        requests: Mapping[str, Request],
        pool: BlockPool,
        host_pool: BlockPool,
    ) -> dict[str, int]:
        """Runs a step; returns the sampled tokens of requests that are not in lockstep."""
        self._copy(output.swap_out, self.slots, self.host_slots)
        self._copy(output.swap_in, self.host_slots, self.slots)
        self._copy(output.block_copies, self.slots, self.slots)
        self._poison_free(pool, self.slots)
        self._poison_free(host_pool, self.host_slots)
        for scheduled in output.scheduled:
            self._write(scheduled, requests[scheduled.request_id])
        for scheduled in output.scheduled:
            end = scheduled.start + len(scheduled.token_ids)
            # One that has ended meanwhile is computed in vain, maybe over blocks of nobody.
            if not requests[scheduled.request_id].is_finished:
                self.check(requests[scheduled.request_id], scheduled.block_table, end)
        sampling = [requests[s.request_id] for s in output.scheduled if s.samples]
        return {
            request.request_id: next_token(request.token_ids, request.sample_index)
            for request in sampling
            if not request.group.lockstep
        }

    def _copy(self, pairs: Sequence[tuple[int, int]], origin: Slots, to: Slots) -> None:
        targets = [target for _, target in pairs]
        assert len(set(targets)) == len(targets), f"{pairs=}"
        assert origin is not to or not {source for source, _ in pairs} & set(targets), f"{pairs=}"
        for source, target in pairs:
            for offset in range(self.block_size):
                to[target, offset] = origin.get((source, offset))

    def _poison_free(self, pool: BlockPool, slots: Slots) -> None:
        for block_id in range(pool.num_blocks):
            if pool.ref_count(block_id) == 0 and pool.block_hash(block_id) is None:
                slots.update({(block_id, offset): None for offset in range(self.block_size)})

    def _write(self, scheduled: ScheduledRequest, request: Request) -> None:
        start, end = scheduled.start, scheduled.start + len(scheduled.token_ids)
        num_slots = len(scheduled.block_table) * self.block_size
        assert end <= num_slots, f"{scheduled=} has {num_slots} slots"
        assert _known(scheduled, request) == request.token_ids[start:end]
        first = scheduled.first_stored
        assert start == min(first, request.num_tokens - 1)
        if first == end:
            return
        for position in range(first, num_slots):
            self.slots[self._slot(scheduled.block_table, position)] = None
        for position in range(first, end):
            content = (request.cache_keys, *request.token_ids[: position + 1])
            self.slots[self._slot(scheduled.block_table, position)] = content

    def check(
        self,
        request: Request,
        block_table: Sequence[int],
        num_computed: int,
        *,
        in_host: bool = False,
    ) -> None:
        """Raises AssertionError unless all computed positions hold exactly their own content."""
        slots = self.host_slots if in_host else self.slots
        for position in range(num_computed):
            slot = self._slot(block_table, position)
            content = (request.cache_keys, *request.token_ids[: position + 1])
            assert slots.get(slot) == content, (
                f"{request.request_id} {position=} {slot=}: {slots.get(slot)} != {content}"
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
        self.add_group(request.group)
        return request

    def add_group(self, group: RequestGroup) -> list[Request]:
        requests = list(group.requests)
        self.scheduler.add(group)
        self.requests |= {request.request_id: request for request in requests}
        return requests

    def compute(self, output: SchedulerOutput) -> dict[str, int]:
        scheduler = self.scheduler
        pools = scheduler.kv_cache_manager.block_pool, scheduler.swap_space.block_pool
        return self.model.compute(output, self.requests, *pools)

    def update(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> list[Request]:
        """Books the step, and lets beams go on; returns the requests that have ended."""
        self.scheduler.advance(output)
        return self.complete(output, sampled)

    def complete(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> list[Request]:
        """`update` of a step that has been counted."""
        finished = self.scheduler.complete(sampled)
        groups = {
            self.requests[scheduled.request_id].group
            for scheduled in output.scheduled
            if scheduled.samples
        }
        for group in sorted(groups, key=lambda group: group.order):
            if group.lockstep and group.requests:
                finished += self._advance_beams(group)
        return finished

    def _advance_beams(self, group: RequestGroup) -> list[Request]:
        beams = list(group.requests)
        parents, token_ids = next_beams([request.token_ids for request in beams])
        self.scheduler.reorder(beams, parents, token_ids)
        if beams[0].num_output_tokens < beams[0].max_tokens:
            return []
        for request in beams:
            assert self.scheduler.finish(request.request_id, FinishReason.LENGTH) is request
        return beams

    def step(self) -> tuple[SchedulerOutput, list[str]]:
        """One step; returns what was scheduled and the ids of the requests that it ended."""
        output = self.scheduler.schedule()
        finished = self.update(output, self.compute(output))
        self.scheduler.check_integrity()
        return output, [request.request_id for request in finished]

    def drain(self, max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                assert self.scheduler.num_used_blocks == 0
                assert self.scheduler.swap_space.block_pool.num_used_blocks == 0
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")


def shares(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """(request, first position, number of tokens) of each request in the step."""
    return [(s.request_id, s.start, len(s.token_ids)) for s in output.scheduled]
