"""Tells the stats logger of an engine's limits and of its steps."""

from __future__ import annotations

import time

from rawpaged.backend import Backend
from rawpaged.engine.stats import EngineLimits, StatsLogger, StepStats
from rawpaged.scheduler.scheduler import Scheduler

_SECONDS_BETWEEN = 0.05
"""Nobody looks at queues and pool more often, and to count them costs time in a step."""


class StepRecorder:
    """Turns the scheduler's totals into what has been added since the last record."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        stats_logger: StatsLogger | None,
        *,
        weights_bytes: int,
    ) -> None:
        self._scheduler = scheduler
        self._stats_logger = stats_logger
        self._counted = (0, 0)
        self._next_record = 0.0
        if stats_logger is not None:
            stats_logger.record_start(_limits(scheduler, backend, weights_bytes))

    def record_step(self) -> None:
        """A step is over; told if the last record is some time ago."""
        if self._stats_logger is not None and time.monotonic() >= self._next_record:
            self._record(self._stats_logger)

    def record_idle(self) -> None:
        """Nothing runs any more."""
        if self._stats_logger is not None:
            self._record(self._stats_logger)

    def _record(self, stats_logger: StatsLogger) -> None:
        """Tell how things stand."""
        self._next_record = time.monotonic() + _SECONDS_BETWEEN
        s = self._scheduler
        totals = (s.num_prompt_tokens, s.num_generation_tokens)
        prompt, generation = (
            now - before for now, before in zip(totals, self._counted, strict=True)
        )
        self._counted = totals
        stats_logger.record_step(
            StepStats(
                num_running=s.num_running,
                num_waiting=s.num_waiting,
                kv=s.kv_stats(),
                num_prompt_tokens=prompt,
                num_generation_tokens=generation,
            )
        )


def _limits(scheduler: Scheduler, backend: Backend, weights_bytes: int) -> EngineLimits:
    config = scheduler.config
    return EngineLimits(
        device=backend.name,
        dtype=backend.dtype,
        cache_dtype=backend.kv_cache_dtype,
        weights_bytes=weights_bytes,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )
