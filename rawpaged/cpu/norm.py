"""RMSNorm over the last axis, and fused with the residual sum."""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel

_ONE = np.float32(1.0)


@njit(nogil=True, inline="always")
def _inverse_rms(row, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean(row ** 2) + eps), summed in eight chains of fixed order."""
    sums = np.zeros(8, np.float32)
    size = row.shape[0]
    whole = size - size % 8
    for i in range(0, whole, 8):
        for j in range(8):
            sums[j] += row[i + j] * row[i + j]
    for i in range(whole, size):
        sums[i - whole] += row[i] * row[i]
    low = (sums[0] + sums[1]) + (sums[2] + sums[3])
    high = (sums[4] + sums[5]) + (sums[6] + sums[7])
    return _ONE / np.sqrt((low + high) / np.float32(size) + np.float32(eps))


@kernel
def rms_norm_rows(out, x, weight, eps, start, stop):  # type: ignore[no-untyped-def]
    """out[t, h] = x[t, h] / rms * weight for rows t in [start, stop); out may be x."""
    for t in range(start, stop):
        for h in range(x.shape[1]):
            scale = _inverse_rms(x[t, h], eps)
            for i in range(x.shape[2]):
                out[t, h, i] = x[t, h, i] * scale * weight[i]


@kernel
def add_rms_norm_rows(out, x, residual, weight, eps, start, stop):  # type: ignore[no-untyped-def]
    """residual[t] += x[t]; out[t] = residual[t] / rms * weight."""
    for t in range(start, stop):
        for i in range(x.shape[1]):
            residual[t, i] += x[t, i]
        scale = _inverse_rms(residual[t], eps)
        for i in range(x.shape[1]):
            out[t, i] = residual[t, i] * scale * weight[i]
