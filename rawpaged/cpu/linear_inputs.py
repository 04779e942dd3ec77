"""Inputs of linear layers in the form in which weights are multiplied with them.

An op that makes such an input rounds each row while it is in the first-level cache; what it writes
are the bits that the layer's own rounding of float32 would give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from rawpaged.cpu.arguments import RowsOf
from rawpaged.cpu.block_kernel import NUMBERS_BYTES, best_block_arithmetic, code_bytes
from rawpaged.cpu.block_types import BLOCK
from rawpaged.cpu.floats import row_of, stored_like
from rawpaged.cpu.quantized_activations import make_quantize

_ARITHMETIC = best_block_arithmetic()
_STEP = code_bytes(_ARITHMETIC) + NUMBERS_BYTES
_quantize = make_quantize(_ARITHMETIC)


@dataclass(frozen=True, slots=True)
class LinearInput:
    """x [n, in_features] as bfloat16 or as blocks of integers; to ops it is one of float32."""

    data: npt.NDArray[Any]
    """u16[n, in_features, padded to even] or u8[n, bytes of the row's blocks]."""
    in_features: int

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.in_features

    @property
    def strides(self) -> tuple[int, int]:
        """Those of a float32 array of this shape."""
        return 4 * self.in_features, 4

    @property
    def size(self) -> int:
        return len(self.data) * self.in_features

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, rows: slice) -> LinearInput:
        return LinearInput(self.data[rows], self.in_features)


Input = npt.NDArray[np.float32] | LinearInput


def empty_input(rows: int, in_features: int, dtype: npt.DTypeLike) -> Input:
    """Room for x f32[rows, in_features] in the form of uint16, uint8, or as it is."""
    if dtype == np.uint16:
        return LinearInput(np.empty((rows, in_features + in_features % 2), np.uint16), in_features)
    if dtype == np.uint8:
        return LinearInput(np.empty((rows, in_features // BLOCK * _STEP), np.uint8), in_features)
    return np.empty((rows, in_features), np.float32)


def check_form(x: LinearInput, dtype: npt.DTypeLike) -> None:
    """Raise TypeError unless x is in the form that a weight takes."""
    if x.data.dtype != dtype:
        raise TypeError(f"x was made for other weights: {x.data.dtype} where {dtype} is taken")


def target_of(out: Input) -> RowsOf | npt.NDArray[Any]:
    """`out` as an argument of a kernel that uses `floats_of` and `store_floats`."""
    return out.data if isinstance(out, LinearInput) else RowsOf(out)


def words_of(x: Input) -> npt.NDArray[np.float32]:
    """x as words of four bytes, for ops that copy rows."""
    return x.data.view(np.float32) if isinstance(x, LinearInput) else x


def floats_of(out: Any, t: int, scratch: Any) -> Any:
    """Where to write row t of `out` as float32: the row itself, or else scratch."""
    raise TypeError("floats_of is for compiled code")


@overload(floats_of, inline="always")
def _floats_of(out, t, scratch):
    if isinstance(out, types.Array):
        return lambda out, t, scratch: scratch
    return lambda out, t, scratch: row_of(out, t)


def store_floats(out: Any, t: int, floats: Any) -> None:
    """Row t of `out` = what was written to `floats_of(out, t, ...)`."""
    raise TypeError("store_floats is for compiled code")


@overload(store_floats)
def _store_floats(out, t, floats):
    if not isinstance(out, types.Array):
        return lambda out, t, floats: None
    if out.dtype == types.uint16:

        def store_bfloat16(out, t, floats):
            target = out[t]
            target[-1] = 0
            for i in range(floats.shape[0]):
                target[i] = stored_like(floats[i], out)

        return store_bfloat16

    def store_blocks(out, t, floats):
        _quantize(floats.ctypes.data, out[t].ctypes.data, floats.shape[0] // BLOCK)

    return store_blocks
