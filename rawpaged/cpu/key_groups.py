"""Where the keys and values of one KV head lie: lists of groups of 16 positions, for njit code.

A list has the addresses of `count` groups, then those of some that come next, for prefetching.
Caches of bytes are widened to bfloat16, which holds every e4m3 and int8 exactly; their lists lead
to scratch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from rawpaged.cpu.attention_kernels import AHEAD
from rawpaged.cpu.attention_work import PARTITION
from rawpaged.cpu.kv_elements import from_e4m3
from rawpaged.cpu.vector_ir import LANES

LIST_LENGTH = PARTITION // LANES + 2 * AHEAD
"""Addresses in a list."""
_WORD_BYTES = 4
_HALF = np.uint32(16)


def _is_bytes(cache: Any) -> bool:
    return cache.dtype in (types.uint8, types.int8)


def key_line_bytes(cache_keys: Any) -> Any:
    """Bytes from one d, or pair of d, of a group of keys to the next."""
    raise TypeError("for compiled code")


@overload(key_line_bytes)
def _key_line_bytes(cache_keys):
    if _is_bytes(cache_keys):
        return lambda cache_keys: _WORD_BYTES * LANES
    return lambda cache_keys: _WORD_BYTES * cache_keys.shape[3]


def key_scratch(cache_keys: Any) -> Any:
    """Room for the keys of a partition, if they have to be widened."""
    raise TypeError("for compiled code")


@overload(key_scratch)
def _key_scratch(cache_keys):
    if _is_bytes(cache_keys):
        return lambda cache_keys: np.empty(
            (PARTITION // LANES, cache_keys.shape[2], LANES, 2), np.uint16
        )
    return lambda cache_keys: np.empty((0, 0, 0, 0), np.uint16)


def value_scratch(cache_values: Any) -> Any:
    """Room for the values of a partition if they have to be widened, else of its last group."""
    raise TypeError("for compiled code")


@overload(value_scratch)
def _value_scratch(cache_values):
    groups = PARTITION // LANES if _is_bytes(cache_values) else 1
    element = np.float32 if cache_values.dtype == types.float32 else np.uint16

    def scratch(cache_values):
        in_word = cache_values.shape[4]
        return np.empty((groups, LANES // in_word, cache_values.shape[3], in_word), element)

    return scratch


def list_groups(
    keys: Any, values: Any, cache_keys: Any, cache_values: Any, table: Any, head: Any, first: Any,
    end: Any, wide_keys: Any, wide_values: Any,
) -> None:  # fmt: skip
    """List the groups of keys and of values of the partition that begins at position `first`.

    There are none from position `end` on; what lies past it in the last group of values is zeros.
    After the keys, filled up to a multiple of AHEAD by repetition, come the first values; after
    the values the first keys of the next partition.
    """
    raise TypeError("for compiled code")


@overload(list_groups)
def _list_groups(
    keys, values, cache_keys, cache_values, table, head, first, end, wide_keys, wide_values
):
    return _list_widened if _is_bytes(cache_keys) else _list_in_place


def _list_in_place(
    keys, values, cache_keys, cache_values, table, head, first, end, wide_keys, wide_values
):
    in_word = cache_values.shape[4]
    block_size = cache_keys.shape[3]
    count = _count_groups(first, end)
    padded = (count + AHEAD - 1) // AHEAD * AHEAD
    key_step = _WORD_BYTES * LANES
    value_step = LANES // in_word * cache_values.strides[2]
    key_base = cache_keys.ctypes.data + head * cache_keys.strides[1]
    value_base = cache_values.ctypes.data + head * cache_values.strides[1]
    index = first // block_size
    place = first % block_size // LANES
    last_group = (end - 1 - first) // LANES
    for j in range(count + AHEAD):
        if j <= last_group:
            key = key_base + table[index] * cache_keys.strides[0] + place * key_step
            value = value_base + table[index] * cache_values.strides[0] + place * value_step
            place += 1
            if place * LANES == block_size:
                place = 0
                index += 1
        if j < count:
            keys[j] = key
            values[j] = value
        else:
            values[j] = key
    for j in range(count, padded):
        keys[j] = keys[count - 1]
    if count - 1 == last_group and (end - first) % LANES != 0:
        block = cache_values[table[(end - 1) // block_size], head]
        line = (end - 1) % block_size // LANES * LANES // in_word
        wide_values[0] = block[line : line + LANES // in_word]
        _clear_after(wide_values[0], (end - first) % LANES)
        values[count - 1] = wide_values.ctypes.data
    for j in range(AHEAD):
        keys[padded + j] = values[min(j, count - 1)]


def _list_widened(
    keys, values, cache_keys, cache_values, table, head, first, end, wide_keys, wide_values
):
    block_size = cache_keys.shape[3]
    count = _count_groups(first, end)
    for j in range(LIST_LENGTH):
        keys[j] = wide_keys[min(j, count - 1)].ctypes.data
        values[j] = wide_values[min(j, count - 1)].ctypes.data
    for j in range(count):
        position = first + LANES * j
        block = table[position // block_size]
        place = position % block_size
        for line in range(wide_keys.shape[1]):
            _widen_pairs(
                wide_keys[j, line], cache_keys[block, head, line, place : place + LANES]
            )
        for line in range(wide_values.shape[1]):
            _widen_pairs(wide_values[j, line], cache_values[block, head, place // 2 + line])
        if end - position < LANES:
            _clear_after(wide_values[j], end - position)


@njit(nogil=True)
def _count_groups(first, end):
    """Groups of a partition of which there are keys before `end`."""
    return (min(end - first, PARTITION) + LANES - 1) // LANES


@njit(nogil=True)
def _clear_after(group, count):
    """Zero the values of a group [lines, columns, values in a word] from place `count` on."""
    in_word = group.shape[2]
    for place in range(count, LANES):
        group[place // in_word, :, place % in_word] = 0


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
