"""What the engine tells whoever counts: one protocol, two records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Gauges after one step, and counts of what happened in it."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    """Held by at least one request."""
    num_cached_blocks: int
    """Held by none, but kept for prefix hits until evicted; the rest is free."""
    num_prompt_tokens: int
    """Prompt tokens computed, recomputation after preemption included."""
    num_generation_tokens: int
    num_preemptions: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    """Of those, tokens found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """One request that has ended; times in seconds, None where it never came so far."""

    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    num_preemptions: int
    queue_seconds: float | None
    """Arrival to first scheduled."""
    time_to_first_token_seconds: float | None
    time_per_output_token_seconds: float | None
    """Mean over the tokens after the first."""
    e2e_seconds: float


class StatsLogger(Protocol):
    """Called on the engine's thread; must not block."""

    def record_step(self, stats: StepStats) -> None: ...
    def record_first_token(self, seconds: float) -> None: ...
    def record_inter_token_latency(self, seconds: float) -> None: ...
    def record_request(self, stats: RequestStats) -> None: ...
