"""Paged attention over a ragged batch, in partitions of keys.

One task is a tile of queries of one request and one KV head (`attention_work.py`); its rows are
(token, query head of the group). For each partition of PARTITION positions the scores of all keys
go to scratch, then each row's maximum, exponentials (powers of two, for which queries are scaled)
and sum, then the weighted values. Results of
partitions are joined from the first to the last, rescaled to the larger maximum (Milakov and
Gimelshein 2018). Partitions lie at multiples of PARTITION, so nothing that a row computes depends
on the rest of its tile, and chunking and batching cannot change a bit: keys that a row may not see
get weight 0, and adding 0 * v is exact for the finite values that the request itself wrote.
Slots past the tile's last key are never read as values (their scores are computed and ignored).

Scales of a cache of bytes are factors of a whole head, so they go into the queries and into the
division by the sum.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from numba import njit

from rawpaged.cpu.attention_kernels import MOST_ROWS, prefetch
from rawpaged.cpu.attention_partition import make_partition
from rawpaged.cpu.attention_rows import finish_row, join_row, make_scale_row
from rawpaged.cpu.attention_work import (
    FIRST,
    HEAD,
    LAST,
    PARTITION,
    TILE_ROWS,
)
from rawpaged.cpu.compiling import Kernel, kernel, set_variant
from rawpaged.cpu.floats import row_of, stored_like
from rawpaged.cpu.key_groups import (
    GROUPS,
    LIST_LENGTH,
    key_scratch,
    list_ahead,
    seen_partitions,
    value_scratch,
    widen_partition,
)
from rawpaged.cpu.linear_inputs import piece_of, store_piece
from rawpaged.cpu.products import Arithmetic
from rawpaged.cpu.scratch import borrow, keep
from rawpaged.cpu.vector_ir import LANES

_ZERO = np.float32(0.0)


def _make_kernel(arithmetic: Arithmetic) -> Kernel:
    attend = make_partition(arithmetic)
    load_queries = _make_load_queries(arithmetic)
    element = np.uint16 if arithmetic == "bfloat16_dot" else np.float32

    def run_tasks(
        out,
        q,
        cache_keys,
        cache_values,
        key_scale,
        value_scale,
        positions,
        block_tables,
        tasks,
        slot_states,
        slot_values,
        scale,
        window,
        start,
        stop,
        room,
    ):
        queries, scores, weights, values, states, bounds, odd_line, finished = room[:8]
        wide_keys, wide_values, wide_listed, listed, state = room[8:]
        head_dim = queries.shape[1]
        group = q.columns // head_dim // cache_keys.shape[1]
        for task in range(start, stop):
            request, head, first, last, first_partition, last_partition, slot = tasks[task]
            rows = (last - first) * group
            own = positions[first:last]
            load_queries(queries, q, group, head, first, last, scale * key_scale[head])
            seen_from, seen_to = seen_partitions(tasks[task], positions, window)
            if task + 1 < stop:
                _prefetch_queries(q, tasks[task + 1], 4 * group * head_dim)
            states[0, :rows] = _ZERO
            if slot >= 0:
                slot_states[slot : slot + last_partition - first_partition] = _ZERO
            for partition in range(seen_from, seen_to):
                origin = partition * PARTITION
                end = min(own[-1] + 1 - origin, PARTITION)
                _find_bounds(bounds, own, group, origin, end, window)
                count = (end + LANES - 1) // LANES
                place = list_ahead(
                    listed,
                    state,
                    count,
                    cache_keys,
                    cache_values,
                    tasks,
                    stop,
                    positions,
                    block_tables,
                    window,
                )
                groups = listed[:, place:]
                layout = cache_keys.strides[2], cache_keys.strides[2], 0
                if widen_partition(
                    wide_listed,
                    wide_keys,
                    wide_values,
                    cache_keys,
                    cache_values,
                    block_tables[request],
                    head,
                    origin,
                    count,
                ):
                    groups = wide_listed[:, :]
                    layout = 4 * LANES, cache_keys.strides[2], 1
                into = 0 if partition == seen_from else 1
                attend(
                    values[into, :rows],
                    states[into, :rows],
                    queries,
                    scores,
                    weights,
                    bounds,
                    groups,
                    listed[:, place:],
                    layout,
                    end,
                    odd_line,
                )
                if slot >= 0:
                    own_slot = slot + partition - first_partition
                    _copy(slot_states[own_slot], states[into])
                    _copy(slot_values[own_slot], values[into])
                elif into != 0:
                    for row in range(rows):
                        _join(states[0, row], values[0, row], states[1, row], values[1, row])
            if slot < 0:
                row = 0
                for token in range(first, last):
                    for query_head in range(head * group, (head + 1) * group):
                        _finish(
                            out,
                            token,
                            query_head * head_dim,
                            states[0, row],
                            values[0, row],
                            value_scale[head],
                            finished,
                        )
                        row += 1

    run_tasks = njit(nogil=True, error_model="numpy")(set_variant(run_tasks, arithmetic))

    def attention_tasks(
        out,  # [num_heads * head_dim], of `linear_inputs.py`
        q,  # rows f32[num_heads * head_dim]
        cache_keys,
        cache_values,
        key_scale,  # f32[num_kv_heads], 1 for caches of floats
        value_scale,
        positions,  # i32[num_tokens]
        block_tables,  # i32[num_reqs, max_blocks]
        tasks,  # i32[num_tasks, TASK_FIELDS]
        slot_states,  # f32[slots, group, 2]
        slot_values,  # f32[slots, group, width]
        scale,  # of scores, times log2(e)
        window,  # last positions that a query sees, 0: all
        start,
        stop,
    ):
        """Run tasks [start, stop)."""
        head_dim = cache_keys.shape[2] * cache_keys.shape[4]
        group = q.columns // head_dim // cache_keys.shape[1]
        width = cache_values.shape[3]
        capacity = max(TILE_ROWS, group)
        room = (
            np.empty((capacity, head_dim), element),  # queries
            np.empty((MOST_ROWS, PARTITION + LANES), np.float32),  # scores
            np.empty((MOST_ROWS, PARTITION + LANES), element),  # weights
            np.empty((2, capacity, width), np.float32),  # values
            np.empty((2, capacity, 2), np.float32),  # states
            np.empty((capacity, 2), np.int64),  # bounds
            np.empty(1 + width // 2, np.int64),  # odd_line
            np.empty(head_dim, np.float32),  # finished
            key_scratch(cache_keys),
            value_scratch(cache_values),
            np.empty((2, GROUPS), np.int64),  # where these are
            np.empty((2, LIST_LENGTH), np.int64),  # listed groups
            np.array([0, 0, start, 0]),  # state of the list
        )
        run_tasks(
            out,
            q,
            cache_keys,
            cache_values,
            key_scale,
            value_scale,
            positions,
            block_tables,
            tasks,
            slot_states,
            slot_values,
            scale,
            window,
            start,
            stop,
            borrow(room),
        )
        keep(room)

    return Kernel(attention_tasks, variant=arithmetic)


def _make_load_queries(arithmetic: Arithmetic) -> Any:
    """njit code that scales the queries of a task."""
    scale_row = make_scale_row(bfloat16=arithmetic == "bfloat16_dot")

    def load_queries(queries, q, group, head, first, last, factor):
        """queries[row] = the rows of tokens [first, last) and one KV head, times the factor."""
        head_dim = queries.shape[1]
        size = group * head_dim
        num_vectors = size // LANES
        for token in range(last - first):
            source = q.address + (first + token) * q.stride + 4 * head * size
            target = queries.ctypes.data + token * group * queries.strides[0]
            scale_row(target, source, factor, num_vectors)
            for i in range(LANES * num_vectors, size):
                x = row_of(q, first + token)[head * size + i] * factor
                queries[token * group + i // head_dim, i % head_dim] = stored_like(x, queries)

    return njit(nogil=True)(set_variant(load_queries, arithmetic))


@njit(nogil=True)
def _prefetch_queries(q, task, head_bytes):
    """head_bytes are those of a token's query heads of a KV head."""
    address = q.address + task[HEAD] * head_bytes
    for token in range(task[FIRST], task[LAST]):
        prefetch(address + token * q.stride, head_bytes)


