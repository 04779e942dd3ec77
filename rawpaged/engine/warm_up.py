"""One step through every op before the first request, so that kernels are compiled by then."""

from __future__ import annotations

from rawpaged.engine.model_runner import ModelRunner
from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput


def warm_up(runner: ModelRunner) -> None:
    """Run one token through the model, with penalties, logprobs and a random draw.

    It writes to slot 0 of block 0, which no request has yet.
    """
    params = SamplingParams(
        temperature=1.0, top_k=2, top_p=0.9, logprobs=1, prompt_logprobs=1, frequency_penalty=0.1
    )
    # Two tokens, the second generated: then prompt logprobs, penalties and counts all have work.
    request = Request("warm-up", [0], params, max_tokens=2)
    request.token_ids.append(0)
    chunk = ScheduledRequest("warm-up", (0,), start=0, block_table=(0,), samples=True)
    runner.execute(SchedulerOutput((chunk,), ()), {"warm-up": request})
