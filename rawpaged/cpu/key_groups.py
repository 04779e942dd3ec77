"""Where the keys and values of one KV head lie: lists of groups of 16 positions, for njit code.

Tasks list the addresses of groups in the order of use, AHEAD of them before their time, through
partitions and tasks. Caches of bytes are widened to bfloat16, which holds every e4m3 and int8
exactly, into scratch, a partition at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from rawpaged.cpu.attention_kernels import AHEAD
from rawpaged.cpu.attention_work import (
    FIRST,
    FIRST_PARTITION,
    HEAD,
    LAST,
    LAST_PARTITION,
    PARTITION,
    REQUEST,
)
from rawpaged.cpu.kv_elements import from_e4m3
from rawpaged.cpu.vector_ir import LANES

GROUPS = PARTITION // LANES
"""Groups of a partition."""
LIST_LENGTH = 16 * (GROUPS + AHEAD)
"""Addresses in a list: many times what is in use at once, so that it is seldom moved."""
PLACE, FILLED, TASK, NEXT_PARTITION = range(4)
"""What is known of a list: the places that are used up and those that are filled; the next task
to list and its first partition that is not listed."""

_WORD_BYTES = 4
_HALF = np.uint32(16)


@njit(nogil=True)
def seen_partitions(task, positions, window):
    """First and last + 1 of a task's partitions of which one of its rows sees a key.

    A row sees the last `window` keys to its own, all of them if that is 0; positions grow by 1.
    """
    first = np.int64(task[FIRST_PARTITION])
    if window > 0:
        first = max(first, max(0, positions[task[FIRST]] + 1 - window) // PARTITION)
    return first, np.int64(task[LAST_PARTITION])


@njit(nogil=True)
def list_ahead(
    listed, state, count, cache_keys, cache_values, tasks, stop, positions, block_tables, window
):
    """The place in listed i64[2, LIST_LENGTH] where the next `count` groups of keys and of values
    begin. AHEAD more are there: those of what comes next of tasks up to `stop`, then any.
    """
    place = state[PLACE]
    if place + count + AHEAD + GROUPS > LIST_LENGTH:
        _move_to_begin(listed, place, state[FILLED])
        state[FILLED] -= place
        place = 0
    while state[FILLED] < place + count + AHEAD:
        if state[TASK] < stop:
            _list_partition(
                listed, state, cache_keys, cache_values, tasks, positions, block_tables, window
            )
        else:
            for kind in range(2):
                listed[kind, state[FILLED]] = listed[kind, state[FILLED] - 1]
            state[FILLED] += 1
    state[PLACE] = place + count
    return place


@njit(nogil=True)
def _move_to_begin(listed, place, filled):
    for kind in range(2):
        for i in range(filled - place):
            listed[kind, i] = listed[kind, place + i]


@njit(nogil=True)
def _list_partition(
    listed, state, cache_keys, cache_values, tasks, positions, block_tables, window
):
    """List the next partition; or find that the task has no more."""
    task = tasks[state[TASK]]
    first, stop = seen_partitions(task, positions, window)
    partition = max(first, state[NEXT_PARTITION])
    if partition >= stop:
        state[TASK] += 1
        state[NEXT_PARTITION] = 0
        return
    state[NEXT_PARTITION] = partition + 1
    origin = partition * PARTITION
    count = count_groups(origin, positions[task[LAST] - 1] + 1)
    table = block_tables[task[REQUEST]]
    places = cache_keys.shape[3] // LANES
    key_step = LANES * cache_keys.strides[3]
    value_step = LANES // cache_values.shape[4] * cache_values.strides[2]
    key_base = cache_keys.ctypes.data + task[HEAD] * cache_keys.strides[1]
    value_base = cache_values.ctypes.data + task[HEAD] * cache_values.strides[1]
    index = origin // LANES // places
    place = origin // LANES % places
    filled = state[FILLED]
    for j in range(filled, filled + count):
        block = np.int64(table[index])
        listed[0, j] = key_base + block * cache_keys.strides[0] + place * key_step
        listed[1, j] = value_base + block * cache_values.strides[0] + place * value_step
        place += 1
        if place == places:
            place = 0
            index += 1
    state[FILLED] = filled + count


@njit(nogil=True)
def count_groups(origin, end):
    """Groups of the partition at `origin` of which there are keys before `end`."""
    return (min(end - origin, PARTITION) + LANES - 1) // LANES


def _is_bytes(cache: Any) -> bool:
    return cache.dtype in (types.uint8, types.int8)


def key_scratch(cache_keys: Any) -> Any:
    """Room for the keys of a partition, if they have to be widened."""
    raise TypeError("for compiled code")


@overload(key_scratch)
def _key_scratch(cache_keys):
    if _is_bytes(cache_keys):
        return lambda cache_keys: np.empty((GROUPS, cache_keys.shape[2], LANES, 2), np.uint16)
    return lambda cache_keys: np.empty((0, 1, 1, 1), np.uint16)


def value_scratch(cache_values: Any) -> Any:
    """Room for the values of a partition, if they have to be widened."""
    raise TypeError("for compiled code")


@overload(value_scratch)
def _value_scratch(cache_values):
    if _is_bytes(cache_values):
        return lambda cache_values: np.empty(
            (GROUPS, LANES // 2, cache_values.shape[3], 2), np.uint16
        )
    return lambda cache_values: np.empty((0, 1, 1, 1), np.uint16)


def widen_partition(
    listed: Any, wide_keys: Any, wide_values: Any, cache_keys: Any, cache_values: Any, table: Any,
    head: Any, origin: Any, count: Any,
) -> bool:  # fmt: skip
    """Widen the `count` groups of the partition at position `origin`, if the cache needs it.

    Then listed i64[2, GROUPS] has their addresses in scratch.
    """
    raise TypeError("for compiled code")


@overload(widen_partition)
def _widen_partition(
    listed, wide_keys, wide_values, cache_keys, cache_values, table, head, origin, count
):
    if not _is_bytes(cache_keys):

        def leave(
            listed, wide_keys, wide_values, cache_keys, cache_values, table, head, origin, count
        ):
            return False

        return leave

    def widen(listed, wide_keys, wide_values, cache_keys, cache_values, table, head, origin, count):
        block_size = cache_keys.shape[3]
        for j in range(count):
            listed[0, j] = wide_keys[j].ctypes.data
            listed[1, j] = wide_values[j].ctypes.data
            position = origin + LANES * j
            block = table[position // block_size]
            place = position % block_size
            for line in range(wide_keys.shape[1]):
                _widen_pairs(
                    wide_keys[j, line], cache_keys[block, head, line, place : place + LANES]
                )
            for line in range(wide_values.shape[1]):
                _widen_pairs(wide_values[j, line], cache_values[block, head, place // 2 + line])
        return True

    return widen


def _widen_pairs(target: Any, source: Any) -> None:
    """target u16[n, 2] = source u8 or i8[n, 2] as bfloat16."""
    raise TypeError("for compiled code")


@overload(_widen_pairs)
def _widen_pairs_of(target, source):
    is_e4m3 = source.dtype == types.uint8

    def widen(target, source):
        for i in range(source.shape[0]):
            for j in range(2):
                value = from_e4m3(source[i, j]) if is_e4m3 else np.float32(source[i, j])
                target[i, j] = np.uint16(np.float32(value).view(np.uint32) >> _HALF)

    return widen
