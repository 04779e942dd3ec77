"""The inner loop of linear layers, written as LLVM IR: a few rows of x times one weight panel.

    out[r, 0:32] = bias[0:32] + sum over k in order of x[r, k] * panel[k, 0:32]       r < rows

Each element of out is one chain in the order of k, whatever the number of rows; that is what makes
a row's bits independent of the batch. Sums stay in registers for the whole of k.

    float32        x f32, panel f32[k][32]; a chain of multiply-adds
    bfloat16       x f32, panel bf16[k / 2][32][2] widened in registers; the same chain
    bfloat16_dot   x and panel bf16 in pairs; two products a link, summed by AVX512-BF16
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.vector_ir import F32, I32, LANES, V16F, V16I, VectorBuilder

Arithmetic = Literal["float32", "bfloat16", "bfloat16_dot"]

VECTORS = 2
PANEL = VECTORS * LANES
"""Columns of a panel."""

_LINE_BYTES = 4 * PANEL
_UPPER_HALF = -(1 << 16)


def make_panel_kernel(arithmetic: Arithmetic, most_rows: int) -> Callable[..., None]:
    """An intrinsic kernel(rows, x, x_stride, panel, steps, bias, out, out_stride) for njit code.

    1 <= rows <= most_rows; x, panel, bias and out are addresses, strides bytes between rows; steps
    >= 1 counts k, or pairs of k where the panel is in pairs. bias and out are float32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        rows, *rest = args
        build.by_number(rows, most_rows, lambda n: _PanelKernel(build, arithmetic, n).build(*rest))
        return context.get_dummy_value()

    def typer(
        typingctx: Any, rows: Any, x: Any, x_stride: Any, panel: Any, steps: Any, bias: Any,
        out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 8), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


class _PanelKernel:
    """Emits one kernel."""

    def __init__(self, build: VectorBuilder, arithmetic: Arithmetic, rows: int) -> None:
        self._build = build
        self._rows = rows
        self._products = {
            "float32": self._float32,
            "bfloat16": self._bfloat16,
            "bfloat16_dot": self._bfloat16_dot,
        }[arithmetic]

    def build(
        self, x: Any, x_stride: Any, panel: Any, steps: Any, bias: Any, out: Any, out_stride: Any
    ) -> None:
        build = self._build
        x_rows = build.row_addresses(x, x_stride, self._rows)
        start = [build.load(bias, V16F, 64 * j, align=4) for j in range(VECTORS)]

        def step(index: Any, sums: list[Any]) -> list[Any]:
            return self._products(x_rows, panel, index, sums)

        sums = build.loop(steps, start * self._rows, step)
        for row, address in enumerate(build.row_addresses(out, out_stride, self._rows)):
            for j in range(VECTORS):
                build.store(sums[row * VECTORS + j], address, 64 * j, align=4)

    def _float32(self, x_rows: list[Any], panel: Any, index: Any, sums: list[Any]) -> list[Any]:
        line = self._build.at(panel, index, _LINE_BYTES)
        weights = [self._build.load(line, V16F, 64 * j, align=4) for j in range(VECTORS)]
        places = [self._build.at(row, index, 4) for row in x_rows]
        return self._multiply_add(places, 0, weights, sums)

    def _bfloat16(self, x_rows: list[Any], panel: Any, index: Any, sums: list[Any]) -> list[Any]:
        builder = self._build.builder
        pairs = self._pairs(panel, index)
        shift, mask = self._build.constant(16), self._build.constant(_UPPER_HALF)
        first = [builder.bitcast(builder.shl(pair, shift), V16F) for pair in pairs]
        second = [builder.bitcast(builder.and_(pair, mask), V16F) for pair in pairs]
        places = [self._build.at(row, index, 8) for row in x_rows]
        sums = self._multiply_add(places, 0, first, sums)
        return self._multiply_add(places, 4, second, sums)

    def _bfloat16_dot(
        self, x_rows: list[Any], panel: Any, index: Any, sums: list[Any]
    ) -> list[Any]:
        build = self._build
        pairs = self._pairs(panel, index)
        result = []
        for row, address in enumerate(x_rows):
            x = build.broadcast(build.load(build.at(address, index, 4), I32, align=2))
            for j, pair in enumerate(pairs):
                result.append(build.bfloat16_dot(sums[row * VECTORS + j], x, pair))
        return result

    def _multiply_add(
        self, places: list[Any], offset: int, weights: list[Any], sums: list[Any]
    ) -> list[Any]:
        """One k: the element of x at each place, `offset` bytes on, times the weights."""
        build = self._build
        result = []
        for row, place in enumerate(places):
            x = build.broadcast(build.load(place, F32, offset, align=4))
            for j, weight in enumerate(weights):
                result.append(build.multiply_add(x, weight, sums[row * VECTORS + j]))
        return result

    def _pairs(self, panel: Any, index: Any) -> list[Any]:
        line = self._build.at(panel, index, _LINE_BYTES)
        return [self._build.load(line, V16I, 64 * j, align=2) for j in range(VECTORS)]
