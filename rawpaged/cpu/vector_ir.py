"""Small parts of kernels written as LLVM IR: addresses, vectors of sixteen, counted loops.

Vectors are 16 lanes wide and LLVM splits them for narrower machines (AVX2, NEON), which changes the
speed and not one bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir

from rawpaged.cpu.features import FEATURES

LANES = 16
"""Floats in one vector."""

_CACHE_LINE = 64
_FETCHED_AHEAD = (4096, 6144)
"""Bytes ahead at which lines of weights are fetched. Twice, as the processor drops a fetch when too
many are under way."""

FETCHED_BYTES = 1024
"""Of what each address of a list says to fetch."""
FETCHED_LINES = FETCHED_BYTES // _CACHE_LINE

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
V16F = ir.VectorType(F32, LANES)
V16I = ir.VectorType(I32, LANES)
V16H = ir.VectorType(I16, LANES)
V64B = ir.VectorType(I8, 4 * LANES)
_V16HALF = ir.VectorType(ir.HalfType(), LANES)
_HALF_TO_FLOAT = ir.Constant(V16F, [2.0**112] * LANES)
"""Between the exponents of the two types."""


POWER_OF_TWO = (
    0.001326472731307149, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253,
    0.6931470036506653, 1.0,
)  # fmt: skip
"""Minimax polynomial for 2 ** r on [-1/2, 1/2], relative error 9e-8; highest power first."""


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


V32B = ir.VectorType(BFloat(), 2 * LANES)


class VectorBuilder:
    """An IR builder with the verbs that kernels are made of. Addresses are i64."""

    def __init__(self, builder: Any, *, fused: bool) -> None:
        self.builder = builder
        self.fused = fused

    def row_addresses(self, base: Any, stride: Any, rows: int) -> list[Any]:
        """base, base + stride, ..."""
        builder = self.builder
        return [
            builder.add(base, builder.mul(stride, I64(row))) if row else base
            for row in range(rows)
        ]

    def at(self, base: Any, index: Any, stride: Any) -> Any:
        """base + index * stride; the stride is an i64 or a number."""
        if isinstance(stride, int):
            stride = I64(stride)
        return self.builder.add(base, self.builder.mul(index, stride))

    def load(self, address: Any, type_: Any, offset: int = 0, *, align: int = 1) -> Any:
        value = self.builder.load(self._pointer(address, type_, offset))
        value.align = align
        return value

    def store(self, value: Any, address: Any, offset: int = 0, *, align: int = 1) -> None:
        self.builder.store(value, self._pointer(address, value.type, offset)).align = align

    def broadcast(self, scalar: Any) -> Any:
        """Sixteen of it."""
        type_ = ir.VectorType(scalar.type, LANES)
        undefined = ir.Constant(type_, ir.Undefined)
        lane0 = self.builder.insert_element(undefined, scalar, I32(0))
        return self.builder.shuffle_vector(lane0, undefined, ir.Constant(V16I, [0] * LANES))

    def shuffle(self, a: Any, b: Any, places: Sequence[int]) -> Any:
        """Elements of a and b by their places in the two, one after the other."""
        mask = ir.Constant(ir.VectorType(I32, len(places)), list(places))
        return self.builder.shuffle_vector(a, b, mask)

    def constant(self, value: int) -> Any:
        """Sixteen of an i32."""
        return ir.Constant(V16I, [value] * LANES)

    def float_constant(self, value: float) -> Any:
        """Sixteen of an f32."""
        return ir.Constant(V16F, [float(np.float32(value))] * LANES)

    def zeros(self) -> Any:
        return self.float_constant(0.0)

    def multiply_add(self, a: Any, b: Any, total: Any) -> Any:
        """total + a * b, rounded once where the machine can."""
        if self.fused:
            return self.call("llvm.fma.v16f32", V16F, a, b, total)
        return self.builder.fadd(total, self.builder.fmul(a, b))

    def power_of_two(self, x: Any) -> Any:
        """2 ** x for -126 <= x <= 0, within 2 ulp; exact for integers."""
        builder = self.builder
        n = self.call("llvm.rint.v16f32", V16F, x)
        r = builder.fsub(x, n)
        p = self.float_constant(POWER_OF_TWO[0])
        for coefficient in POWER_OF_TWO[1:]:
            p = self.multiply_add(p, r, self.float_constant(coefficient))
        exponent = builder.shl(builder.fptosi(n, V16I), self.constant(23))
        return builder.bitcast(builder.add(builder.bitcast(p, V16I), exponent), V16F)

    def bfloat16_dot(self, total: Any, a: Any, b: Any) -> Any:
        """total + a0 * b0 + a1 * b1 in each lane; a and b are pairs as <16 x i32>. AVX512-BF16."""
        cast = self.builder.bitcast
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return self.call(name, V16F, total, cast(a, V32B), cast(b, V32B))

    def byte_dot(self, total: Any, a: Any, b: Any) -> Any:
        """total + the four products a[i] * b[i] in each lane; a <16 x u8[4]>, b <16 x i8[4]>.

        AVX512-VNNI.
        """
        # LLVM 22 gave the operands their own type.
        operand = V64B if binding.llvm_version_info[0] >= 22 else V16I
        cast = self.builder.bitcast
        name = "llvm.x86.avx512.vpdpbusd.512"
        return self.call(name, V16I, total, cast(a, operand), cast(b, operand))

    def load_halves(self, address: Any, offset: int = 0) -> Any:
        """Sixteen numbers of half precision as floats, exactly."""
        if FEATURES.avx512f:
            return self.builder.fpext(self.load(address, _V16HALF, offset), V16F)
        # Elsewhere LLVM may call a function that is not there.
        builder = self.builder
        bits = builder.zext(self.load(address, V16H, offset), V16I)
        size = builder.shl(builder.and_(bits, self.constant(0x7FFF)), self.constant(13))
        value = builder.fmul(builder.bitcast(size, V16F), _HALF_TO_FLOAT)
        is_finite = builder.icmp_unsigned("<", size, self.constant(0x7C00 << 13))
        above = builder.or_(size, self.constant(0x7F800000))
        known = builder.select(is_finite, builder.bitcast(value, V16I), above)
        sign = builder.shl(builder.and_(bits, self.constant(0x8000)), self.constant(16))
        return builder.bitcast(builder.or_(known, sign), V16F)

    def fold(self, vector: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
        """The sixteen elements joined by join(builder, a, b), as a balanced tree."""
        builder = self.builder
        width = LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(vector.type, ir.Undefined)
            low, high = (
                builder.shuffle_vector(
                    vector,
                    undefined,
                    ir.Constant(ir.VectorType(I32, width), list(range(first, first + width))),
                )
                for first in (0, width)
            )
            vector = join(builder, low, high)
        return builder.extract_element(vector, I32(0))

    def prefetch(self, address: Any, offset: int = 0) -> None:
        """Fetch the cache line at an address that will be read soon; any address will do.

        Into the second level: the first can wait for fewer lines at a time.
        """
        pointer = self._pointer(address, I8, offset)
        read, second_level, data = I32(0), I32(2), I32(1)
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, read, second_level, data)

    def fetch_ahead(self, place: Any, size: int) -> None:
        """Have what lies some way past the next `size` bytes in the second-level cache when it is
        read: of panels one after the other, it is of the next one at the end.
        """
        for distance in _FETCHED_AHEAD:
            for offset in range(0, size, _CACHE_LINE):
                self.prefetch(place, distance + offset)

    def fetch_listed(self, listed: Any, num_listed: Any, step: Any, lines: int) -> None:
        """Fetch what a list of addresses says, from the first on: `lines`, a power of two, in each
        step, so that an address serves for FETCHED_LINES / lines steps."""
        builder = self.builder
        steps = FETCHED_LINES // lines
        index = builder.lshr(step, I64(steps.bit_length() - 1))
        with builder.if_then(builder.icmp_signed("<", index, num_listed)):
            place = self.load(self.at(listed, index, 8), I64)
            place = self.at(place, builder.and_(step, I64(steps - 1)), _CACHE_LINE * lines)
            for line in range(lines):
                self.prefetch(place, _CACHE_LINE * line)

    def call(self, name: str, result: Any, *args: Any) -> Any:
        """Call an LLVM intrinsic."""
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            type_ = ir.FunctionType(result, [argument.type for argument in args])
            function = ir.Function(module, type_, name)
        return self.builder.call(function, args)

    def loop(
        self, count: Any, start: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """values = body(index, values) for index in [0, count), at least once; the last values."""
        builder = self.builder
        before = builder.block
        block = builder.append_basic_block("loop")
        end = builder.append_basic_block("end")
        builder.branch(block)
        builder.position_at_end(block)
        index = builder.phi(I64)
        index.add_incoming(I64(0), before)
        values = [builder.phi(value.type) for value in start]
        for value, initial in zip(values, start, strict=True):
            value.add_incoming(initial, before)
        new = body(index, list(values))
        next_index = builder.add(index, I64(1))
        last = builder.block
        builder.cbranch(builder.icmp_signed("<", next_index, count), block, end)
        index.add_incoming(next_index, last)
        for value, following in zip(values, new, strict=True):
            value.add_incoming(following, last)
        builder.position_at_end(end)
        return new

    def by_number(self, number: Any, most: int, emit: Callable[[int], None]) -> None:
        """The code of emit(number), for 1 <= number <= most; nothing for other numbers."""
        builder = self.builder
        end = builder.append_basic_block("end")
        switch = builder.switch(number, end)
        for value in range(1, most + 1):
            block = builder.append_basic_block(f"is_{value}")
            switch.add_case(I64(value), block)
            builder.position_at_end(block)
            emit(value)
            builder.branch(end)
        builder.position_at_end(end)

    def _pointer(self, address: Any, type_: Any, offset: int) -> Any:
        moved = self.builder.add(address, I64(offset)) if offset else address
        return self.builder.inttoptr(moved, type_.as_pointer())


def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair, b where one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)
