"""Steps through every op before the first request, so that kernels are compiled by then."""

from __future__ import annotations

import numpy as np

from rawpaged.engine.model_runner import ModelRunner
from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput


def warm_up(runner: ModelRunner) -> None:
    """Run one token through the model, then two, with penalties, logprobs and a random draw.

    Views of one row are laid out as views of many are not, and kernels are compiled for each
    layout. It writes to the first slots of block 0, which no request has yet.
    """
    params = SamplingParams(
        temperature=1.0, top_k=2, top_p=0.9, logprobs=1, prompt_logprobs=1, frequency_penalty=0.1
    )
    for num_tokens in range(1, min(2, runner.max_chunk_len) + 1):
        # One token more, as if generated, so that penalties have work.
        request = Request("warm-up", [0] * num_tokens, params, max_tokens=2)
        request.token_ids.append(0)
        chunk = ScheduledRequest(
            "warm-up", (0,) * num_tokens, start=0, block_table=(0,), samples=True
        )
        runner.execute(SchedulerOutput((chunk,), ()), {"warm-up": request})
    _copy_a_block(runner)


def _copy_a_block(runner: ModelRunner) -> None:
    """Copy block 0 of the first layer to the host; copies of other pools use the same kernel."""
    host = runner.backend.new_host_kv_cache(
        1, runner.config.num_kv_heads, runner.config.head_dim, runner.block_size
    )
    runner.backend.copy_blocks([host], runner.kv_caches[:1], np.zeros((1, 2), np.int64))
