"""The two inner loops of attention, written as LLVM IR, for a few rows of one KV head.

    scores[r, 0:16 g] = sum over d in order of q[r, d] * keys[d, 0:16 g]            g key groups
    out[r, 0:16 n] += sum over keys in order of weights[r, key] * values[key, 0:16 n]   n vectors

Keys and values are found through lists of addresses of groups of 16 keys, so that any blocks of a
paged cache will do. Elements are float32, or pairs of bfloat16 in words: of neighbouring d for
keys, of neighbouring keys for values (`products.py`).

Each element is one chain, whatever the number of rows. While a group is in use, the one AHEAD
places further in the order of use is prefetched, of whatever partition or task it is: blocks lie
anywhere, and the processor's own prefetching gives up at the end of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.products import Arithmetic, Products, x_bytes_of_step
from rawpaged.cpu.vector_ir import I64, LANES, V16F, V16I, VectorBuilder

I1 = ir.IntType(1)

_DISTANCES = (8, 16)
"""Groups between one in use and those that are prefetched. The processor drops a prefetch when too
many are under way, as happens where there is little to compute; so it is asked more than once."""
AHEAD = _DISTANCES[-1]
_FEW_ROWS = 4
"""Up to so many rows, memory is what is waited for."""
MOST_ROWS, STRIP = (6, 4) if FEATURES.avx512f else (2, 2)
"""Rows and vectors of columns whose sums fit the registers."""
_ROWS = (1, 2, 3, 4, MOST_ROWS) if FEATURES.avx512f else (1, 2)
_ROWS_OF_VECTOR = (2, MOST_ROWS) if FEATURES.avx512f else (2,)
"""Numbers of rows that there is code for: each takes long to compile. Others are computed as the
next larger one, with the last row again; one vector of columns at a time is for odd head sizes."""


_AT_ONCE, _AT_ONCE_OF_FEW = (4, 8) if FEATURES.avx512f else (2, 2)
"""Groups of keys whose scores are summed side by side: what it takes to hide latencies, and more
where registers are left, as memory is faster when more groups are read at a time."""


def make_score_kernel(arithmetic: Arithmetic) -> Callable[..., None]:
    """An intrinsic kernel(rows, q, q_stride, groups, ahead, count, steps, line_bytes, ahead_bytes,
    scores, scores_stride) for 1 <= rows <= MOST_ROWS.

    `groups` is the address of the addresses of count >= 1 groups of keys; a group's words for step
    s of `steps` lie s * line_bytes on. `ahead` and ahead_bytes say the same of what to prefetch.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        rows, *rest = args
        _by_rows(build, rows, _ROWS, partial(_emit_scores, build, arithmetic), rest)
        return context.get_dummy_value()

    def typer(
        typingctx: Any, rows: Any, q: Any, q_stride: Any, groups: Any, ahead: Any, count: Any,
        steps: Any, line_bytes: Any, ahead_bytes: Any, scores: Any, scores_stride: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 11), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


def make_value_kernel(arithmetic: Arithmetic, vectors: int) -> Callable[..., None]:
    """An intrinsic kernel(rows, weights, weights_stride, groups, ahead, ahead_shift, count, steps,
    line_bytes, offset, out, out_stride) that adds to out, for 1 <= rows <= MOST_ROWS.

    `groups` is the address of the addresses of count >= 1 groups of values, of each of which the
    first `steps` lines count, at least one. The columns begin `offset` bytes into each line.
    weights has the groups side by side. `ahead` are groups to prefetch, smaller by
    2 ** ahead_shift.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        rows, *rest = args
        variants = _ROWS if vectors > 1 else _ROWS_OF_VECTOR
        _by_rows(build, rows, variants, partial(_emit_values, build, arithmetic, vectors), rest)
        return context.get_dummy_value()

    def typer(
        typingctx: Any, rows: Any, weights: Any, weights_stride: Any, groups: Any, ahead: Any,
        ahead_shift: Any, count: Any, steps: Any, line_bytes: Any, offset: Any, out: Any,
        out_stride: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 12), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


@intrinsic
def copy_lower_halves(typingctx: Any, target: Any, source: Any, num_vectors: Any) -> Any:
    """copy_lower_halves(target, source, num_vectors): 16 * num_vectors words, upper halves 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, num_vectors = args
        build = VectorBuilder(builder, fused=FEATURES.fma)

        def copy(index: Any, nothing: list[Any]) -> list[Any]:
            words = build.load(build.at(source, index, 64), V16I)
            lower = builder.and_(words, build.constant(0xFFFF))
            build.store(lower, build.at(target, index, 64))
            return nothing

        build.loop(num_vectors, [], copy)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def prefetch(typingctx: Any, address: Any, num_bytes: Any) -> Any:
    """prefetch(address, num_bytes > 0): the cache lines of a range that will be read soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, num_bytes = args
        build = VectorBuilder(builder, fused=FEATURES.fma)

        def line(index: Any, nothing: list[Any]) -> list[Any]:
            build.prefetch(build.at(address, index, 64))
            return nothing

        num_lines = builder.sdiv(builder.add(num_bytes, I64(63)), I64(64))
        build.loop(num_lines, [], line)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 2), generate


def _by_rows(
    build: VectorBuilder, rows: Any, variants: tuple[int, ...], emit: Callable[..., None], rest: Any
) -> None:
    """The code of emit(variant, rows, *rest) for the least of the variants that has room."""
    builder = build.builder
    end = builder.append_basic_block("end")
    switch = builder.switch(rows, end)
    for below, variant in zip((0, *variants), variants, strict=False):
        block = builder.append_basic_block(f"up_to_{variant}")
        for number in range(below + 1, variant + 1):
            switch.add_case(I64(number), block)
        builder.position_at_end(block)
        emit(variant, rows, *rest)
        builder.branch(end)
    builder.position_at_end(end)


def _row_addresses(build: VectorBuilder, base: Any, stride: Any, variant: int, rows: Any) -> Any:
    """Those of `rows` rows, and the last one's again where the variant has more."""
    builder = build.builder
    last = builder.sub(rows, I64(1))
    addresses = []
    for row in range(variant):
        is_within = builder.icmp_signed("<", I64(row), last)
        addresses.append(build.at(base, builder.select(is_within, I64(row), last), stride))
    return addresses


