"""The inner loop of linear layers over quantised weights, written as LLVM IR.

    out[r, 0:32] = bias[0:32] + sum over blocks in order of scale * s * dot + minimum * s * sum

x comes as integers of 8 bits with a scale s for each 32 of them (`quantized_activations.py`); dot
is the exact integer sum over a block of code * x, less zero times the sum of x. There are two ways
to it that give equal bits, as whole numbers below 2**24 are exact in float32 too:

    byte_dots   u8 times i8, four at a time, by AVX512-VNNI
    floats      codes widened to float32 in registers, multiply-adds; for any processor

Each element of out is one chain in the order of k, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.block_types import BLOCK, HALF_PANEL, LINE_BYTES, WORDS, BlockType
from rawpaged.cpu.features import FEATURES, CpuFeatures
from rawpaged.cpu.vector_ir import F32, I8, I32, I64, V16F, V16I, VectorBuilder

BlockArithmetic = Literal["byte_dots", "floats"]

NUMBERS_BYTES = 16
"""After the codes of a block of x: s, s * sum, -sum, and -sum of its second half."""

LISTED_LINES = 4
"""Cache lines of what is listed that each block of 32 of each half of a panel fetches."""

_V16B = ir.VectorType(I8, HALF_PANEL)


def best_block_arithmetic(features: CpuFeatures = FEATURES) -> BlockArithmetic:
    """The faster way that the processor has."""
    return "byte_dots" if features.avx512_vnni else "floats"


def code_bytes(arithmetic: BlockArithmetic) -> int:
    """Bytes of the codes of a block of x."""
    return BLOCK if arithmetic == "byte_dots" else 4 * BLOCK


def make_block_kernel(
    kind: BlockType, arithmetic: BlockArithmetic, most_rows: int
) -> Callable[..., None]:
    """An intrinsic for njit code, called like `make_panel_kernel`'s.

    steps >= 1 counts steps of the panel. bias and out are float32. What lies ahead of the panel is
    fetched in any case, so `ahead` and `ahead_stride` are not needed; what is listed is fetched
    with at least most_rows / 2 rows.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        rows, *rest = args
        build.by_number(
            rows,
            most_rows,
            lambda n: _BlockKernel(
                build, kind, arithmetic, n, fetches=2 * n >= most_rows
            ).build(*rest),
        )
        return context.get_dummy_value()

    def typer(
        typingctx: Any, rows: Any, x: Any, x_stride: Any, panel: Any, steps: Any, bias: Any,
        out: Any, out_stride: Any, ahead: Any, ahead_stride: Any, listed: Any, num_listed: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 12), generate

    kernel: Callable[..., None] = intrinsic(typer)
    return kernel


