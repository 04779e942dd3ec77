"""Powers of two of a few rows of scores, written as LLVM IR."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.vector_ir import (
    I16,
    I32,
    I64,
    LANES,
    POWER_OF_TWO,
    V16F,
    V16I,
    BFloat,
    VectorBuilder,
    larger,
)

SOFTMAX_ROWS = 3 if FEATURES.avx512f else 1
"""Rows at a time: while one is folded or waits for a sum, the others go on."""

_UNSEEN = -1.0e38
"""Score of a key that a row does not see; what it is less a maximum is still finite."""
_LEAST = -0.5e38
"""The maximum is not below it, so that what is not seen has weight 0 also where nothing is."""
_SMALLEST_EXPONENT = -126.0

_ROUGH_POWER_OF_TWO = (
    0.05500893088168011, 0.24221096932316755, 0.6932829282902342, 1.0,
)  # fmt: skip
"""Like POWER_OF_TWO, relative error 2 ** -13.3, where the result is rounded by 2 ** -9 anyway."""


def make_softmax_kernel(*, bfloat16: bool) -> Callable[..., None]:
    """An intrinsic kernel(rows, weights, weights_stride, scores, scores_stride, num_vectors,
    states, states_stride) on addresses, for 1 <= rows <= SOFTMAX_ROWS and num_vectors >= 1.

    weights = 2 ** (scores - maximum) of 16 * num_vectors scores f32 in each row, in float32 or
    rounded to bfloat16. A row's state f32[2] gets the maximum and the sum of the weights before
    rounding, element i in chain i % 16. Relative errors are within 2 ulp of float32, or 2 ** -13
    before rounding to bfloat16; what is below 2 ** -126 may be 0. Scores that are not finite, or
    beyond 2e38, make the sum NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        rows, *rest = args
        build.by_number(rows, SOFTMAX_ROWS, lambda n: _emit(build, n, *rest, bfloat16=bfloat16))
        return context.get_dummy_value()

    def typer(
        typingctx: Any, rows: Any, weights: Any, weights_stride: Any, scores: Any,
        scores_stride: Any, num_vectors: Any, states: Any, states_stride: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 8), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


@intrinsic
def hide_scores(typingctx: Any, scores: Any, low: Any, high: Any, num_vectors: Any) -> Any:
    """hide_scores(scores, low, high, num_vectors): of those at an address, all outside [low, high)
    become what weighs 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, low, high, num_vectors = args
        build = VectorBuilder(builder, fused=FEATURES.fma)
        bounds = [build.broadcast(builder.trunc(bound, I32)) for bound in (low, high)]
        lanes = ir.Constant(V16I, list(range(LANES)))

        def hide(first: Any, number: Any) -> None:
            def one(index: Any, nothing: list[Any]) -> list[Any]:
                index = builder.add(first, index)
                place = builder.trunc(builder.mul(index, I64(LANES)), I32)
                places = builder.add(build.broadcast(place), lanes)
                is_seen = builder.and_(
                    builder.icmp_signed(">=", places, bounds[0]),
                    builder.icmp_signed("<", places, bounds[1]),
                )
                address = build.at(scores, index, 4 * LANES)
                kept = build.load(address, V16F, align=4)
                kept = builder.select(is_seen, kept, build.float_constant(_UNSEEN))
                build.store(kept, address, align=4)
                return nothing

            with builder.if_then(builder.icmp_signed(">", number, I64(0))):
                build.loop(number, [], one)

        # Those with an end of the range are in the one or the other, or in both.
        hide(I64(0), builder.ashr(builder.add(low, I64(LANES - 1)), I64(4)))
        first_after = builder.ashr(high, I64(4))
        hide(first_after, builder.sub(num_vectors, first_after))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


def _emit(
    build: VectorBuilder, rows: int, weights: Any, weights_stride: Any, scores: Any,
    scores_stride: Any, num_vectors: Any, states: Any, states_stride: Any, *, bfloat16: bool,
) -> None:  # fmt: skip
    """Both passes over so many rows."""
    builder = build.builder
    score_rows = build.row_addresses(scores, scores_stride, rows)
    weight_rows = build.row_addresses(weights, weights_stride, rows)

    def load(row: int, index: Any) -> Any:
        return build.load(build.at(score_rows[row], index, 4 * LANES), V16F, align=4)

    def largest(index: Any, most: list[Any]) -> list[Any]:
        return [larger(builder, load(row, index), most[row]) for row in range(rows)]

    least = [build.float_constant(_LEAST)] * rows
    most = [build.fold(each, larger) for each in build.loop(num_vectors, least, largest)]
    every_most = [build.broadcast(each) for each in most]

    def weigh(index: Any, totals: list[Any]) -> list[Any]:
        result = []
        for row in range(rows):
            x = builder.fsub(load(row, index), every_most[row])
            weight = _power_of_two(build, x, rough=bfloat16)
            _store(build, weight, weight_rows[row], index, bfloat16=bfloat16)
            result.append(builder.fadd(totals[row], weight))
        return result

    totals = build.loop(num_vectors, [build.zeros()] * rows, weigh)
    for row, address in enumerate(build.row_addresses(states, states_stride, rows)):
        build.store(most[row], address, align=4)
        build.store(build.fold(totals[row], ir.IRBuilder.fadd), address, 4, align=4)


def _store(build: VectorBuilder, weight: Any, row: Any, index: Any, *, bfloat16: bool) -> None:
    """Vector `index` of a row's weights."""
    if bfloat16:
        halves = build.builder.fptrunc(weight, ir.VectorType(BFloat(), LANES))
        build.store(halves, build.at(row, index, 2 * LANES), align=2)
    else:
        build.store(weight, build.at(row, index, 4 * LANES), align=4)


def _power_of_two(build: VectorBuilder, x: Any, *, rough: bool) -> Any:
    """2 ** x for finite x <= 0, 0 for those far below -126; NaN otherwise."""
    builder = build.builder
    if not FEATURES.avx512f:
        is_zero = builder.fcmp_ordered("<", x, build.float_constant(_SMALLEST_EXPONENT))
        # NaN, the second operand, stays.
        x = larger(builder, build.float_constant(_SMALLEST_EXPONENT), x)
        return builder.select(is_zero, build.zeros(), build.power_of_two(x))
    n = build.call("llvm.rint.v16f32", V16F, x)
    r = builder.fsub(x, n)
    first, *coefficients = _ROUGH_POWER_OF_TWO if rough else POWER_OF_TWO
    p = build.float_constant(first)
    for coefficient in coefficients:
        p = build.multiply_add(p, r, build.float_constant(coefficient))
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    all_lanes, current_rounding = I16(-1), I32(4)
    return build.call(name, V16F, p, n, build.zeros(), all_lanes, current_rounding)
