"""What the engine tells whoever counts: one protocol, three records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rawpaged.scheduler.kv_stats import KVStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine was started with, for whoever shows it."""

    device: str
    dtype: str
    cache_dtype: str
    weights_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Queues and KV pool after a step, and what was computed since the last record of one."""

    num_running: int
    num_waiting: int
    kv: KVStats
    """Its totals are those since the engine was made."""
    num_prompt_tokens: int
    """Prompt tokens computed, recomputation after preemption included."""
    num_generation_tokens: int


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
    """Called on the engine's thread, but for `record_start`, which comes first; must not block."""

    def record_start(self, limits: EngineLimits) -> None: ...
    def record_step(self, stats: StepStats) -> None: ...
    def record_first_token(self, seconds: float) -> None: ...
    def record_inter_token_latency(self, seconds: float) -> None: ...
    def record_request(self, stats: RequestStats) -> None: ...
