"""What one request has come through so far: its times, and the log-probabilities of its prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rawpaged.engine.sampler import PositionLogprobs
from rawpaged.engine.stats import RequestStats, StatsLogger
from rawpaged.request import Request


class RequestProgress:
    """Kept while a request is unfinished; tells the stats logger, if there is one, of its times."""

    def __init__(self, request: Request, stats_logger: StatsLogger | None) -> None:
        self._request = request
        self._stats_logger = stats_logger
        self._first_scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._prompt_logprobs: dict[int, PositionLogprobs] = {}

    def note_scheduled(self, now: float) -> None:
        """It is in a step."""
        if self._first_scheduled is None:
            self._first_scheduled = now

    def note_token(self, now: float) -> None:
        """It has got a token."""
        if self._first_token is None or self._last_token is None:
            self._first_token = now
            if self._stats_logger is not None:
                self._stats_logger.record_first_token(now - self._request.arrival_time)
        elif self._stats_logger is not None:
            self._stats_logger.record_inter_token_latency(now - self._last_token)
        self._last_token = now

    def note_end(self) -> None:
        """It has a finish_reason, and this is not needed any more."""
        if self._stats_logger is not None:
            self._stats_logger.record_request(self._stats())

    def keep_prompt_logprobs(self, by_position: Mapping[int, PositionLogprobs]) -> None:
        """Those of a chunk of the prompt."""
        self._prompt_logprobs.update(by_position)

    def prompt_logprobs(self) -> list[PositionLogprobs | None]:
        """One entry a prompt token, None for the first."""
        return [self._prompt_logprobs.get(i) for i in range(self._request.num_prompt_tokens)]

    def _stats(self) -> RequestStats:
        request = self._request
        now = time.monotonic()
        first, last = self._first_token, self._last_token
        later_tokens = request.num_output_tokens - 1
        assert request.finish_reason is not None
        return RequestStats(
            finish_reason=request.finish_reason.value,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_generation_tokens=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
            queue_seconds=(
                None
                if self._first_scheduled is None
                else self._first_scheduled - request.arrival_time
            ),
            time_to_first_token_seconds=None if first is None else first - request.arrival_time,
            time_per_output_token_seconds=(
                None
                if first is None or last is None or later_tokens < 1
                else (last - first) / later_tokens
            ),
            e2e_seconds=now - request.arrival_time,
        )
