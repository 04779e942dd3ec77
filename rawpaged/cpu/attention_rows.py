"""What attention does to whole rows of queries and values, written as LLVM IR.

States are (maximum, sum of weights), f32[2]; values are sums of that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.vector_ir import F32, I64, LANES, V16F, BFloat, VectorBuilder, larger

_ZERO = ir.Constant(F32, 0.0)
_SMALLEST_EXPONENT = -126.0


def make_scale_row(*, bfloat16: bool) -> Callable[..., None]:
    """An intrinsic scale_row(target, source, factor, num_vectors) on addresses: 16 * num_vectors
    of source f32 times the factor, in float32 or rounded to bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, factor, num_vectors = args
        build = VectorBuilder(builder, fused=FEATURES.fma)
        factors = build.broadcast(factor)

        def scale(index: Any, nothing: list[Any]) -> list[Any]:
            x = build.load(build.at(source, index, 4 * LANES), V16F, align=4)
            x = builder.fmul(x, factors)
            if bfloat16:
                halves = builder.fptrunc(x, ir.VectorType(BFloat(), LANES))
                build.store(halves, build.at(target, index, 2 * LANES), align=2)
            else:
                build.store(x, build.at(target, index, 4 * LANES), align=4)
            return nothing

        with builder.if_then(builder.icmp_signed(">", num_vectors, I64(0))):
            build.loop(num_vectors, [], scale)
        return context.get_dummy_value()

    def typer(typingctx: Any, target: Any, source: Any, factor: Any, num_vectors: Any) -> Any:
        return types.void(types.intp, types.intp, types.float32, types.intp), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


@intrinsic
def join_row(
    typingctx: Any, state: Any, values: Any, more_state: Any, more_values: Any, num_vectors: Any
) -> Any:
    """join_row(state, values, more_state, more_values, num_vectors) on addresses: add a partition's
    values, 16 * num_vectors, to those before it, both rescaled to the larger maximum. A partition
    of weight 0 changes nothing, and nothing of one before it is left."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state, values, more_state, more_values, num_vectors = args
        build = VectorBuilder(builder, fused=FEATURES.fma)
        sums = [build.load(each, F32, 4, align=4) for each in (state, more_state)]
        is_some = builder.fcmp_unordered("!=", sums[1], _ZERO)
        with builder.if_then(is_some, likely=True):
            most = [build.load(each, F32, align=4) for each in (state, more_state)]
            is_first = builder.fcmp_ordered("==", sums[0], _ZERO)
            with builder.if_else(is_first, likely=False) as (first, following):
                with first:
                    _write_state(build, state, most[1], sums[1])
                    _copy(build, values, more_values, num_vectors)
                with following:
                    top, own, other = _factors(build, most)
                    total = builder.fadd(
                        builder.fmul(sums[0], _lane(builder, own)),
                        builder.fmul(sums[1], _lane(builder, other)),
                    )
                    _write_state(build, state, top, total)
                    _add(build, values, own, more_values, other, num_vectors)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


@intrinsic
def finish_row(
    typingctx: Any, out: Any, state: Any, values: Any, value_scale: Any, num_vectors: Any
) -> Any:
    """finish_row(out, state, values, value_scale, num_vectors) on addresses but for the scale f32:
    16 * num_vectors of out f32 = values * (value_scale / sum)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, state, values, value_scale, num_vectors = args
        build = VectorBuilder(builder, fused=FEATURES.fma)
        total = build.load(state, F32, 4, align=4)
        factor = build.broadcast(builder.fdiv(value_scale, total))

        def scale(index: Any, nothing: list[Any]) -> list[Any]:
            x = build.load(build.at(values, index, 4 * LANES), V16F, align=4)
            build.store(
                builder.fmul(x, factor), build.at(out, index, 4 * LANES), align=4
            )
            return nothing

        with builder.if_then(builder.icmp_signed(">", num_vectors, I64(0))):
            build.loop(num_vectors, [], scale)
        return context.get_dummy_value()

    arguments = (types.intp, types.intp, types.intp, types.float32, types.intp)
    return types.void(*arguments), generate


def _factors(build: VectorBuilder, most: list[Any]) -> tuple[Any, Any, Any]:
    """The larger maximum, and what values of either are rescaled by, in every lane."""
    builder = build.builder
    top = larger(builder, *most)
    every_top = build.broadcast(top)
    factors = []
    for each in most:
        x = builder.fsub(build.broadcast(each), every_top)
        # NaN, the second operand, stays.
        x = larger(builder, build.float_constant(_SMALLEST_EXPONENT), x)
        factors.append(build.power_of_two(x))
    return top, factors[0], factors[1]


def _lane(builder: Any, vector: Any) -> Any:
    return builder.extract_element(vector, I64(0))


def _write_state(build: VectorBuilder, state: Any, most: Any, total: Any) -> None:
    build.store(most, state, align=4)
    build.store(total, state, 4, align=4)


def _copy(build: VectorBuilder, target: Any, source: Any, num_vectors: Any) -> None:
    def copy(index: Any, nothing: list[Any]) -> list[Any]:
        x = build.load(build.at(source, index, 4 * LANES), V16F, align=4)
        build.store(x, build.at(target, index, 4 * LANES), align=4)
        return nothing

    build.loop(num_vectors, [], copy)


def _add(
    build: VectorBuilder, values: Any, own: Any, more_values: Any, other: Any, num_vectors: Any
) -> None:
    """values = values * own + more_values * other."""

    def add(index: Any, nothing: list[Any]) -> list[Any]:
        place = build.at(values, index, 4 * LANES)
        x = build.load(place, V16F, align=4)
        more = build.load(build.at(more_values, index, 4 * LANES), V16F, align=4)
        joined = build.multiply_add(more, other, build.builder.fmul(x, own))
        build.store(joined, place, align=4)
        return nothing

    build.loop(num_vectors, [], add)
