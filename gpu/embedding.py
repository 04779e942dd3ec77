"""Rows of the embedding table as the residual stream; the twin of rawpaged/cpu/linear.py's."""

from __future__ import annotations

from typing import Any

from rawpaged.gpu import grids
from rawpaged.gpu.arrays import array_info, check
from rawpaged.gpu.device import Device
from rawpaged.gpu.numba_kernels import LABELS, make_embed


class Embedding:
    """Looks token ids up in tables of bfloat16 or float16."""

    def __init__(self, device: Device) -> None:
        self._kernels = {dtype: device.jit(make_embed(dtype)) for dtype in LABELS}

    def __call__(self, out: Any, token_ids: Any, table: Any) -> None:
        """out f32[n, hidden] = table T[vocab, hidden or more][token_ids i32[n]].

        Columns that out has not, a weight's padding, are left out. Ids have to be in the table.
        """
        to, ids, source = array_info(out), array_info(token_ids), array_info(table)
        check(
            (to.dtype, ids.dtype) == ("float32", "int32")
            and source.dtype in self._kernels
            and len(to.shape) == len(source.shape) == 2
            and ids.shape == to.shape[:1]
            and to.shape[1] <= source.shape[1],
            out=out,
            token_ids=token_ids,
            table=table,
        )
        if 0 not in to.shape:
            grid, block = grids.rows(*to.shape)
            self._kernels[source.dtype](grid, block, (out, token_ids, table))
