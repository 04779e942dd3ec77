"""The one inner loop of the CPU backend, written as LLVM IR: c += a @ b on a small tile.

Linear layers, attention scores and the weighted sum of values are all the same loop:

    c[r, 0:width] += sum over k in order of a[r, k] * b[k, 0:width]      r < rows

Each element of c is one chain of fused multiply-adds in the order of k, whatever the number of
rows; that is what makes a row's bits independent of the batch. Accumulators stay in registers
for the whole of k. Vectors are 16 floats wide and LLVM splits them for narrower machines
(AVX2, NEON), which changes the speed and not one bit. Written by hand because Numba's own
vectoriser reaches a fraction of the machine here (docs/decisions/0002).

b is float32, or bfloat16 as uint16 which is widened in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
"""Floats in one vector."""

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_V16F = ir.VectorType(_F32, LANES)
_V16I = ir.VectorType(_I32, LANES)
_V16H = ir.VectorType(_I16, LANES)


def most_tile_rows() -> int:
    """Rows of the largest tile whose accumulators fit this machine's vector registers."""
    return 8 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 4


def make_tile_kernel(rows: int, vectors: int, *, bfloat16: bool) -> Callable[..., None]:
    """An intrinsic kernel(a, a_stride, b, b_stride, c, c_stride, k) on addresses, for njit code.

    Addresses are integers, strides are bytes between rows, k >= 1 counts products. The tile is
    `rows` x (16 * vectors); rows need no alignment beyond their element's.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _TileBuilder(builder, rows, vectors, bfloat16).build(*args)
        return context.get_dummy_value()

    def typer(
        typingctx: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, k: Any
    ) -> Any:
        return types.void(*[types.intp] * 7), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


class _TileBuilder:
    """Emits the loop of one tile kernel."""

    def __init__(self, builder: Any, rows: int, vectors: int, bfloat16: bool) -> None:
        self.builder = builder
        self.rows = rows
        self.vectors = vectors
        self.bfloat16 = bfloat16

    def build(
        self, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, k: Any
    ) -> None:
        builder = self.builder
        a_rows = self._row_addresses(a, a_stride)
        c_rows = self._row_addresses(c, c_stride)
        before = builder.block
        start = [
            self._load(row, _V16F, 4 * LANES * j) for row in c_rows for j in range(self.vectors)
        ]
        body = builder.append_basic_block("products")
        end = builder.append_basic_block("end")
        builder.branch(body)
        builder.position_at_end(body)

        index = builder.phi(_I64)
        index.add_incoming(_I64(0), before)
        sums = [builder.phi(_V16F) for _ in start]
        for value, initial in zip(sums, start, strict=True):
            value.add_incoming(initial, before)

        new_sums = self._products(a_rows, builder.add(b, builder.mul(index, b_stride)), index, sums)
        next_index = builder.add(index, _I64(1))
        builder.cbranch(builder.icmp_signed("<", next_index, k), body, end)
        index.add_incoming(next_index, body)
        for value, new in zip(sums, new_sums, strict=True):
            value.add_incoming(new, body)

        builder.position_at_end(end)
        for i, value in enumerate(new_sums):
            row, j = divmod(i, self.vectors)
            pointer = self._pointer(c_rows[row], _V16F, 4 * LANES * j)
            builder.store(value, pointer).align = 4

    def _products(self, a_rows: list[Any], b_row: Any, index: Any, sums: list[Any]) -> list[Any]:
        builder = self.builder
        b_vectors = [self._load_b(b_row, j) for j in range(self.vectors)]
        offset = builder.mul(index, _I64(4))
        fma = self._declare_fma()
        result = []
        for row, address in enumerate(a_rows):
            scalar = builder.load(self._pointer(builder.add(address, offset), _F32, 0))
            broadcast = self._broadcast(scalar)
            for j, b_vector in enumerate(b_vectors):
                total = sums[row * self.vectors + j]
                result.append(builder.call(fma, [broadcast, b_vector, total]))
        return result

    def _row_addresses(self, base: Any, stride: Any) -> list[Any]:
        builder = self.builder
        return [builder.add(base, builder.mul(stride, _I64(row))) for row in range(self.rows)]

    def _pointer(self, address: Any, type_: Any, offset: int) -> Any:
        moved = self.builder.add(address, _I64(offset))
        return self.builder.inttoptr(moved, type_.as_pointer())

    def _load(self, address: Any, type_: Any, offset: int) -> Any:
        value = self.builder.load(self._pointer(address, type_, offset))
        value.align = 2 if type_ is _V16H else 4
        return value

    def _load_b(self, address: Any, j: int) -> Any:
        if not self.bfloat16:
            return self._load(address, _V16F, 4 * LANES * j)
        half = self._load(address, _V16H, 2 * LANES * j)
        wide = self.builder.zext(half, _V16I)
        shifted = self.builder.shl(wide, ir.Constant(_V16I, [16] * LANES))
        return self.builder.bitcast(shifted, _V16F)

    def _broadcast(self, scalar: Any) -> Any:
        undefined = ir.Constant(_V16F, ir.Undefined)
        lane0 = self.builder.insert_element(undefined, scalar, _I32(0))
        return self.builder.shuffle_vector(lane0, undefined, ir.Constant(_V16I, [0] * LANES))

    def _declare_fma(self) -> Any:
        name = "llvm.fma.v16f32"
        module = self.builder.module
        if name in module.globals:
            return module.globals[name]
        return ir.Function(module, ir.FunctionType(_V16F, [_V16F] * 3), name)
