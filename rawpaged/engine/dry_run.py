"""The largest steps, taken once over a pool of one block, so that the memory they take is known."""

from __future__ import annotations

from collections.abc import Sequence

from rawpaged.engine.model_runner import ModelRunner
from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput


def run_largest_steps(
    runner: ModelRunner,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    max_logprobs: int,
) -> None:
    """A prefill that uses up the token budget, and a decode step of as many requests as may run.

    Every request samples in the way that takes most memory. Block tables are as wide as they get,
    and name block 0 throughout: what is computed means nothing, what it takes is what counts.
    """
    lengths: list[int] = []
    while len(lengths) < max_num_seqs and sum(lengths) < max_num_batched_tokens:
        left = max_num_batched_tokens - sum(lengths)
        lengths.append(min(left, runner.max_chunk_len))
    num_blocks = -(-max_model_len // runner.block_size)
    params = SamplingParams(
        temperature=1.0,
        top_k=2,
        top_p=0.9,
        frequency_penalty=0.1,
        logprobs=max_logprobs,
        prompt_logprobs=max_logprobs,
    )
    _run(runner, lengths, num_blocks, params)
    _run(runner, [1] * min(max_num_seqs, max_num_batched_tokens), num_blocks, params)


def _run(
    runner: ModelRunner, lengths: Sequence[int], num_blocks: int, params: SamplingParams
) -> None:
    """One step of requests with so many tokens each."""
    requests = {}
    scheduled = []
    for index, length in enumerate(lengths):
        name = f"dry-run-{index}"
        requests[name] = Request(name, [0] * length, params, max_tokens=2)
        # One token more, as if generated, so that penalties have work.
        requests[name].token_ids.append(0)
        scheduled.append(
            ScheduledRequest(
                name, (0,) * length, start=0, block_table=(0,) * num_blocks, samples=True
            )
        )
    runner.execute(SchedulerOutput(tuple(scheduled), ()), requests)
