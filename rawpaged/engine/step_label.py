"""What a step computes, in a few words and in numbers, for traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rawpaged.request import Request
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput

_MAX_LENGTHS = 3
"""Different lengths of chunks that a label lists."""


def step_label(output: SchedulerOutput, requests: Mapping[str, Request]) -> str:
    """Chunks by length, the most tokens first, then single tokens: "prefill=3x512 decode=29".

    A chunk is what catches up on a prompt, or on what preemption threw away.
    """
    chunks = Counter(
        len(item.token_ids)
        for item in output.scheduled
        if not _is_decode(item, requests[item.request_id])
    )
    listed = sorted(chunks.items(), key=lambda chunk: chunk[0] * chunk[1], reverse=True)
    words = [f"{count}x{length}" for length, count in listed[:_MAX_LENGTHS]]
    if len(listed) > _MAX_LENGTHS:
        words.append(f"{sum(count for _, count in listed[_MAX_LENGTHS:])}more")
    decode = len(output.scheduled) - chunks.total()
    return f"prefill={'+'.join(words) or 0} decode={decode}"


def step_args(output: SchedulerOutput, requests: Mapping[str, Request]) -> dict[str, object]:
    """Sizes that the time of a step depends on."""
    items = output.scheduled
    context_lens = [item.start + len(item.token_ids) for item in items]
    decode = sum(_is_decode(item, requests[item.request_id]) for item in items)
    return {
        "num_requests": len(items),
        "num_tokens": output.num_tokens,
        "num_prefill_tokens": output.num_tokens - decode,
        "num_decode_tokens": decode,
        "num_sampled": sum(item.samples for item in items),
        "num_preempted": len(output.preempted),
        "sum_context_len": sum(context_lens),
        "max_context_len": max(context_lens),
    }


def _is_decode(item: ScheduledRequest, request: Request) -> bool:
    return len(item.token_ids) == 1 and item.start >= request.num_prompt_tokens
