"""Helpers for njit code that LLVM turns into vector code: bfloat16, powers of two, sums.

Loops vectorise only where every index is plainly a loop variable from 0: `row[low:high]` and then
`part[i]`, never `row[low + i]`, whose sign Numba would have to look at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, overload

from rawpaged.cpu.vector_ir import LANES, POWER_OF_TWO, V16F, VectorBuilder

_ONE = np.float32(1.0)
_P0, _P1, _P2, _P3, _P4 = (np.float32(coefficient) for coefficient in POWER_OF_TWO[:-1])


@njit(nogil=True, inline="always")
def power_of_two(x):
    """2**x for float32 x <= 126, within 3 ulp above -126; about 1e-38 below."""
    x = max(x, np.float32(-126.0))
    n = np.rint(x)
    r = x - n
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _ONE
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return p * power.view(np.float32)


@njit(nogil=True)
def sum_of_squares(row):
    """Sum of the squares of a float32 row: of whole vectors in sixteen chains, then of the rest."""
    vectors = row.shape[0] // LANES
    total = _sum_of_squares(row.ctypes.data, vectors) if vectors else np.float32(0)
    rest = row[LANES * vectors :]
    for i in range(rest.shape[0]):
        total += rest[i] * rest[i]
    return total


@intrinsic
def _sum_of_squares(typingctx: Any, address: Any, vectors: Any) -> Any:
    """Of one or more vectors; the chains are added up as a balanced tree."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=False)
        first, count = args

        def add(index: Any, sums: list[Any]) -> list[Any]:
            x = build.load(build.at(first, index, 4 * LANES), V16F, align=4)
            return [build.multiply_add(x, x, sums[0])]

        (sums,) = build.loop(count, [build.zeros()], add)
        return build.fold(sums, lambda builder, a, b: builder.fadd(a, b))

    return types.float32(types.intp, types.intp), generate


def stored_like(x: Any, array: Any) -> Any:
    """float32 x as an element of `array`: itself, or bfloat16 rounded to nearest even."""
    raise TypeError("stored_like is for compiled code")


@overload(stored_like, inline="always")
def _stored_like(x, array):
    if array.dtype == types.uint16:

        def to_bfloat16(x, array):
            bits = np.float32(x).view(np.uint32)
            if x != x:
                return np.uint16(0x7FC0)
            round_up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            return np.uint16((bits + round_up) >> np.uint32(16))

        return to_bfloat16
    return lambda x, array: x


@intrinsic
def _as_float32_pointer(typingctx: Any, address: Any) -> Any:
    """The address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    pointer: Any = types.CPointer(types.float32)  # type: ignore[no-untyped-call]
    return pointer(types.intp), generate


@njit(nogil=True)
def row_of(rows, index):
    """Row `index` of float32 Rows as an array that loops over it vectorise on."""
    return carray(_as_float32_pointer(rows.address + index * rows.stride), (rows.columns,))
