"""SiLU of the gate times up."""

from __future__ import annotations

import numpy as np

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import power_of_two, row_of
from rawpaged.cpu.linear_inputs import floats_of, store_floats

_ONE = np.float32(1.0)
_MINUS_LOG2_E = np.float32(-1.44269504)
_MOST = np.float32(126.0)


@kernel
def silu_and_mul_rows(out, gate_up, start, stop):
    """out[t] = gate / (1 + exp(-gate)) * up, with gate_up[t] = [gate | up].

    The error of an exponential grows with its argument: of SiLU at most 3e-7 of it for a gate of -3
    and above, 7e-7 at -10, 2e-6 at -40.
    """
    size = gate_up.columns // 2
    scratch = np.empty(size, np.float32)
    for t in range(start, stop):
        gate = row_of(gate_up, t)[:size]
        up = row_of(gate_up, t)[size:]
        target = floats_of(out, t, scratch)
        for i in range(size):
            power = power_of_two(min(gate[i] * _MINUS_LOG2_E, _MOST))
            target[i] = gate[i] / (_ONE + power) * up[i]
        store_floats(out, t, target)
