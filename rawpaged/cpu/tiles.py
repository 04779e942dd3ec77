"""`accumulate`: c += a @ b for any number of rows and columns, put together from tile kernels.

Arguments are addresses and byte strides, so that one compiled function serves weight panels,
blocks of keys and blocks of values. For njit code that owns the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.extending import overload

from rawpaged.cpu.microkernel import make_tile_kernel, most_tile_rows
from rawpaged.cpu.vector_ir import LANES

PANEL = 2 * LANES
"""Columns of the widest tile."""

_MOST_ROWS = most_tile_rows()


def _make_strip(vectors: int, *, bfloat16: bool) -> Callable[..., None]:
    """All rows of c in one strip of 16 * vectors columns, by the largest tiles that fit."""
    tile8, tile4, tile2, tile1 = (
        make_tile_kernel(rows, vectors, bfloat16=bfloat16) for rows in (8, 4, 2, 1)
    )

    @njit(nogil=True)
    def strip(a, a_stride, rows, b, b_stride, c, c_stride, k):
        while rows > 0:
            if rows >= 8 and _MOST_ROWS >= 8:
                tile8(a, a_stride, b, b_stride, c, c_stride, k)
                done = 8
            elif rows >= 4:
                tile4(a, a_stride, b, b_stride, c, c_stride, k)
                done = 4
            elif rows >= 2:
                tile2(a, a_stride, b, b_stride, c, c_stride, k)
                done = 2
            else:
                tile1(a, a_stride, b, b_stride, c, c_stride, k)
                done = 1
            rows -= done
            a += done * a_stride
            c += done * c_stride

    function: Callable[..., None] = strip
    return function


def _make_accumulate(*, bfloat16: bool) -> Callable[..., None]:
    item = 2 if bfloat16 else 4
    wide_strip = _make_strip(2, bfloat16=bfloat16)
    narrow_strip = _make_strip(1, bfloat16=bfloat16)

    @njit(nogil=True)
    def accumulate_tiles(a, a_stride, rows, b, b_stride, c, c_stride, columns, k):
        if k < 1:
            return
        column = 0
        while column + PANEL <= columns:
            wide_strip(a, a_stride, rows, b + item * column, b_stride, c + 4 * column, c_stride, k)
            column += PANEL
        if column < columns:
            narrow_strip(
                a, a_stride, rows, b + item * column, b_stride, c + 4 * column, c_stride, k
            )

    function: Callable[..., None] = accumulate_tiles
    return function


_accumulate_float32 = _make_accumulate(bfloat16=False)
_accumulate_bfloat16 = _make_accumulate(bfloat16=True)


def accumulate(
    owner: Any,
    a: int,
    a_stride: int,
    rows: int,
    b: int,
    b_stride: int,
    c: int,
    c_stride: int,
    columns: int,
    k: int,
) -> None:
    """c[0:rows, 0:columns] += a[0:rows, 0:k] @ b[0:k, 0:columns], each sum in the order of k.

    `owner` is the array that b points into; its dtype says whether b is float32 or bfloat16.
    a and c are float32. columns is a multiple of 16. Callable from njit code only.
    """
    raise TypeError("accumulate is for compiled code")


@overload(accumulate)
def _accumulate(owner, a, a_stride, rows, b, b_stride, c, c_stride, columns, k):
    chosen = _accumulate_bfloat16 if owner.dtype == types.uint16 else _accumulate_float32

    def implementation(owner, a, a_stride, rows, b, b_stride, c, c_stride, columns, k):
        chosen(a, a_stride, rows, b, b_stride, c, c_stride, columns, k)

    return implementation
