"""Rotary position embedding on the way to the KV cache.

In the half-split order of Hugging Face checkpoints (Su et al. 2021).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.kv_elements import stored_scaled


@kernel
def rope_and_store_rows(
    cache_keys,
    cache_values,
    q,  # f32[n, num_heads, head_dim], rotated in place
    k,  # f32[n, num_kv_heads, head_dim]
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
    half = q.shape[2] // 2
    block_size = cache_keys.shape[3]
    rotated = np.empty(q.shape[2], np.float32)
    for t in range(start, stop):
        cosines = cos_sin[positions[t], :half]
        sines = cos_sin[positions[t], half:]
        for h in range(q.shape[1]):
            _rotate(rotated, q[t, h], cosines, sines)
            q[t, h] = rotated
        if slot_mapping[t] < 0:
            continue
        block = slot_mapping[t] // block_size
        offset = slot_mapping[t] % block_size
        for h in range(k.shape[1]):
            _rotate(rotated, k[t, h], cosines, sines)
            keys = cache_keys[block, h, :, offset]
            values = cache_values[block, h, offset]
            source = v[t, h]
            for i in range(rotated.shape[0]):
                keys[i] = stored_scaled(rotated[i], key_scale[h], cache_keys)
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
