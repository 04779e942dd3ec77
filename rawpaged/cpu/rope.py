"""Rotary position embedding on the way to the KV cache.

In the half-split order of Hugging Face checkpoints (Su et al. 2021).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import row_of
from rawpaged.cpu.kv_elements import stored_scaled
from rawpaged.cpu.rope_kernels import rotate, scatter_words, store_halves
from rawpaged.cpu.scratch import borrow, keep
from rawpaged.cpu.vector_ir import LANES


@kernel
def rope_and_store_rows(
    cache_keys,
    cache_values,
    q,  # rows f32[num_heads * head_dim], rotated in place
    k,  # rows f32[num_kv_heads * head_dim]
    v,
    positions,
    cos_sin,  # f32[max_len, head_dim], cosines, then sines
    slot_mapping,
    key_scale,  # f32[num_kv_heads], read for caches of bytes
    value_scale,
    start,
    stop,
):
    """Rotate q, and write rotated k and v to their slots, for rows [start, stop).

    Rows of a negative slot are not written.
    """
    size = cos_sin.shape[1]
    room = (
        np.empty(size, np.float32),  # rotated
        np.empty((size + LANES - 1) // LANES * LANES, cache_keys.dtype),  # stored
    )
    rotated, stored = borrow(room)
    block_size = cache_keys.shape[3]
    for t in range(start, stop):
        angles = cos_sin.ctypes.data + positions[t] * cos_sin.strides[0]
        for first in range(0, q.columns, size):
            head = q.address + t * q.stride + 4 * first
            rotate(head, head, angles, angles + 2 * size, size // 2)
        if slot_mapping[t] < 0:
            continue
        block = slot_mapping[t] // block_size
        offset = slot_mapping[t] % block_size
        values = row_of(v, t)
        for h in range(cache_keys.shape[1]):
            head = k.address + t * k.stride + 4 * h * size
            rotate(rotated.ctypes.data, head, angles, angles + 2 * size, size // 2)
            _round(stored, rotated, key_scale[h])
            _store_key(cache_keys, block, h, offset, stored)
            _round(stored, values[h * size : (h + 1) * size], value_scale[h])
            _store_value(cache_values, block, h, offset, stored, size)
    keep(room)


@njit(nogil=True, error_model="numpy")
def _round(stored, x, scale):
    """Elements of a cache, side by side, so that this loop vectorises."""
    for i in range(x.shape[0]):
        stored[i] = stored_scaled(x[i], scale, stored)


@njit(nogil=True)
def _store_key(cache_keys, block, head, offset, stored):
    """A key of `head_dim` elements to one slot."""
    base = cache_keys.ctypes.data + block * cache_keys.strides[0] + head * cache_keys.strides[1]
    scatter_words(
        base + offset * cache_keys.strides[3],
        cache_keys.strides[2],
        stored.ctypes.data,
        cache_keys.shape[2],
        cache_keys.strides[3],
    )


@njit(nogil=True)
def _store_value(cache_values, block, head, offset, stored, size):
    """A value of `size` elements to one slot; what pads it is not touched."""
    pair = cache_values.shape[4]
    line = cache_values[block, head, offset // pair]
    num_vectors = 0
    if stored.itemsize == 2:
        num_vectors = size // LANES
        if num_vectors > 0:
            store_halves(line.ctypes.data, stored.ctypes.data, num_vectors, offset % pair)
    for i in range(LANES * num_vectors, size):
        line[i, offset % pair] = stored[i]
