"""Rotary position embedding, in the half-split order of Hugging Face checkpoints."""

from __future__ import annotations

from rawpaged.cpu.compiling import kernel


@kernel
def rope_rows(x, positions, cos_sin, start, stop):  # type: ignore[no-untyped-def]
    """Rotate x[t, h] by the angles of positions[t], in place, for t in [start, stop).

    x f32[n, heads, head_dim]; cos_sin f32[max_len, head_dim] holds cosines, then sines.
    """
    half = x.shape[2] // 2
    for t in range(start, stop):
        angles = cos_sin[positions[t]]
        for h in range(x.shape[1]):
            for i in range(half):
                first = x[t, h, i]
                second = x[t, h, half + i]
                x[t, h, i] = first * angles[i] - second * angles[half + i]
                x[t, h, half + i] = second * angles[i] + first * angles[half + i]
