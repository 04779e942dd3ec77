"""Rows by index."""

from __future__ import annotations

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import row_of


@kernel
def gather_row_indices(out, x, rows, start, stop):
    """out[i] = x[rows[i]] for i in [start, stop)."""
    for i in range(start, stop):
        source = row_of(x, rows[i])
        target = row_of(out, i)
        for j in range(target.shape[0]):
            target[j] = source[j]
