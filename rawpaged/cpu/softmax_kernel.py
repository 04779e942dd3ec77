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
        row = _Row(build, scores, weights, low, high, bfloat16=bfloat16)
        seen = builder.ashr(high, I64(4))  # vectors of which all is seen if the first is
        from_start = builder.icmp_signed("<=", low, I64(0))
        whole = builder.and_(from_start, builder.icmp_signed(">=", seen, num_vectors))
        begins = builder.and_(from_start, builder.icmp_signed(">", seen, I64(0)))
        with builder.if_else(whole) as (all_seen, some_seen):
            with all_seen:
                _emit(build, row, [(I64(0), num_vectors, False)], state)
            with some_seen, builder.if_else(begins) as (first_seen, any_seen):
                with first_seen:
                    _emit(build, row, [(I64(0), seen, False), (seen, num_vectors, True)], state)
                with any_seen:
                    _emit(build, row, [(I64(0), num_vectors, True)], state)
        return context.get_dummy_value()

    def typer(
        typingctx: Any, weights: Any, scores: Any, low: Any, high: Any, num_vectors: Any, state: Any
    ) -> Any:
        return types.void(*[types.intp] * 6), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


class _Row:
    """Scores of a row, of which those in a range count, and its weights."""

    def __init__(
        self,
        build: VectorBuilder,
        scores: Any,
        weights: Any,
        low: Any,
        high: Any,
        *,
        bfloat16: bool,
    ) -> None:
        self._build = build
        self._scores = scores
        self._weights = weights
        self._bounds = [build.broadcast(build.builder.trunc(bound, I32)) for bound in (low, high)]
        self._bfloat16 = bfloat16

    def load(self, index: Any) -> Any:
        """Vector `index` of the scores."""
        return self._build.load(self._build.at(self._scores, index, 4 * LANES), V16F, align=4)

    def keep(self, index: Any, vector: Any, other: Any) -> Any:
        """Those of its elements that count, and `other` elsewhere."""
        build, builder = self._build, self._build.builder
        low, high = self._bounds
        first = build.broadcast(builder.trunc(builder.mul(index, I64(LANES)), I32))
        place = builder.add(first, ir.Constant(V16I, list(range(LANES))))
        counts = builder.and_(
            builder.icmp_signed(">=", place, low), builder.icmp_signed("<", place, high)
        )
        return builder.select(counts, vector, other)

    def store(self, index: Any, weight: Any) -> None:
        """Vector `index` of the weights."""
        build = self._build
        if self._bfloat16:
            halves = build.builder.fptrunc(weight, ir.VectorType(BFloat(), LANES))
            build.store(halves, build.at(self._weights, index, 2 * LANES), align=2)
        else:
            build.store(weight, build.at(self._weights, index, 4 * LANES), align=4)


Span = tuple[Any, Any, bool]
"""Vectors [first, last), at least one, and whether some of their elements do not count."""


def _emit(build: VectorBuilder, row: _Row, spans: list[Span], state: Any) -> None:
    """Both passes over a row, whose vectors the spans make up."""
    most = build.float_constant(_NOTHING)
    for first, last, is_part in spans:
        most = _emit_largest(build, row, first, last, is_part, most)
    most = build.fold(most, larger)
    every_most = build.broadcast(most)
    total = build.zeros()
    for first, last, is_part in spans:
        total = _emit_weights(build, row, first, last, is_part, every_most, total)
    build.store(most, state, align=4)
    build.store(build.fold(total, ir.IRBuilder.fadd), state, 4, align=4)


def _emit_largest(
    build: VectorBuilder, row: _Row, first: Any, last: Any, is_part: bool, most: Any
) -> Any:
    """The larger of `most` and the scores of a span."""
    builder = build.builder

    def largest(number: Any, most: list[Any]) -> list[Any]:
        index = builder.add(first, number)
        scores = row.load(index)
        if is_part:
            scores = row.keep(index, scores, build.float_constant(_NOTHING))
        return [larger(builder, scores, most[0])]

    return build.loop(builder.sub(last, first), [most], largest)[0]


def _emit_weights(
    build: VectorBuilder,
    row: _Row,
    first: Any,
    last: Any,
    is_part: bool,
    every_most: Any,
    total: Any,
) -> Any:
    """Store the weights of a span; `total` with them added."""
    builder = build.builder

    def weigh(number: Any, total: list[Any]) -> list[Any]:
        index = builder.add(first, number)
        x = builder.fsub(row.load(index), every_most)
        # NaN, the second operand, stays.
        x = larger(builder, build.float_constant(_LOWEST), x)
        weight = build.power_of_two(x)
        if is_part:
            weight = row.keep(index, weight, build.zeros())
        row.store(index, weight)
        return [builder.fadd(total[0], weight)]

    return build.loop(builder.sub(last, first), [total], weigh)[0]
