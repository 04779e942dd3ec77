"""SiLU of the gate times up."""

from __future__ import annotations

import numpy as np

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import exp, row_of

_ONE = np.float32(1.0)
_MOST = np.float32(80.0)


@kernel
def silu_and_mul_rows(out, gate_up, start, stop):
    """out[t] = gate / (1 + exp(-gate)) * up, with gate_up[t] = [gate | up]."""
    size = out.columns
    for t in range(start, stop):
        gate = row_of(gate_up, t)[:size]
        up = row_of(gate_up, t)[size:]
        target = row_of(out, t)
        for i in range(size):
            target[i] = gate[i] / (_ONE + exp(min(-gate[i], _MOST))) * up[i]
