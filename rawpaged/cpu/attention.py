"""Paged attention over a ragged batch, with the exact maximum first and no rescaling.

One task is a tile of queries of one request and one KV head; its rows are (token, query head of
the group). Scores of all visible keys go to scratch, then each row's maximum, exponentials and
sum, then the weighted values in the order of positions. Nothing that a row computes depends on
the rest of its tile, so chunking and batching cannot change a bit: keys that a row may not see
get weight 0, and adding 0 * v is exact for the finite values that the request itself wrote.
Slots past the tile's last key are never read as values (their scores are computed and ignored).

Caches of bytes are widened to float32 block by block. Their scales are factors of a whole head, so
they go into the queries and into the division by the sum.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.attention_work import TILE_ROWS
from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import exp, sum_of
from rawpaged.cpu.kv_elements import widened, widening_scratch
from rawpaged.cpu.tiles import accumulate

_ZERO = np.float32(0.0)


@njit(nogil=True)
def _softmax_weights(row, low, high):
    """row[low:high] = exp(row - max), zeros elsewhere; returns their sum.

    The row starts at a multiple of the block size, so that a position's chain in the sum does
    not depend on the tile.
    """
    seen = row[low:high]
    most = seen[0]
    for i in range(seen.shape[0]):
        most = max(most, seen[i])
    for i in range(seen.shape[0]):
        seen[i] = exp(seen[i] - most)
    row[:low] = _ZERO
    row[high:] = _ZERO
    return sum_of(row[:high])


@kernel
def attention_tasks(
    out,  # f32[num_tokens, num_heads, head_dim]
    q,  # f32[num_tokens, num_heads, head_dim]
    cache_keys,
    cache_values,
    key_scale,  # f32[num_kv_heads], 1 for caches of floats
    value_scale,
    positions,  # i32[num_tokens]
    block_tables,  # i32[num_reqs, max_blocks]
    tasks,  # i32[num_tasks, 4]
    max_seq_len,
    scale,
    window,  # last positions that a query sees, 0: all
    start,
    stop,
):
    """Run tasks [start, stop)."""
    head_dim = q.shape[2]
    group = q.shape[1] // cache_keys.shape[1]
    block_size = cache_keys.shape[3]
    width = cache_values.shape[3]
    most_rows = max(TILE_ROWS, group)
    padded = (max_seq_len + block_size - 1) // block_size * block_size
    queries = np.empty((most_rows, head_dim), np.float32)
    scores = np.empty((most_rows, padded), np.float32)
    sums = np.empty(most_rows, np.float32)
    weighted = np.empty((most_rows, width), np.float32)
    key_scratch = widening_scratch(cache_keys)
    value_scratch = widening_scratch(cache_values)
    for task in range(start, stop):
        request, head, first, last = tasks[task]
        rows = (last - first) * group
        end = positions[last - 1] + 1
        begin = max(0, positions[first] + 1 - window) if window > 0 else 0
        table = block_tables[request]
        first_block = begin // block_size
        last_block = (end + block_size - 1) // block_size

        key_factor = scale * key_scale[head]
        for t in range(first, last):
            for g in range(group):
                source = q[t, head * group + g]
                target = queries[(t - first) * group + g]
                for i in range(head_dim):
                    target[i] = source[i] * key_factor
        # scores[row, position - origin] for positions in [origin, last_block * block_size)
        origin = first_block * block_size
        scores[:rows, : last_block * block_size - origin] = _ZERO
        for block in range(first_block, last_block):
            keys = widened(cache_keys, table[block], head, key_scratch)
            column = block * block_size - origin
            accumulate(
                keys,
                queries.ctypes.data,
                queries.strides[0],
                rows,
                keys.ctypes.data,
                keys.strides[0],
                scores.ctypes.data + 4 * column,
                scores.strides[0],
                block_size,
                head_dim,
            )
        for t in range(first, last):
            low = max(0, positions[t] + 1 - window) if window > 0 else 0
            for g in range(group):
                row = (t - first) * group + g
                sums[row] = _softmax_weights(
                    scores[row, : end - origin], low - origin, positions[t] + 1 - origin
                )
        weighted[:rows] = _ZERO
        for block in range(first_block, last_block):
            values = widened(cache_values, table[block], head, value_scratch)
            column = block * block_size - origin
            accumulate(
                values,
                scores.ctypes.data + 4 * column,
                scores.strides[0],
                rows,
                values.ctypes.data,
                values.strides[0],
                weighted.ctypes.data,
                weighted.strides[0],
                width,
                min(block_size, end - block * block_size),
            )
        for t in range(first, last):
            for g in range(group):
                row = (t - first) * group + g
                inverse = value_scale[head] / sums[row]
                source = weighted[row]
                target = out[t, head * group + g]
                for i in range(head_dim):
                    target[i] = source[i] * inverse
