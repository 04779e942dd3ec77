"""The inner loop of attention, written as LLVM IR: c += a @ b on a small tile.

Scores and the weighted sum of values are the same loop:

    c[r, 0:width] += sum over k in order of a[r, k] * b[k, 0:width]      r < rows

Each element of c is one chain of multiply-adds in the order of k, whatever the number of rows; that
is what makes a row's bits independent of the batch. Accumulators stay in registers for the whole of
k. Written by hand because Numba's own vectoriser reaches a fraction of the machine here
(docs/decisions/0002).

b is float32, or bfloat16 as uint16 which is widened in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.vector_ir import F32, LANES, V16F, V16H, V16I, VectorBuilder


def most_tile_rows() -> int:
    """Rows of the largest tile whose accumulators fit this machine's vector registers."""
    return 8 if FEATURES.avx512f else 4


def make_tile_kernel(rows: int, vectors: int, *, bfloat16: bool) -> Callable[..., None]:
    """An intrinsic kernel(a, a_stride, b, b_stride, c, c_stride, k) on addresses, for njit code.

    Addresses are integers, strides are bytes between rows, k >= 1 counts products. The tile is
    `rows` x (16 * vectors); rows need no alignment beyond their element's.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        _TileBuilder(build, rows, vectors, bfloat16).build(*args)
        return context.get_dummy_value()

    def typer(
        typingctx: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, k: Any
    ) -> Any:
        return types.void(*[types.intp] * 7), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


class _TileBuilder:
    """Emits the loop of one tile kernel."""

    def __init__(self, build: VectorBuilder, rows: int, vectors: int, bfloat16: bool) -> None:
        self._build = build
        self._rows = rows
        self._vectors = vectors
        self._bfloat16 = bfloat16

    def build(
        self, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, k: Any
    ) -> None:
        build, vectors = self._build, range(self._vectors)
        a_rows = build.row_addresses(a, a_stride, self._rows)
        c_rows = build.row_addresses(c, c_stride, self._rows)
        start = [build.load(row, V16F, 64 * j, align=4) for row in c_rows for j in vectors]

        def step(index: Any, sums: list[Any]) -> list[Any]:
            return self._products(a_rows, build.at(b, index, b_stride), index, sums)

        for i, value in enumerate(build.loop(k, start, step)):
            row, j = divmod(i, self._vectors)
            build.store(value, c_rows[row], 64 * j, align=4)

    def _products(self, a_rows: list[Any], b_row: Any, index: Any, sums: list[Any]) -> list[Any]:
        build = self._build
        b_vectors = [self._load_b(b_row, j) for j in range(self._vectors)]
        result = []
        for row, address in enumerate(a_rows):
            a = build.broadcast(build.load(build.at(address, index, 4), F32, align=4))
            for j, b_vector in enumerate(b_vectors):
                result.append(build.multiply_add(a, b_vector, sums[row * self._vectors + j]))
        return result

    def _load_b(self, address: Any, j: int) -> Any:
        if not self._bfloat16:
            return self._build.load(address, V16F, 4 * LANES * j, align=4)
        builder = self._build.builder
        wide = builder.zext(self._build.load(address, V16H, 2 * LANES * j, align=2), V16I)
        shifted = builder.shl(wide, ir.Constant(V16I, [16] * LANES))
        return builder.bitcast(shifted, V16F)
