"""Rotary position embedding on the way to the KV cache.

In the half-split order of Hugging Face checkpoints (Su et al. 2021).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import row_of
from rawpaged.cpu.kv_elements import stored_scaled


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
    for t in range(start, stop):
        cosines = cos_sin[positions[t], : size // 2]
        sines = cos_sin[positions[t], size // 2 :]
        queries = row_of(q, t)
        for first in range(0, q.columns, size):
            _rotate(rotated, queries[first : first + size], cosines, sines)
            queries[first : first + size] = rotated
        if slot_mapping[t] < 0:
            continue
        block = slot_mapping[t] // block_size
        offset = slot_mapping[t] % block_size
        for h in range(cache_keys.shape[1]):
            _rotate(rotated, row_of(k, t)[h * size : (h + 1) * size], cosines, sines)
            keys = cache_keys[block, h, :, offset]
            values = cache_values[block, h, offset // pair, :, offset % pair]
            source = row_of(v, t)[h * size : (h + 1) * size]
            for i in range(size):
                keys[i // pair, i % pair] = stored_scaled(rotated[i], key_scale[h], cache_keys)
                values[i] = stored_scaled(source[i], value_scale[h], cache_values)


@njit(nogil=True)
def _rotate(out, x, cosines, sines):
    """out = x f32[head_dim] turned by the angles; out is not x."""
    half = cosines.shape[0]
    low = x[:half]
    high = x[half:]
    out_low = out[:half]
    out_high = out[half:]
    for i in range(half):
        first = low[i]
        second = high[i]
        out_low[i] = first * cosines[i] - second * sines[i]
        out_high[i] = second * cosines[i] + first * sines[i]
