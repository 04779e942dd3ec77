"""Requests inside the engine: their tokens, what scheduling counts, and which belong together."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

from rawpaged.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is; PREEMPTED and SWAPPED wait like WAITING but have run before.

    PREEMPTED has to compute its tokens again; the KV of SWAPPED is in host memory.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class FinishReason(str, enum.Enum):
    """Why a request ended; the values are those of the OpenAI API, plus abort and error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestGroup:
    """Requests over one prompt that are queued as one: its samples, or the beams of a search.

    Only the first is prefilled; the others take over its blocks. They stand in the queues at one
    place, given by `priority`, lower values first, and then by arrival.
    """

    __slots__ = ("has_started", "lockstep", "number", "priority", "requests")

    def __init__(
        self, requests: Sequence[Request], *, priority: int = 0, lockstep: bool = False
    ) -> None:
        self.requests = list(requests)
        """Those that have not ended, by sample index."""
        self.priority = priority
        self.lockstep = lockstep
        """Whether all sample in the same step or none does, as beams must."""
        self.has_started = False
        """Whether any of them has run."""
        self.number = 0
        """Place among the arrivals; the scheduler counts them."""
        for request in requests:
            request.group = self

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.number


class Request:
    """Tokens and progress of one sequence.

    `token_ids` is prompt then output. KV of `token_ids[:num_computed_tokens]` is in the blocks
    that the KV cache manager holds for it; the scheduler lets `num_computed_tokens` catch up with
    `num_tokens`, and a sampled token extends the list. Of a step that is under way the token counts
    already, though it is not in the list yet.
    """

    __slots__ = (
        "arrival_time",
        "awaited_hash",
        "block_hashes",
        "cache_keys",
        "eos_token_ids",
        "finish_reason",
        "group",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_unknown_tokens",
        "request_id",
        "sample_index",
        "sampling_params",
        "seed",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        sample_index: int = 0,
        cache_keys: tuple[str, ...] = (),
        arrival_time: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling_params = sampling_params
        self.max_tokens = max_tokens
        """Output tokens at most; already limited so that prompt and output fit max_model_len."""
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.sample_index = sample_index
        self.cache_keys = cache_keys
        """What sets its KV apart besides tokens (cache salt, adapter): others with the same keys
        share its blocks."""
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_unknown_tokens = 0
        """1 while the next token is being sampled by a step that is under way, else 0."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when it was first scheduled."""
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []
        """Chained digest of each full block of `token_ids`, extended as blocks fill."""
        self.awaited_hash: bytes | None = None
        """Of the block that it waits for others to compute, if it does."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.group = RequestGroup((self,))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_unknown_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before it samples: at least its last one, for the logits."""
        return max(1, len(self.token_ids) + self.num_unknown_tokens - self.num_computed_tokens)

    @property
    def awaits_last_token(self) -> bool:
        """Whether the token that is being sampled is its last by length: no step computes it."""
        return self.num_unknown_tokens > 0 and self.num_output_tokens >= self.max_tokens

    @property
    def waits_for_siblings(self) -> bool:
        """Whether its last token has to be computed together with those of its group."""
        return self.group.lockstep and self.num_output_tokens > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """One sample is enough to bring them, and its first output token comes with them."""
        return (
            self.sampling_params.prompt_logprobs is not None
            and self.sample_index == 0
            and self.num_output_tokens == 0
        )

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt logprobs need the logits of every position; others may not want to read it."""
        return not (self.wants_prompt_logprobs or self.sampling_params.skip_reading_prefix_cache)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