class _BlockKernel:
    """Emits one kernel."""

    def __init__(
        self, build: VectorBuilder, kind: BlockType, arithmetic: BlockArithmetic, rows: int, *,
        fetches: bool,
    ) -> None:  # fmt: skip
        self._build = build
        self._kind = kind
        self._rows = rows
        self._by_bytes = arithmetic == "byte_dots"
        self._code_bytes = code_bytes(arithmetic)
        self._fetches = fetches

    def build(
        self, x: Any, x_stride: Any, panel: Any, steps: Any, bias: Any, out: Any, out_stride: Any,
        ahead: Any, ahead_stride: Any, listed: Any, num_listed: Any,
    ) -> None:  # fmt: skip
        del ahead, ahead_stride
        self._listed = listed, num_listed
        build, kind = self._build, self._kind
        x_rows = build.row_addresses(x, x_stride, self._rows)
        out_rows = build.row_addresses(out, out_stride, self._rows)
        half_bytes = build.builder.mul(steps, I64(kind.step_bytes))

        def half(index: Any, _: list[Any]) -> list[Any]:
            first = build.at(panel, index, half_bytes)
            first_step = build.builder.mul(index, steps)
            start = build.load(build.at(bias, index, LINE_BYTES), V16F, align=4)

            def step(number: Any, sums: list[Any]) -> list[Any]:
                place = build.at(first, number, kind.step_bytes)
                done = build.builder.add(first_step, number)
                return self._step(x_rows, place, number, done, sums)

            for row, total in zip(
                out_rows, build.loop(steps, [start] * self._rows, step), strict=True
            ):
                build.store(total, build.at(row, index, LINE_BYTES), align=4)
            return []

        build.loop(I64(2), [], half)

    def _step(
        self, x_rows: list[Any], place: Any, number: Any, done: Any, sums: list[Any]
    ) -> list[Any]:
        """Step `number` of a half panel; `done` steps of the panel were before it."""
        build, kind = self._build, self._kind
        scale = build.load_halves(place)
        minimum = build.load_halves(place, 2 * HALF_PANEL) if kind.has_minima else None
        blocks = build.builder.add(place, I64(kind.header_bytes))
        x_bytes = self._code_bytes + NUMBERS_BYTES
        if not kind.is_k_type:
            self._fetch(place, kind.step_bytes, done)
            places = [build.at(row, number, x_bytes) for row in x_rows]
            return self._block(places, blocks, [scale], minimum, sums)
        first, blocks_done = (
            build.builder.mul(each, I64(kind.blocks_per_step)) for each in (number, done)
        )

        def block(index: Any, sums: list[Any]) -> list[Any]:
            at = build.at(blocks, index, kind.block_bytes)
            self._fetch(at, kind.block_bytes, build.builder.add(blocks_done, index))
            of_x = build.builder.add(first, index)
            places = [build.at(row, of_x, x_bytes) for row in x_rows]
            scales = [
                build.builder.fmul(scale, self._small(at, HALF_PANEL * group))
                for group in range(kind.groups)
            ]
            own = None
            if minimum is not None:
                own = build.builder.fmul(minimum, self._small(at, HALF_PANEL * kind.groups))
            return self._block(places, at, scales, own, sums)

        return build.loop(I64(kind.blocks_per_step), sums, block)

    def _fetch(self, place: Any, size: int, done: Any) -> None:
        """What is read later, while a block at `place` is used; `done` blocks were before it."""
        self._build.fetch_ahead(place, size)
        if self._fetches:
            self._build.fetch_listed(*self._listed, done, LISTED_LINES)

    def _small(self, place: Any, offset: int) -> Any:
        """Sixteen integers of 8 bits as floats: signed for scales in groups."""
        builder = self._build.builder
        value = self._build.load(place, _V16B, offset)
        if self._kind.groups > 1:
            return builder.sitofp(builder.sext(value, V16I), V16F)
        return builder.uitofp(builder.zext(value, V16I), V16F)

    def _block(
        self, x: list[Any], place: Any, scales: Sequence[Any], minimum: Any, sums: list[Any]
    ) -> list[Any]:
        """One block of 32: x and place are addresses."""
        build, builder = self._build, self._build.builder
        codes = _Codes(build, self._kind, place)
        words_of_group = WORDS // len(scales)
        for group, scale in enumerate(scales):
            dots = [self._start(row, group) for row in x]
            for word in range(group * words_of_group, (group + 1) * words_of_group):
                dots = self._dot(x, word, codes.word(word), dots)
            for row, dot in enumerate(dots):
                if self._by_bytes:
                    dot = builder.sitofp(dot, V16F)
                factor = builder.fmul(scale, self._number(x[row], 0))
                sums[row] = build.multiply_add(dot, factor, sums[row])
        if minimum is not None:
            for row, address in enumerate(x):
                sums[row] = build.multiply_add(minimum, self._number(address, 4), sums[row])
        return sums

    def _number(self, x: Any, offset: int) -> Any:
        """One of the numbers of a block of x, sixteen times."""
        return self._build.broadcast(self._build.load(x, F32, self._code_bytes + offset, align=4))

    def _start(self, x: Any, group: int) -> Any:
        """-zero * sum of the group's x."""
        build, builder, kind = self._build, self._build.builder, self._kind
        if kind.zero == 0:
            return build.constant(0) if self._by_bytes else build.zeros()
        total = build.load(x, I32, self._code_bytes + 8, align=4)
        if kind.groups > 1:
            second = build.load(x, I32, self._code_bytes + 12, align=4)
            total = second if group else builder.sub(total, second)
        total = builder.shl(total, I32(kind.zero.bit_length() - 1))
        return build.broadcast(total if self._by_bytes else builder.sitofp(total, F32))

    def _dot(self, x: list[Any], word: int, codes: Any, dots: list[Any]) -> list[Any]:
        """dots + four products for each row and column."""
        build, builder = self._build, self._build.builder
        if self._by_bytes:
            return [
                build.byte_dot(dot, codes, build.broadcast(build.load(row, I32, 4 * word, align=4)))
                for row, dot in zip(x, dots, strict=True)
            ]
        for i in range(4):
            byte = builder.and_(builder.lshr(codes, build.constant(8 * i)), build.constant(255))
            weight = builder.sitofp(byte, V16F)
            dots = [
                build.multiply_add(
                    build.broadcast(build.load(row, F32, 4 * (4 * word + i), align=4)), weight, dot
                )
                for row, dot in zip(x, dots, strict=True)
            ]
        return dots


class _Codes:
    """Words of codes of a block: loads each line once."""

    def __init__(self, build: VectorBuilder, kind: BlockType, place: Any) -> None:
        self._build = build
        self._kind = kind
        self._place = place
        self._lines: dict[int, Any] = {}

    def word(self, index: int) -> Any:
        """<16 x i32>: four codes of each column."""
        build, builder, kind = self._build, self._build.builder, self._kind
        if kind.bits == 8:
            return self._line(index)
        line = self._line(kind.high_lines + index // 2)
        if index % 2:
            line = builder.lshr(line, build.constant(4))
        low = builder.and_(line, build.constant(0x0F0F0F0F))
        if kind.bits == 4:
            return low
        # Bits of word `index` to the fourth and above; the mask drops those of other bytes.
        width = kind.bits - 4
        per_line = WORDS // kind.high_lines
        shift = 4 - width * (index % per_line)
        high = self._line(index // per_line)
        if shift > 0:
            high = builder.shl(high, build.constant(shift))
        elif shift < 0:
            high = builder.lshr(high, build.constant(-shift))
        mask = 0x10101010 if width == 1 else 0x30303030
        return builder.or_(low, builder.and_(high, build.constant(mask)))

    def _line(self, index: int) -> Any:
        if index not in self._lines:
            offset = self._kind.scale_bytes + LINE_BYTES * index
            self._lines[index] = self._build.load(self._place, V16I, offset)
        return self._lines[index]
