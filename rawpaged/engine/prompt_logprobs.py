"""Log-probabilities of a prompt's own tokens, from a step that has just computed part of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rawpaged.backend import Backend, BatchMeta
from rawpaged.engine.sampler import PositionLogprobs, position_logprobs
from rawpaged.models.llama import Llama
from rawpaged.request import Request
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput
from rawpaged.tracing import Tracer


def prompt_logprobs(
    output: SchedulerOutput,
    meta: BatchMeta,
    requests: Mapping[str, Request],
    model: Llama,
    ops: Backend,
    tracer: Tracer,
) -> dict[str, dict[int, PositionLogprobs]]:
    """Those of the step's chunks, by request that asked and by position.

    Overwrites the model's logits, and waits for them.
    """
    result = {}
    for row, item in enumerate(output.scheduled):
        request = requests[item.request_id]
        k = request.sampling_params.prompt_logprobs
        if k is not None and request.wants_prompt_logprobs:
            first_row = int(meta.query_start_loc[row])
            with tracer.phase("prompt logprobs"):
                result[item.request_id] = _of_chunk(item, request, first_row, k, model, ops)
    return result


def _of_chunk(
    item: ScheduledRequest, request: Request, first_row: int, k: int, model: Llama, ops: Backend
) -> dict[int, PositionLogprobs]:
    """The row of position p predicts the token at p + 1; only prompt tokens are asked for."""
    result = {}
    end = min(item.start + len(item.token_ids), request.num_prompt_tokens - 1)
    for first in range(item.start, end, model.max_logits_rows):
        last = min(first + model.max_logits_rows, end)
        rows = np.arange(first, last, dtype=np.int32) - item.start + first_row
        logits = model.compute_logits(ops.upload(rows))
        token_ids = np.array(request.token_ids[first + 1 : last + 1], np.int32)
        table = ops.token_logprobs(logits, token_ids, k)
        for i, token_id in enumerate(token_ids.tolist()):
            result[first + 1 + i] = position_logprobs(table, i, token_id, k)
    return result
