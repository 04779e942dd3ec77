"""A SchedulerOutput as the flat index arrays that kernels take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rawpaged.backend import BatchMeta, DecodeBatch
from rawpaged.scheduler.output import UNKNOWN_TOKEN, SchedulerOutput

_NO_SLOT = -1
_NO_ROWS: Mapping[str, int] = {}


def make_decode_batch(
    output: SchedulerOutput,
    block_size: int,
    sampled_rows: Mapping[str, int] = _NO_ROWS,
    num_prompt_tokens: Sequence[int] | None = None,
) -> DecodeBatch | None:
    """The scheduled requests in order, if each has one token and samples; `make_batch` takes any.

    With `num_prompt_tokens`, by request, none of the tokens may be one of a prompt. A few numbers a
    request, as most steps are of this kind and the machine waits for them.
    """
    if num_prompt_tokens is not None and any(
        request.start < number
        for request, number in zip(output.scheduled, num_prompt_tokens, strict=True)
    ):
        return None
    token_ids, positions, slots, block_tables = [], [], [], []
    for request in output.scheduled:
        if len(request.token_ids) != 1 or not request.samples:
            return None
        token_id, position = request.token_ids[0], request.start
        if token_id == UNKNOWN_TOKEN:
            token_id = -1 - sampled_rows[request.request_id]
        slot = _NO_SLOT
        if position >= request.first_stored:
            block, offset = divmod(position, block_size)
            slot = request.block_table[block] * block_size + offset
        token_ids.append(token_id)
        positions.append(position)
        slots.append(slot)
        block_tables.append(request.block_table)
    return DecodeBatch(token_ids, positions, slots, block_tables)


def make_batch(
    output: SchedulerOutput, block_size: int, sampled_rows: Mapping[str, int] = _NO_ROWS
) -> BatchMeta:
    """Concatenate the scheduled requests in order; rows of those that sample want logits.

    `sampled_rows` is who had which row in the sampling that brings the tokens not known yet.
    """
    lengths = [len(request.token_ids) for request in output.scheduled]
    starts = np.array([request.start for request in output.scheduled], np.int32)
    query_start_loc = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])

    block_tables = np.zeros(
        (len(lengths), max(len(request.block_table) for request in output.scheduled)), np.int32
    )
    token_ids = np.empty(num_tokens, np.int32)
    for row, request in enumerate(output.scheduled):
        block_tables[row, : len(request.block_table)] = request.block_table
        token_ids[query_start_loc[row] : query_start_loc[row + 1]] = request.token_ids
        if request.token_ids[-1] == UNKNOWN_TOKEN:
            # For RunAhead.take_token_ids.
            token_ids[query_start_loc[row + 1] - 1] = -1 - sampled_rows[request.request_id]

    request_of_token = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = (
        np.arange(num_tokens, dtype=np.int32)
        - query_start_loc[request_of_token]
        + starts[request_of_token]
    )
    first_stored = np.array([request.first_stored for request in output.scheduled], np.int32)
    blocks = block_tables[request_of_token, positions // block_size].astype(np.int64)
    last_rows = query_start_loc[1:] - 1
    return BatchMeta(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=np.where(
            positions < first_stored[request_of_token],
            _NO_SLOT,
            blocks * block_size + positions % block_size,
        ),
        query_start_loc=query_start_loc,
        seq_lens=starts + np.array(lengths, np.int32),
        block_tables=block_tables,
        logits_rows=last_rows[[request.samples for request in output.scheduled]],
    )
