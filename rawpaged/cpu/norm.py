"""RMSNorm over the last axis, and fused with the residual sum."""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import sum_of_squares

_ONE = np.float32(1.0)


@njit(nogil=True)
def _inverse_rms(row, eps):
    """1 / sqrt(mean(row ** 2) + eps)."""
    mean = sum_of_squares(row) / np.float32(row.shape[0])
    return _ONE / np.sqrt(mean + np.float32(eps))


@kernel
def rms_norm_rows(out, x, weight, eps, start, stop):
    """out[t, h] = x[t, h] / rms * weight for rows t in [start, stop); out may be x."""
    for t in range(start, stop):
        for h in range(x.shape[1]):
            row = x[t, h]
            target = out[t, h]
            scale = _inverse_rms(row, eps)
            for i in range(row.shape[0]):
                target[i] = row[i] * scale * weight[i]


@kernel
def add_rms_norm_rows(out, x, residual, weight, eps, start, stop):
    """residual[t] += x[t]; out[t] = residual[t] / rms * weight."""
    for t in range(start, stop):
        total = residual[t]
        delta = x[t]
        target = out[t]
        for i in range(total.shape[0]):
            total[i] += delta[i]
        scale = _inverse_rms(total, eps)
        for i in range(total.shape[0]):
            target[i] = total[i] * scale * weight[i]
