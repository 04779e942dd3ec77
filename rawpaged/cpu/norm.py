"""RMSNorm over the last axis, and fused with the residual sum."""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import row_of, sum_of_squares
from rawpaged.cpu.linear_inputs import floats_of, store_floats

_ONE = np.float32(1.0)


@njit(nogil=True, error_model="numpy")
def _normalise(out, x, weight, eps):
    """out = x / sqrt(mean(x ** 2) + eps) * weight; out may be x."""
    mean = sum_of_squares(x) / np.float32(x.shape[0])
    scale = _ONE / np.sqrt(mean + np.float32(eps))
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@kernel
def rms_norm_rows(out, x, weight, eps, start, stop):
    """Each head of rows [start, stop), as long as weight, normalised; out may be x."""
    size = weight.shape[0]
    scratch = np.empty(x.columns, np.float32)
    for t in range(start, stop):
        source = row_of(x, t)
        target = floats_of(out, t, scratch)
        for first in range(0, x.columns, size):
            _normalise(target[first : first + size], source[first : first + size], weight, eps)
        store_floats(out, t, target)


@kernel
def add_rms_norm_rows(out, x, residual, weight, eps, start, stop):
    """residual[t] += x[t]; out[t] = residual[t] / rms * weight."""
    scratch = np.empty(x.columns, np.float32)
    for t in range(start, stop):
        total = row_of(residual, t)
        delta = row_of(x, t)
        for i in range(total.shape[0]):
            total[i] += delta[i]
        target = floats_of(out, t, scratch)
        _normalise(target, total, weight, eps)
        store_floats(out, t, target)
