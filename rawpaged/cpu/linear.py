"""Linear layers and the embedding: weights as panels of 32 columns, `[panel][k][32]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import as_float32
from rawpaged.cpu.tiles import PANEL, accumulate


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """W [out_features, in_features]; W[p * 32 + j, k] is panels[p, k, j], zeros past the end."""

    panels: npt.NDArray[Any]  # f32 or bfloat16 as u16 [num_panels, in_features, 32]
    bias: npt.NDArray[np.float32]  # f32[num_panels * 32], zeros where there is none
    out_features: int

    @property
    def in_features(self) -> int:
        return int(self.panels.shape[1])

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + self.bias.nbytes


def pack_linear(
    weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None, dtype: str
) -> PackedLinear:
    """Copy weight into panels of `dtype`; bfloat16 is rounded to nearest even."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    packed_bias = np.zeros(num_panels * PANEL, np.float32)
    if bias is not None:
        packed_bias[:out_features] = bias
    to = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    panels = np.empty((num_panels, in_features, PANEL), to)
    whole = out_features // PANEL
    panels[:whole] = (
        weight[: whole * PANEL].reshape(whole, PANEL, in_features).transpose(0, 2, 1)
    )
    if whole < num_panels:
        panels[whole] = 0
        panels[whole, :, : out_features - whole * PANEL] = weight[whole * PANEL :].T
    if dtype == "bfloat16":
        panels = panels.view(np.uint16)
    return PackedLinear(panels, packed_bias, out_features)


@kernel
def linear_panels(out, x, panels, bias, start, stop):
    """out[:, 32 * start : 32 * stop] = x @ W.T + bias for panels [start, stop)."""
    rows, k = x.shape
    columns = out.shape[1]
    for panel in range(start, stop):
        first = panel * PANEL
        whole = first + PANEL <= columns
        tile = out[:, first : first + PANEL] if whole else np.empty((rows, PANEL), np.float32)
        for row in range(rows):
            for j in range(PANEL):
                tile[row, j] = bias[first + j]
        accumulate(
            panels,
            x.ctypes.data,
            x.strides[0],
            rows,
            panels[panel].ctypes.data,
            panels.strides[1],
            tile.ctypes.data,
            tile.strides[0],
            PANEL,
            k,
        )
        if not whole:
            out[:, first:] = tile[:, : columns - first]


@kernel
def embed_rows(out, token_ids, panels, start, stop):
    """out[t] = row token_ids[t] of the table, for t in [start, stop)."""
    for t in range(start, stop):
        panel = token_ids[t] // PANEL
        column = token_ids[t] % PANEL
        for k in range(out.shape[1]):
            out[t, k] = as_float32(panels[panel, k, column])
