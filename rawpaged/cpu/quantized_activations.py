"""Activations as integers of 8 bits, 32 to a scale, for products with quantised weights.

    s = largest of |x| / 127        code = x / s, rounded to the nearest, ties to even

so each x changes by at most half of s. Blocks whose largest is below 2**-100 are taken as zeros.
One with an element that is not finite has NaN for a scale: everything computed from it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
_GROUP = 4
"""Blocks that are rounded side by side: what is one number for each is one vector for all."""
_V4F = ir.VectorType(F32, _GROUP)
_V4I = ir.VectorType(I32, _GROUP)
_V16B = ir.VectorType(I8, LANES)


def make_block_quantizer(arithmetic: BlockArithmetic) -> Kernel:
    """A kernel over rows: out u8[n, bytes of a row] = x f32[n, in_features] as blocks."""
    quantize = make_quantize(arithmetic)

    def quantized_rows(out, x, start, stop):
        """out[t] = x[t] in blocks of 32: their codes and four numbers."""
        for t in range(start, stop):
            source, target = x.address + t * x.stride, out.address + t * out.stride
            quantize(source, target, x.columns // BLOCK)

    return Kernel(quantized_rows, variant=arithmetic)


def make_quantize(arithmetic: BlockArithmetic) -> Any:
    """An intrinsic quantize(source, target, blocks), from address to address, of one or more."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Quantizer(VectorBuilder(builder, fused=FEATURES.fma), arithmetic).build(*args)
        return context.get_dummy_value()

    def typer(typingctx: Any, source: Any, target: Any, blocks: Any) -> Any:
        return types.void(types.intp, types.intp, types.intp), generate

    return intrinsic(typer)


class _Quantizer:
    """Emits the rounding of a row."""

    def __init__(self, build: VectorBuilder, arithmetic: BlockArithmetic) -> None:
        self._build = build
        self._by_bytes = arithmetic == "byte_dots"
        self._code_bytes = code_bytes(arithmetic)

    def build(self, source: Any, target: Any, blocks: Any) -> None:
        build, builder = self._build, self._build.builder
        last = builder.sub(blocks, I64(1))

        def group(index: Any, _: list[Any]) -> list[Any]:
            first = builder.mul(index, I64(_GROUP))
            sources, targets = [], []
            for i in range(_GROUP):
                # A last group of fewer does the last block again.
                block = builder.add(first, I64(i))
                block = builder.select(builder.icmp_signed("<", block, last), block, last)
                sources.append(build.at(source, block, 4 * BLOCK))
                targets.append(build.at(target, block, self._code_bytes + NUMBERS_BYTES))
            self._group(sources, targets)
            return []

        groups = builder.add(builder.sdiv(last, I64(_GROUP)), I64(1))
        build.loop(groups, [], group)

    def _group(self, sources: list[Any], targets: list[Any]) -> None:
        build, builder = self._build, self._build.builder
        blocks = [[build.load(at, V16F, 64 * half, align=4) for half in (0, 1)] for at in sources]
        scales, inverses = self._scales(blocks)
        sums = []
        for half in (0, 1):
            rounded = []
            for i, target in enumerate(targets):
                factor = build.shuffle(inverses, inverses, [i] * LANES)
                rounded.append(self._round(blocks[i][half], factor, target, half))
            total = _fold_each(build, rounded, builder.add)
            offset = -LANES * _MAGIC_BITS % 2**32
            sums.append(builder.add(total, ir.Constant(_V4I, [offset] * _GROUP)))
        self._store_numbers(targets, scales, sums)

    def _scales(self, blocks: list[list[Any]]) -> tuple[Any, Any]:
        """Scales and what to multiply x with; 0 and 0, or NaN and 0, as said above."""
        build, builder = self._build, self._build.builder

        def of_each(value: float) -> Any:
            return ir.Constant(_V4F, [value] * _GROUP)

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        # As integers sizes of floats keep their order, infinity and NaN above all others.
        mask = build.constant(0x7FFFFFFF)
        sizes = [[builder.and_(builder.bitcast(x, V16I), mask) for x in block] for block in blocks]
        bits = _fold_each(build, [larger(*block) for block in sizes], larger)
        largest = builder.bitcast(bits, _V4F)
        infinity = ir.Constant(_V4I, [_INFINITY] * _GROUP)
        is_finite = builder.icmp_signed("<", bits, infinity)
        is_large = builder.fcmp_ordered(">", largest, of_each(_SMALLEST))
        scales = builder.fdiv(largest, of_each(127.0))
        scales = builder.select(is_large, scales, of_each(0.0))
        scales = builder.select(is_finite, scales, of_each(math.nan))
        inverses = builder.fdiv(of_each(127.0), largest)
        is_usable = builder.and_(is_large, is_finite)
        return scales, builder.select(is_usable, inverses, of_each(0.0))

    def _round(self, x: Any, factor: Any, target: Any, half: int) -> Any:
        """Stores sixteen codes; their numbers as <16 x i32>, each above by _MAGIC_BITS."""
        build, builder = self._build, self._build.builder
        magic = build.float_constant(_MAGIC)
        rounded = builder.fadd(builder.fmul(x, factor), magic)
        bits = builder.bitcast(rounded, V16I)
        if self._by_bytes:
            build.store(builder.trunc(bits, _V16B), target, LANES * half)
        else:
            build.store(builder.fsub(rounded, magic), target, 64 * half, align=4)
        return bits

    def _store_numbers(self, targets: list[Any], scales: Any, sums: list[Any]) -> None:
        """After each block's codes: s, s * sum, -sum, and -sum of its second half."""
        build, builder = self._build, self._build.builder
        both = builder.add(*sums)
        scaled = builder.fmul(scales, builder.sitofp(both, _V4F))
        pairs = (
            (builder.bitcast(scales, _V4I), builder.bitcast(scaled, _V4I)),
            (builder.neg(both), builder.neg(sums[1])),
        )
        for i, target in enumerate(targets):
            first, second = (build.shuffle(*pair, [i, _GROUP + i]) for pair in pairs)
            numbers = build.shuffle(first, second, [0, 1, 2, 3])
            build.store(numbers, target, self._code_bytes, align=4)


def _fold_each(build: VectorBuilder, vectors: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """<4 x i32>: of each of four vectors <16 x i32> its elements joined, in whatever order."""

    def interleaved(a: Any, b: Any, order: tuple[int, ...]) -> Any:
        """Of each four elements of a and of b those of `order`; 4 and above are b's."""
        places = [i % 4 + LANES * (i // 4) for i in order]
        return build.shuffle(a, b, [4 * four + i for four in range(4) for i in places])

    def joined(a: Any, b: Any, low: tuple[int, ...], high: tuple[int, ...]) -> Any:
        return join(interleaved(a, b, low), interleaved(a, b, high))

    pairs = [joined(vectors[i], vectors[i + 1], (0, 4, 1, 5), (2, 6, 3, 7)) for i in (0, 2)]
    fours = joined(pairs[0], pairs[1], (0, 1, 4, 5), (2, 3, 6, 7))
    for width in (8, 4):
        low, high = (build.shuffle(fours, fours, list(range(at, at + width))) for at in (0, width))
        fours = join(low, high)
    return fours
