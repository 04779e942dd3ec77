"""SiLU of the gate times up; the twin of rawpaged/cpu/activation.py."""

from __future__ import annotations

from typing import Any

from rawpaged.gpu import grids
from rawpaged.gpu.arrays import array_info, check
from rawpaged.gpu.device import Device
from rawpaged.gpu.numba_kernels import LABELS, make_silu_and_mul


class SiluAndMul:
    """The activation of gated feed-forward layers, over bfloat16 or float16."""

    def __init__(self, device: Device) -> None:
        self._kernels = {dtype: device.jit(make_silu_and_mul(dtype)) for dtype in LABELS}

    def __call__(self, out: Any, gate_up: Any) -> None:
        """out T[n, d] = silu(gate) * up, with gate_up T[n, 2 * d] = [gate | up]."""
        to, source = array_info(out), array_info(gate_up)
        check(
            to.dtype == source.dtype
            and to.dtype in self._kernels
            and len(to.shape) == 2
            and source.shape == (to.shape[0], 2 * to.shape[1]),
            out=out,
            gate_up=gate_up,
        )
        if 0 not in to.shape:
            grid, block = grids.rows(*to.shape)
            self._kernels[to.dtype](grid, block, (out, gate_up))
