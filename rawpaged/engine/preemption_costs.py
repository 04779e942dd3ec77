"""What swapping and recomputing take on this machine, measured once at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from rawpaged.config import PreemptionCosts
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput

logger = logging.getLogger(__name__)

MOST_BLOCKS = 64
MOST_TOKENS = 256
REPETITIONS = 3


def measure_costs(runner: ModelRunner) -> PreemptionCosts:
    """Copy blocks out and in, and compute a chunk of a prompt; the best of a few times each.

    Uses the first blocks of both pools, which no request has yet.
    """
    costs = PreemptionCosts(_block_copy_seconds(runner), _token_seconds(runner))
    logger.info(
        "preempting: %.3g s to copy a block, %.3g s to compute a token again",
        costs.block_copy_seconds,
        costs.token_seconds,
    )
    return costs


def _block_copy_seconds(runner: ModelRunner) -> float:
    num_blocks = min(runner.num_blocks, runner.num_host_blocks, MOST_BLOCKS)
    pairs = np.repeat(np.arange(num_blocks, dtype=np.int64)[:, None], 2, axis=1)
    backend, device, host = runner.backend, runner.kv_caches, runner.host_kv_caches

    def copy() -> None:
        backend.copy_blocks(host, device, pairs)
        backend.copy_blocks(device, host, pairs)
        # A download comes after all that was queued before it.
        backend.download(backend.upload(np.zeros(1, np.int32)))

    return _best_time(copy) / (2 * num_blocks)


def _token_seconds(runner: ModelRunner) -> float:
    pool_len = runner.num_blocks * runner.block_size
    num_tokens = min(runner.max_chunk_len, pool_len, MOST_TOKENS)
    table: Sequence[int] = range(-(-num_tokens // runner.block_size))
    request = Request("costs", [0] * num_tokens, SamplingParams(temperature=0.0), max_tokens=1)
    chunk = ScheduledRequest(
        "costs", (0,) * num_tokens, start=0, block_table=tuple(table), samples=True
    )
    output = SchedulerOutput((chunk,), ())
    return _best_time(lambda: runner.execute(output, {"costs": request})) / num_tokens


def _best_time(function: Callable[[], object]) -> float:
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)
