"""Rotary position embedding on the way to the KV cache.

In the half-split order of Hugging Face checkpoints (Su et al. 2021).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import row_of
from rawpaged.cpu.kv_elements import stored_scaled, words_of_pairs


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
    block_size, pair = cache_keys.shape[3:]
    rotated = np.empty(size, np.float32)
    stored = np.empty(size, cache_keys.dtype)
    for t in range(start, stop):
        cosines = cos_sin[positions[t], : size // 2]
        sines = cos_sin[positions[t], size // 2 :]
        queries = row_of(q, t)
        for first in range(0, q.columns, size):
            _rotate(queries[first : first + size], cosines, sines)
        if slot_mapping[t] < 0:
            continue
        block = slot_mapping[t] // block_size
        offset = slot_mapping[t] % block_size
        keys, values = row_of(k, t), row_of(v, t)
        for h in range(cache_keys.shape[1]):
            _copy(rotated, keys[h * size : (h + 1) * size])
            _rotate(rotated, cosines, sines)
            _round(stored, rotated, key_scale[h])
            _copy(words_of_pairs(cache_keys[block, h])[:, offset, 0], words_of_pairs(stored))
            _round(stored, values[h * size : (h + 1) * size], value_scale[h])
            _copy(cache_values[block, h, offset // pair, :, offset % pair], stored)


@njit(nogil=True, error_model="numpy")
def _round(stored, x, scale):
    """Elements of a cache, side by side, so that this loop vectorises."""
    for i in range(stored.shape[0]):
        stored[i] = stored_scaled(x[i], scale, stored)


@njit(nogil=True)
def _copy(target, source):
    """target, of any stride and perhaps longer, = source."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@njit(nogil=True)
def _rotate(x, cosines, sines):
    """Turn x f32[head_dim] by the angles, in place: halves that overlap nothing vectorise."""
    half = cosines.shape[0]
    low = x[:half]
    high = x[half:]
    for i in range(half):
        first = low[i]
        second = high[i]
        low[i] = first * cosines[i] - second * sines[i]
        high[i] = second * cosines[i] + first * sines[i]
