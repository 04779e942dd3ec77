"""The two inner loops of attention, written as LLVM IR, for a few rows of one KV head.

    scores[r, 0:16 g] = sum over d in order of q[r, d] * keys[d, 0:16 g]            g key groups
    out[r, 0:16 n] += sum over keys of weights[r, key] * values[key, 0:16 n]        n vectors

Keys and values are found through lists of addresses of groups of 16 keys, so that any blocks of a
paged cache will do. Elements are float32, or pairs of bfloat16 in words: of neighbouring d for
keys, of neighbouring keys for values (`products.py`).

Each element is one chain, whatever the number of rows. The order of keys in a chain is by place in
the group first, then by group: so a handful of streams of memory is read side by side, which is
twice as fast as one after the other. Groups without weight may be left out at the end of the list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.products import Arithmetic, Products, x_bytes_of_step
from rawpaged.cpu.vector_ir import I64, LANES, V16F, VectorBuilder

AHEAD = 8
"""Groups of values that are read side by side; the next as many are prefetched meanwhile."""
MOST_ROWS, STRIP = (6, 4) if FEATURES.avx512f else (2, 2)
"""Rows and vectors of columns whose sums fit the registers."""


def make_score_kernel(arithmetic: Arithmetic) -> Callable[..., None]:
    """An intrinsic kernel(rows, q, q_stride, groups, count, steps, line_bytes, scores,
    scores_stride) for 1 <= rows <= MOST_ROWS.

    `groups` is the address of the addresses of `count` groups of keys, a multiple of AHEAD, and of
    as many more that come next; a group's words for step s lie s * line_bytes on. steps >= 1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        rows, *rest = args
        build.by_number(rows, MOST_ROWS, lambda n: _emit_scores(build, arithmetic, n, *rest))
        return context.get_dummy_value()

    def typer(
        typingctx: Any, rows: Any, q: Any, q_stride: Any, groups: Any, count: Any, steps: Any,
        line_bytes: Any, scores: Any, scores_stride: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 9), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


def make_value_kernel(arithmetic: Arithmetic, vectors: int) -> Callable[..., None]:
    """An intrinsic kernel(rows, weights, weights_stride, groups, count, line_bytes, offset, out,
    out_stride) that adds to out, for 1 <= rows <= MOST_ROWS.

    `groups` is the address of the addresses of 1 <= count <= AHEAD groups of values; the group
    AHEAD places on in the list comes next. The columns begin `offset` bytes into each line.
    weights has the groups side by side.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        rows, *rest = args
        emit = partial(_emit_values, build, arithmetic, vectors)
        build.by_number(rows, MOST_ROWS, lambda n: emit(n, *rest))
        return context.get_dummy_value()

    def typer(
        typingctx: Any, rows: Any, weights: Any, weights_stride: Any, groups: Any, count: Any,
        line_bytes: Any, offset: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 9), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


def _emit_scores(
    build: VectorBuilder, arithmetic: Arithmetic, rows: int, q: Any, q_stride: Any, groups: Any,
    count: Any, steps: Any, line_bytes: Any, scores: Any, scores_stride: Any,
) -> None:  # fmt: skip
    """The loops for so many rows; as many groups at a time as it takes to hide latencies."""
    builder, products = build.builder, Products(build, arithmetic)
    at_once = (AHEAD if rows <= 3 else AHEAD // 2) if FEATURES.avx512f else 2
    q_rows = build.row_addresses(q, q_stride, rows)
    score_rows = build.row_addresses(scores, scores_stride, rows)

    def some_groups(number: Any, nothing: list[Any]) -> list[Any]:
        listed_at = build.at(groups, number, 8 * at_once)
        listed = [build.load(listed_at, I64, 8 * j) for j in range(2 * at_once)]
        keys, following = listed[:at_once], listed[at_once:]

        def step(index: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(index, line_bytes)
            for group in following:
                build.prefetch(builder.add(group, offset))
            weights = [products.load(builder.add(group, offset)) for group in keys]
            places = [build.at(row, index, x_bytes_of_step(arithmetic)) for row in q_rows]
            return products.step(places, weights, sums)

        sums = build.loop(steps, [build.zeros()] * (rows * at_once), step)
        for row, address in enumerate(score_rows):
            target = build.at(address, number, 64 * at_once)
            for j in range(at_once):
                build.store(sums[row * at_once + j], target, 64 * j, align=4)
        return nothing

    build.loop(builder.sdiv(count, I64(at_once)), [], some_groups)


def _emit_values(
    build: VectorBuilder, arithmetic: Arithmetic, vectors: int, rows: int, weights: Any,
    weights_stride: Any, groups: Any, count: Any, line_bytes: Any, offset: Any, out: Any,
    out_stride: Any,
) -> None:  # fmt: skip
    """The loops for so many rows."""
    builder, products = build.builder, Products(build, arithmetic)
    steps = LANES if arithmetic == "float32" else LANES // 2
    bytes_of_step = x_bytes_of_step(arithmetic)
    weight_rows = build.row_addresses(weights, weights_stride, rows)
    out_rows = build.row_addresses(out, out_stride, rows)

    def step(index: Any, sums: list[Any]) -> list[Any]:
        line = build.at(offset, index, line_bytes)
        first_places = [build.at(row, index, bytes_of_step) for row in weight_rows]

        def group(number: Any, sums: list[Any]) -> list[Any]:
            entry = build.at(groups, number, 8)
            address = builder.add(build.load(entry, I64), line)
            following = builder.add(build.load(entry, I64, 8 * AHEAD), line)
            for j in range(vectors):
                build.prefetch(following, 64 * j)
            values = [products.load(address, j) for j in range(vectors)]
            places = [build.at(place, number, steps * bytes_of_step) for place in first_places]
            return products.step(places, values, sums)

        return build.loop(count, sums, group)

    start = [build.load(row, V16F, 64 * j, align=4) for row in out_rows for j in range(vectors)]
    sums = build.loop(I64(steps), start, step)
    for row, address in enumerate(out_rows):
        for j in range(vectors):
            build.store(sums[row * vectors + j], address, 64 * j, align=4)
