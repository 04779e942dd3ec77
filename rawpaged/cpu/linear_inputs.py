"""Inputs of linear layers in the form in which weights are multiplied with them.

An op that makes such an input rounds each row while it is in the first-level cache; what it writes
are the bits that the layer's own rounding of float32 would give.
"""

from __future__ import annotations

import math
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
    """x [n, *row_shape] as bfloat16 or as blocks of integers; to ops it is one of float32."""

    data: npt.NDArray[Any]
    """u16[n, in_features, padded to even] or u8[n, bytes of the row's blocks]."""
    row_shape: tuple[int, ...]

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.data), *self.row_shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Those of a float32 array of this shape."""
        sizes = [math.prod(self.row_shape[axis:]) for axis in range(len(self.row_shape))]
        return *(4 * size for size in sizes), 4

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, rows: slice) -> LinearInput:
        return LinearInput(self.data[rows], self.row_shape)

    def reshape(self, shape: tuple[int, ...]) -> LinearInput:
        """The same rows, whose elements are counted in another way."""
        if shape[0] != len(self) or math.prod(shape) != self.size:
            raise ValueError(f"rows of {self.shape} cannot be reshaped to {shape}")
        return LinearInput(self.data, shape[1:])


Input = npt.NDArray[np.float32] | LinearInput


def empty_input(rows: int, in_features: int, dtype: npt.DTypeLike) -> Input:
    """Room for x f32[rows, in_features] in the form of uint16, uint8, or as it is."""
    if dtype == np.uint16:
        padded = in_features + in_features % 2
        return LinearInput(np.empty((rows, padded), np.uint16), (in_features,))
    if dtype == np.uint8:
        row_bytes = in_features // BLOCK * _STEP
        return LinearInput(np.empty((rows, row_bytes), np.uint8), (in_features,))
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


def piece_of(out: Any, t: int, first: int, size: int, scratch: Any) -> Any:
    """Where to write `size` columns of row t from `first` on as float32: there, or in scratch."""
    raise TypeError("piece_of is for compiled code")


@overload(piece_of, inline="always")
def _piece_of(out, t, first, size, scratch):
    if isinstance(out, types.Array):
        return lambda out, t, first, size, scratch: scratch[:size]
    return lambda out, t, first, size, scratch: row_of(out, t)[first : first + size]


def store_piece(out: Any, t: int, first: int, floats: Any) -> None:
    """Columns of row t of `out` from `first` on = what was written to `piece_of`.

    Pieces are whole blocks, or whole pairs of bfloat16.
    """
    raise TypeError("store_piece is for compiled code")


@overload(store_piece)
def _store_piece(out, t, first, floats):
    if not isinstance(out, types.Array):
        return lambda out, t, first, floats: None
    if out.dtype == types.uint16:

        def store_bfloat16(out, t, first, floats):
            target = out[t, first : first + floats.shape[0]]
            for i in range(floats.shape[0]):
                target[i] = stored_like(floats[i], out)

        return store_bfloat16

    def store_blocks(out, t, first, floats):
        target = out[t].ctypes.data + first // BLOCK * _STEP
        _quantize(floats.ctypes.data, target, floats.shape[0] // BLOCK)

    return store_blocks
