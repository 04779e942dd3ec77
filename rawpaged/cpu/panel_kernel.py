"""The inner loop of linear layers, written as LLVM IR: a few rows of x times one weight panel.

    out[r, 0:32] = bias[0:32] + sum over k in order of x[r, k] * panel[k, 0:32]       r < rows

Each element of out is one chain in the order of k, whatever the number of rows; that is what makes
a row's bits independent of the batch. Sums stay in registers for the whole of k. A panel's lines
are 32 words of four bytes, each a float32 or a pair of bfloat16 (`products.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.products import Arithmetic, Products, x_bytes_of_step
from rawpaged.cpu.vector_ir import I64, LANES, V16F, VectorBuilder

VECTORS = 2
PANEL = VECTORS * LANES
"""Columns of a panel."""

_LINE_BYTES = 4 * PANEL

LISTED_LINES = 2
"""Cache lines of what is listed that a step fetches."""


def make_panel_kernel(arithmetic: Arithmetic, most_rows: int) -> Callable[..., None]:
    """An intrinsic for njit code.

        kernel(
            rows, x, x_stride, panel, steps, bias, out, out_stride,
            ahead, ahead_stride, listed, num_listed,
        )

    1 <= rows <= most_rows; x, panel, bias, out, ahead and listed are addresses, strides bytes
    between rows; steps >= 1 counts k, or pairs of k where the panel is in pairs. bias and out are
    float32.

    With at least most_rows / 2 rows each step fetches what will be read later: what lies some way
    ahead in the panel and past its end, and LISTED_LINES of what the addresses i64 at `listed` say
    (`VectorBuilder.fetch_listed`). If num_listed is 0 they fetch ahead_stride bytes instead, at
    most half a step's weights, from ahead + step * ahead_stride on: there is less to do in a step.
    With fewer rows, memory is busy without that.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        rows, *rest = args

        def emit(count: int) -> None:
            _emit(build, arithmetic, count, *rest, fetches=2 * count >= most_rows)

        build.by_number(rows, most_rows, emit)
        return context.get_dummy_value()

    def typer(
        typingctx: Any, rows: Any, x: Any, x_stride: Any, panel: Any, steps: Any, bias: Any,
        out: Any, out_stride: Any, ahead: Any, ahead_stride: Any, listed: Any, num_listed: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 12), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


def _emit(
    build: VectorBuilder, arithmetic: Arithmetic, rows: int, x: Any, x_stride: Any, panel: Any,
    steps: Any, bias: Any, out: Any, out_stride: Any, ahead: Any, ahead_stride: Any, listed: Any,
    num_listed: Any, *, fetches: bool,
) -> None:  # fmt: skip
    """The loop for so many rows."""
    products = Products(build, arithmetic)
    x_rows = build.row_addresses(x, x_stride, rows)
    start = [build.load(bias, V16F, 64 * j, align=4) for j in range(VECTORS)]

    def run(fetch: Callable[[Any], None]) -> None:
        def step(index: Any, sums: list[Any]) -> list[Any]:
            line = build.at(panel, index, _LINE_BYTES)
            if fetches:
                build.fetch_ahead(line, _LINE_BYTES)
                fetch(index)
            places = [build.at(row, index, x_bytes_of_step(arithmetic)) for row in x_rows]
            return products.step(places, [products.load(line, j) for j in range(VECTORS)], sums)

        sums = build.loop(steps, start * rows, step)
        for row, address in enumerate(build.row_addresses(out, out_stride, rows)):
            for j in range(VECTORS):
                build.store(sums[row * VECTORS + j], address, 64 * j, align=4)

    def fetch_panel(index: Any) -> None:
        build.prefetch(build.at(ahead, index, ahead_stride))

    if not fetches:
        run(fetch_panel)
        return
    is_listed = build.builder.icmp_signed(">", num_listed, I64(0))
    with build.builder.if_else(is_listed) as (then, otherwise):
        with then:
            run(lambda index: build.fetch_listed(listed, num_listed, index, LISTED_LINES))
        with otherwise:
            run(fetch_panel)