@njit(nogil=True)
def _find_bounds(bounds, positions, group, origin, end, window):
    """The keys that each row sees of the first `end` of the partition at `origin`."""
    row = 0
    for token in range(positions.shape[0]):
        high = positions[token] + 1 - origin
        low = min(max(0, high - window), end) if window > 0 else 0
        high = max(0, min(high, end))
        for _ in range(group):
            bounds[row, 0] = low
            bounds[row, 1] = high
            row += 1


@njit(nogil=True)
def _copy(target, source):
    """target = the first rows of source; an assignment of slices takes seconds to compile."""
    for row in range(target.shape[0]):
        for i in range(target.shape[1]):
            target[row, i] = source[row, i]


@njit(nogil=True)
def _join(state, values, more_state, more_values):
    """Add a partition's values f32[width] to those before it."""
    join_row(
        state.ctypes.data,
        values.ctypes.data,
        more_state.ctypes.data,
        more_values.ctypes.data,
        values.shape[0] // LANES,
    )


@njit(nogil=True, error_model="numpy")
def _finish(out, token, first, state, values, value_scale, scratch):
    """A head of `out` = values / the sum of their weights * value_scale; scratch f32[head_dim]."""
    target = piece_of(out, token, first, scratch.shape[0], scratch)
    num_vectors = target.shape[0] // LANES
    finish_row(
        target.ctypes.data, state.ctypes.data, values.ctypes.data, value_scale, num_vectors
    )
    for i in range(LANES * num_vectors, target.shape[0]):
        target[i] = values[i] * (value_scale / state[1])
    store_piece(out, token, first, target)


@kernel
def merge_slots(
    out,  # [num_heads * head_dim], of `linear_inputs.py`
    merges,  # i32[num_merges, MERGE_FIELDS]
    slot_states,
    slot_values,
    value_scale,
    head_dim,
    start,
    stop,
):
    """Join the partitions of split tasks, for merges [start, stop)."""
    group, width = slot_values.shape[1:]
    room = (
        np.empty(width, np.float32),  # values
        np.empty(2, np.float32),  # state
        np.empty(head_dim, np.float32),  # finished
    )
    values, state, finished = borrow(room)
    for merge in range(start, stop):
        row, head, first_slot, num_slots = merges[merge]
        for g in range(group):
            state[:] = _ZERO
            for slot in range(first_slot, first_slot + num_slots):
                _join(state, values, slot_states[slot, g], slot_values[slot, g])
            first = (head * group + g) * head_dim
            _finish(out, row, first, state, values, value_scale[head], finished)
    keep(room)


ATTENTION_KERNELS: dict[Arithmetic, Kernel] = {
    arithmetic: _make_kernel(arithmetic) for arithmetic in get_args(Arithmetic)
}
