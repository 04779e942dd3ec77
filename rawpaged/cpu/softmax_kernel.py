"""Powers of two of a row of scores, written as LLVM IR."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.vector_ir import I32, I64, LANES, V16F, V16I, BFloat, VectorBuilder, larger

_NOTHING = float("-inf")
_LOWEST = -126.0


def make_softmax_kernel(*, bfloat16: bool) -> Callable[..., None]:
    """An intrinsic kernel(weights, scores, low, high, num_vectors, state) on addresses.

    weights = 2 ** (scores - maximum) for the elements [low, high), zeros for the others of
    16 * num_vectors, in float32 or rounded to bfloat16; scores are float32. state f32[2] gets
    the maximum and the sum of the weights before rounding, element i in chain i % 16. Errors are
    within 2 ulp; weights below 2 ** -126 count as that. NaN makes the sum NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, scores, low, high, num_vectors, state = args
        build = VectorBuilder(builder, fused=FEATURES.fma)
        all_seen = builder.and_(
            builder.icmp_signed("<=", low, I64(0)),
            builder.icmp_signed(">=", high, builder.mul(num_vectors, I64(LANES))),
        )
        with builder.if_else(all_seen) as (whole, part):
            with whole:
                row = _Row(build, scores, None)
                _emit(build, row, weights, num_vectors, state, bfloat16)
            with part:
                row = _Row(build, scores, (low, high))
                _emit(build, row, weights, num_vectors, state, bfloat16)
        return context.get_dummy_value()

    def typer(
        typingctx: Any, weights: Any, scores: Any, low: Any, high: Any, num_vectors: Any, state: Any
    ) -> Any:
        return types.void(*[types.intp] * 6), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


class _Row:
    """Scores, all of them or a range."""

    def __init__(self, build: VectorBuilder, scores: Any, bounds: tuple[Any, Any] | None) -> None:
        self._build = build
        self._scores = scores
        self._bounds = bounds and [
            build.broadcast(build.builder.trunc(bound, I32)) for bound in bounds
        ]

    def load(self, index: Any) -> Any:
        """Vector `index`."""
        return self._build.load(self._build.at(self._scores, index, 4 * LANES), V16F, align=4)

    def keep(self, index: Any, vector: Any, other: Any) -> Any:
        """Those of its elements that count, and `other` elsewhere."""
        if self._bounds is None:
            return vector
        build, builder = self._build, self._build.builder
        low, high = self._bounds
        first = build.broadcast(builder.trunc(builder.mul(index, I64(LANES)), I32))
        place = builder.add(first, ir.Constant(V16I, list(range(LANES))))
        counts = builder.and_(
            builder.icmp_signed(">=", place, low), builder.icmp_signed("<", place, high)
        )
        return builder.select(counts, vector, other)


def _emit(
    build: VectorBuilder, row: _Row, weights: Any, num_vectors: Any, state: Any, bfloat16: bool
) -> None:
    """Both passes over a row."""
    builder = build.builder
    nothing = build.float_constant(_NOTHING)

    def largest(index: Any, most: list[Any]) -> list[Any]:
        return [larger(builder, row.keep(index, row.load(index), nothing), most[0])]

    most = build.fold(build.loop(num_vectors, [nothing], largest)[0], larger)
    every_most = build.broadcast(most)

    def weigh(index: Any, total: list[Any]) -> list[Any]:
        x = builder.fsub(row.load(index), every_most)
        # NaN, the second operand, stays.
        x = larger(builder, build.float_constant(_LOWEST), x)
        weight = row.keep(index, build.power_of_two(x), build.zeros())
        if bfloat16:
            halves = builder.fptrunc(weight, ir.VectorType(BFloat(), LANES))
            build.store(halves, build.at(weights, index, 2 * LANES), align=2)
        else:
            build.store(weight, build.at(weights, index, 4 * LANES), align=4)
        return [builder.fadd(total[0], weight)]

    total = build.fold(build.loop(num_vectors, [build.zeros()], weigh)[0], ir.IRBuilder.fadd)
    build.store(most, state, align=4)
    build.store(total, state, 4, align=4)
