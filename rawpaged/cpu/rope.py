"""Rotary position embedding, in the half-split order of Hugging Face checkpoints."""

from __future__ import annotations

from rawpaged.cpu.compiling import kernel


@kernel
def rope_rows(x, positions, cos_sin, start, stop):
    """Rotate x[t, h] by the angles of positions[t], in place, for t in [start, stop).

    x f32[n, heads, head_dim]; cos_sin f32[max_len, head_dim] holds cosines, then sines.
    """
    half = x.shape[2] // 2
    for t in range(start, stop):
        cosines = cos_sin[positions[t], :half]
        sines = cos_sin[positions[t], half:]
        for h in range(x.shape[1]):
            low = x[t, h, :half]
            high = x[t, h, half:]
            for i in range(half):
                first = low[i]
                second = high[i]
                low[i] = first * cosines[i] - second * sines[i]
                high[i] = second * cosines[i] + first * sines[i]
