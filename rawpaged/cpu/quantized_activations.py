"""Activations as integers of 8 bits, 32 to a scale, for products with quantised weights.

    s = largest of |x| / 127        code = x / s, rounded to the nearest, ties to even

so each x changes by at most half of s. Blocks whose largest is below 2**-100 are taken as zeros.
One with an element that is not finite has NaN for a scale: everything computed from it is NaN.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.block_kernel import NUMBERS_BYTES, BlockArithmetic, code_bytes
from rawpaged.cpu.block_types import BLOCK
from rawpaged.cpu.compiling import Kernel
from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.vector_ir import F32, I8, I32, I64, LANES, V16F, V16I, VectorBuilder

_SMALLEST = 2.0**-100
_INFINITY = 0x7F800000
_MAGIC = 1.5 * 2**23
"""Added to a float below 2**22 it leaves the nearest integer in the lowest bits."""
_MAGIC_BITS = 0x4B400000
_V16B = ir.VectorType(I8, LANES)


def make_block_quantizer(arithmetic: BlockArithmetic) -> Kernel:
    """A kernel over rows: out u8[n, bytes of a row] = x f32[n, in_features] as blocks."""
    quantize = make_quantize(arithmetic)
    step = code_bytes(arithmetic) + NUMBERS_BYTES

    def quantized_rows(out, x, start, stop):
        """out[t] = x[t] in blocks of 32: their codes and four numbers."""
        for t in range(start, stop):
            source, target = x.address + t * x.stride, out.address + t * out.stride
            for block in range(x.columns // BLOCK):
                quantize(source + 4 * BLOCK * block, target + step * block)

    return Kernel(quantized_rows, variant=arithmetic)


def make_quantize(arithmetic: BlockArithmetic) -> Any:
    """An intrinsic quantize(source, target) for one block, from address to address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _quantize(VectorBuilder(builder, fused=FEATURES.fma), arithmetic, *args)
        return context.get_dummy_value()

    def typer(typingctx: Any, source: Any, target: Any) -> Any:
        return types.void(types.intp, types.intp), generate

    return intrinsic(typer)


def _quantize(
    build: VectorBuilder, arithmetic: BlockArithmetic, source: Any, target: Any
) -> None:
    """Emits one block, from address to address."""
    builder = build.builder
    halves = [build.load(source, V16F, 64 * half, align=4) for half in range(2)]
    scale, inverse = _scale(build, halves)
    factor = build.broadcast(inverse)
    magic = ir.Constant(V16F, [_MAGIC] * LANES)
    negative_sums = []
    for half, x in enumerate(halves):
        rounded = builder.fadd(builder.fmul(x, factor), magic)
        codes = builder.sub(builder.bitcast(rounded, V16I), build.constant(_MAGIC_BITS))
        small = builder.trunc(codes, _V16B)
        if arithmetic == "byte_dots":
            build.store(small, target, LANES * half)
            total = _sum_of_bytes(build, small)
        else:
            codes = builder.sext(small, V16I)
            build.store(builder.sitofp(codes, V16F), target, 64 * half, align=4)
            total = build.call("llvm.vector.reduce.add.v16i32", I32, codes)
        negative_sums.append(builder.neg(total))
    both = builder.add(*negative_sums)
    scaled_sum = builder.fmul(scale, builder.sitofp(builder.neg(both), F32))
    numbers = (scale, scaled_sum, both, negative_sums[1])
    for index, number in enumerate(numbers):
        build.store(number, target, code_bytes(arithmetic) + 4 * index, align=4)


def _scale(build: VectorBuilder, halves: list[Any]) -> tuple[Any, Any]:
    """The block's scale and what to multiply x with; 0 and 0, or NaN and 0, as said above."""
    builder = build.builder
    # As integers sizes of floats keep their order, infinity and NaN above all others.
    sizes = [
        builder.and_(builder.bitcast(half, V16I), build.constant(0x7FFFFFFF)) for half in halves
    ]
    larger = builder.select(builder.icmp_signed(">", *sizes), *sizes)
    bits = build.call("llvm.vector.reduce.smax.v16i32", I32, larger)
    largest = builder.bitcast(bits, F32)
    is_finite = builder.icmp_signed("<", bits, I32(_INFINITY))
    is_large = builder.fcmp_ordered(">", largest, ir.Constant(F32, _SMALLEST))
    zero = ir.Constant(F32, 0.0)
    scale = builder.fdiv(largest, ir.Constant(F32, 127.0))
    scale = builder.select(is_large, scale, zero)
    scale = builder.select(is_finite, scale, ir.Constant(F32, math.nan))
    inverse = builder.fdiv(ir.Constant(F32, 127.0), largest)
    is_usable = builder.and_(is_large, is_finite)
    return scale, builder.select(is_usable, inverse, zero)


def _sum_of_bytes(build: VectorBuilder, codes: Any) -> Any:
    """Sum of sixteen signed bytes by PSADBW, which every processor with byte dots has."""
    builder = build.builder
    offset = 128
    unsigned = builder.xor(codes, ir.Constant(_V16B, [-offset] * LANES))
    zeros = ir.Constant(_V16B, [0] * LANES)
    halves = build.call("llvm.x86.sse2.psad.bw", ir.VectorType(I64, 2), unsigned, zeros)
    total = builder.add(*(builder.extract_element(halves, I32(lane)) for lane in range(2)))
    return builder.sub(builder.trunc(total, I32), I32(LANES * offset))