def _following(build: VectorBuilder, ahead: Any, rows: int, number: int) -> list[Any]:
    """The groups to prefetch while `number` groups from entry `ahead` on are in use."""
    distances = _DISTANCES if rows <= _FEW_ROWS else _DISTANCES[-1:]
    return [build.load(ahead, I64, 8 * (far + j)) for far in distances for j in range(number)]


def _emit_scores(
    build: VectorBuilder, arithmetic: Arithmetic, rows: int, real_rows: Any, q: Any, q_stride: Any,
    groups: Any, ahead: Any, count: Any, steps: Any, line_bytes: Any, ahead_bytes: Any,
    scores: Any, scores_stride: Any,
) -> None:  # fmt: skip
    """The loops for so many rows: some groups at a time, then half as many, down to one."""
    builder, products = build.builder, Products(build, arithmetic)
    q_rows = _row_addresses(build, q, q_stride, rows, real_rows)
    score_rows = _row_addresses(build, scores, scores_stride, rows, real_rows)
    at_once = _AT_ONCE_OF_FEW if 8 * rows <= MOST_ROWS * _AT_ONCE else _AT_ONCE

    def some_groups(first: Any, number: int) -> None:
        keys = [build.load(build.at(groups, first, 8), I64, 8 * j) for j in range(number)]
        following = _following(build, build.at(ahead, first, 8), rows, number)

        def step(index: Any, sums: list[Any]) -> list[Any]:
            for group in following:
                build.prefetch(build.at(group, index, ahead_bytes))
            weights = [products.load(build.at(group, index, line_bytes)) for group in keys]
            places = [build.at(row, index, x_bytes_of_step(arithmetic)) for row in q_rows]
            return products.step(places, weights, sums)

        sums = build.loop(steps, [build.zeros()] * (rows * number), step)
        for row, address in enumerate(score_rows):
            target = build.at(address, first, 64)
            for j in range(number):
                build.store(sums[row * number + j], target, 64 * j, align=4)

    def most_groups(index: Any, nothing: list[Any]) -> list[Any]:
        some_groups(builder.mul(index, I64(at_once)), at_once)
        return nothing

    whole = builder.sdiv(count, I64(at_once))
    with builder.if_then(builder.icmp_signed(">", whole, I64(0))):
        build.loop(whole, [], most_groups)
    number = at_once // 2
    while number:
        with builder.if_then(builder.trunc(builder.udiv(count, I64(number)), I1)):
            some_groups(builder.and_(count, I64(-2 * number)), number)
        number //= 2


def _emit_values(
    build: VectorBuilder, arithmetic: Arithmetic, vectors: int, rows: int, real_rows: Any,
    weights: Any, weights_stride: Any, groups: Any, ahead: Any, ahead_shift: Any, count: Any,
    steps: Any, line_bytes: Any, offset: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """The loops for so many rows."""
    builder, products = build.builder, Products(build, arithmetic)
    bytes_of_step = x_bytes_of_step(arithmetic)
    group_bytes = bytes_of_step * (LANES if arithmetic == "float32" else LANES // 2)
    weight_rows = _row_addresses(build, weights, weights_stride, rows, real_rows)
    out_rows = _row_addresses(build, out, out_stride, rows, real_rows)

    def group(number: Any, sums: list[Any]) -> list[Any]:
        values_at = build.load(build.at(groups, number, 8), I64)
        following = _following(build, build.at(ahead, number, 8), rows, 1)
        first_places = [build.at(row, number, group_bytes) for row in weight_rows]

        def step(index: Any, sums: list[Any]) -> list[Any]:
            line = build.at(offset, index, line_bytes)
            for j in range(vectors):
                place = builder.add(line, I64(64 * j)) if j else line
                place = builder.lshr(place, ahead_shift)
                for following_group in following:
                    build.prefetch(builder.add(following_group, place))
            address = builder.add(values_at, line)
            values = [products.load(address, j) for j in range(vectors)]
            places = [build.at(place, index, bytes_of_step) for place in first_places]
            return products.step(places, values, sums)

        return build.loop(steps, sums, step)

    start = [build.load(row, V16F, 64 * j, align=4) for row in out_rows for j in range(vectors)]
    sums = build.loop(count, start, group)
    for row, address in enumerate(out_rows):
        for j in range(vectors):
            build.store(sums[row * vectors + j], address, 64 * j, align=4)
