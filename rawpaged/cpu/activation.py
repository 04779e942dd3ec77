"""SiLU of the gate times up."""

from __future__ import annotations

import numpy as np

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import exp, row_of
from rawpaged.cpu.linear_inputs import floats_of, store_floats

_ONE = np.float32(1.0)
_MOST = np.float32(80.0)


@kernel
def silu_and_mul_rows(out, gate_up, start, stop):
    """out[t] = gate / (1 + exp(-gate)) * up, with gate_up[t] = [gate | up]."""
    size = gate_up.columns // 2
    scratch = np.empty(size, np.float32)
    for t in range(start, stop):
        gate = row_of(gate_up, t)[:size]
        up = row_of(gate_up, t)[size:]
        target = floats_of(out, t, scratch)
        for i in range(size):
            target[i] = gate[i] / (_ONE + exp(min(-gate[i], _MOST))) * up[i]
        store_floats(out, t, target)
