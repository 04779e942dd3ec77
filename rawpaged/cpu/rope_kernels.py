"""Parts of rope_and_store_kv that LLVM does not vectorise by itself, written as LLVM IR."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.vector_ir import F32, I16, I32, I64, LANES, V16F, V16H, V16I, VectorBuilder

_V32H = ir.VectorType(I16, 2 * LANES)
_I1 = ir.IntType(1)


@intrinsic
def rotate(
    typingctx: Any, target: Any, source: Any, cosines: Any, sines: Any, half: Any
) -> Any:
    """rotate(target, source, cosines, sines, half) on addresses: 2 * half of source f32 turned by
    the angles, `half` pairs of neighbours half apart. target may be source. Products and sums are
    rounded each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, cosines, sines, half = args
        build = VectorBuilder(builder, fused=False)
        half_bytes = builder.mul(half, I64(4))

        def turn(type_: Any, place: Any) -> None:
            low, high, cosine, sine = (
                build.load(builder.add(base, place), type_, align=4)
                for base in (source, builder.add(source, half_bytes), cosines, sines)
            )
            lower = builder.fsub(builder.fmul(low, cosine), builder.fmul(high, sine))
            upper = builder.fadd(builder.fmul(high, cosine), builder.fmul(low, sine))
            place = builder.add(target, place)
            build.store(lower, place, align=4)
            build.store(upper, builder.add(place, half_bytes), align=4)

        def vectors(index: Any, nothing: list[Any]) -> list[Any]:
            turn(V16F, builder.mul(index, I64(4 * LANES)))
            return nothing

        whole = builder.ashr(half, I64(4))
        with builder.if_then(builder.icmp_signed(">", whole, I64(0))):
            build.loop(whole, [], vectors)

        def rest(index: Any, nothing: list[Any]) -> list[Any]:
            first = builder.mul(whole, I64(LANES))
            turn(F32, builder.mul(builder.add(first, index), I64(4)))
            return nothing

        number = builder.and_(half, I64(LANES - 1))
        with builder.if_then(builder.icmp_signed(">", number, I64(0))):
            build.loop(number, [], rest)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


@intrinsic
def scatter_words(
    typingctx: Any, target: Any, stride: Any, source: Any, count: Any, word_bytes: Any
) -> Any:
    """scatter_words(target, stride, source, count, word_bytes): `count` words of 2 or 4 bytes that
    lie side by side, to addresses `stride` apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, stride, source, count, word_bytes = args
        build = VectorBuilder(builder, fused=False)

        def copy_of(word: Any, size: int) -> None:
            def copy(index: Any, nothing: list[Any]) -> list[Any]:
                value = build.load(build.at(source, index, size), word)
                build.store(value, build.at(target, index, stride))
                return nothing

            build.loop(count, [], copy)

        is_wide = builder.icmp_signed("==", word_bytes, I64(4))
        with builder.if_else(is_wide) as (wide, narrow):
            with wide:
                copy_of(I32, 4)
            with narrow:
                copy_of(I16, 2)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


@intrinsic
def store_halves(
    typingctx: Any, target: Any, source: Any, num_vectors: Any, is_upper: Any
) -> Any:
    """store_halves(target, source, num_vectors, is_upper) on addresses: 16 * num_vectors halves of
    two bytes, that lie side by side, become the lower or upper halves of as many words.

    The other halves are not touched: another thread may write them.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, num_vectors, is_upper = args
        build = VectorBuilder(builder, fused=FEATURES.fma)

        def store_into(upper: int) -> None:
            mask = ir.Constant(ir.VectorType(_I1, 2 * LANES), [upper ^ 1, upper] * LANES)

            def store(index: Any, nothing: list[Any]) -> list[Any]:
                halves = build.load(build.at(source, index, 2 * LANES), V16H, align=2)
                words = builder.zext(halves, V16I)
                if upper:
                    words = builder.shl(words, build.constant(16))
                place = build.at(target, index, 4 * LANES)
                pointer = builder.inttoptr(place, _V32H.as_pointer())
                build.call(
                    "llvm.masked.store.v32i16.p0",
                    ir.VoidType(),
                    builder.bitcast(words, _V32H),
                    pointer,
                    I32(2),
                    mask,
                )
                return nothing

            build.loop(num_vectors, [], store)

        with builder.if_else(builder.icmp_signed("!=", is_upper, I64(0))) as (upper, lower):
            with upper:
                store_into(1)
            with lower:
                store_into(0)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


