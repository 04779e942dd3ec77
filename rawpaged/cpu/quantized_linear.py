"""Linear layers and the embedding over weights that stay in GGUF's blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from rawpaged.cpu.arguments import RowsOf
from rawpaged.cpu.block_kernel import (
    LISTED_LINES,
    NUMBERS_BYTES,
    BlockArithmetic,
    best_block_arithmetic,
    code_bytes,
    make_block_kernel,
)
from rawpaged.cpu.block_packing import pack_blocks
from rawpaged.cpu.block_types import BLOCK, BLOCK_TYPES, HALF_PANEL, LINE_BYTES, BlockType
from rawpaged.cpu.compiling import Kernel, set_variant
from rawpaged.cpu.kv_ahead import KVAhead
from rawpaged.cpu.linear import MOST_ROWS, ROW_GRAIN, make_linear_kernel, run_linear_kernel
from rawpaged.cpu.linear_inputs import Input, LinearInput, check_form
from rawpaged.cpu.panel_kernel import PANEL
from rawpaged.cpu.quantized_activations import make_block_quantizer
from rawpaged.cpu.threads import PerRow, ThreadTeam
from rawpaged.cpu.weight_memory import Allocate

_MOST_ROWS: dict[BlockArithmetic, int] = {"byte_dots": MOST_ROWS, "floats": 4}
"""Rows of a tile. With floats more would gain little and take long to compile."""

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """W [out_features, in_features] of one of BLOCK_TYPES in panels of 32 columns."""

    kind: BlockType
    panels: npt.NDArray[np.uint8]  # u8[num_panels, steps, 2 * step_bytes]
    bias: Float32  # f32[num_panels * 32], zeros where there is none
    out_features: int

    @property
    def in_features(self) -> int:
        return int(self.panels.shape[1]) * self.kind.step_size

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + self.bias.nbytes

    @property
    def row_types(self) -> tuple[tuple[str | None, int], ...]:
        return ((self.kind.name, self.out_features),)


def pack_quantized(
    type_name: str,
    rows: npt.NDArray[np.uint8],
    bias: npt.NDArray[Any] | None,
    allocate: Allocate = np.empty,
) -> QuantizedLinear:
    """Lay out rows u8[out_features, row_bytes] of blocks; no weight changes by it."""
    kind = BLOCK_TYPES[type_name]
    panels = pack_blocks(rows, kind, allocate)
    packed_bias = np.zeros(len(panels) * PANEL, np.float32)
    if bias is not None:
        packed_bias[: len(rows)] = bias
    return QuantizedLinear(kind, panels, packed_bias, len(rows))


class QuantizedLinearOp:
    """out = x @ W.T + bias, with x as integers of 8 bits; keeps room for them."""

    def __init__(
        self,
        team: ThreadTeam,
        arithmetic: BlockArithmetic | None = None,
        ahead: KVAhead | None = None,
    ) -> None:
        """`arithmetic`: None for the fastest that the processor has."""
        self._team = team
        self._ahead = ahead or KVAhead(team)
        self._arithmetic = arithmetic or best_block_arithmetic()
        self._scratch = np.empty(0, np.uint8)

    def prepare(self, x: Input) -> npt.NDArray[np.uint8]:
        """x f32[n, in_features] as `multiply` takes it, until the next call; rows one by one."""
        if isinstance(x, LinearInput):
            check_form(x, np.uint8)
            return x.data
        rows, columns = x.shape
        row_bytes = columns // BLOCK * (code_bytes(self._arithmetic) + NUMBERS_BYTES)
        if rows * row_bytes > len(self._scratch):
            self._scratch = np.empty(rows * row_bytes, np.uint8)
        prepared = self._scratch[: rows * row_bytes].reshape(rows, row_bytes)
        kernel = _quantizer(self._arithmetic)
        grain = 1 + ROW_GRAIN // columns
        self._team.run(kernel, PerRow(rows), RowsOf(prepared), RowsOf(x), grain=grain)
        return prepared

    def multiply(
        self, out: Float32, prepared: npt.NDArray[np.uint8], weight: QuantizedLinear
    ) -> None:
        """out f32[n, out_features], rows of any stride."""
        kernel = _linear_kernel(weight.kind, self._arithmetic)
        share = self._ahead.share(weight.in_features * weight.out_features)
        run_linear_kernel(self._team, kernel, out, prepared, weight.panels, weight.bias, share)

    def embed(
        self, out: Float32, token_ids: npt.NDArray[np.int32], table: QuantizedLinear
    ) -> None:
        """out f32[n, in_features] = rows of the table, dequantised exactly."""
        grain = 1 + ROW_GRAIN // table.in_features
        kernel = _embed_kernel(table.kind)
        self._team.run(kernel, PerRow(len(out)), out, token_ids, table.panels, grain=grain)

    def release(self) -> None:
        """Give the room back."""
        self._scratch = np.empty(0, np.uint8)


@cache
def _quantizer(arithmetic: BlockArithmetic) -> Kernel:
    return make_block_quantizer(arithmetic)


@cache
def _linear_kernel(kind: BlockType, arithmetic: BlockArithmetic) -> Kernel:
    make_tile = partial(make_block_kernel, kind, arithmetic)
    most_rows = _MOST_ROWS[arithmetic]
    return make_linear_kernel(
        make_tile,
        f"{kind.name}_{arithmetic}",
        most_rows,
        listed_lines=2 * kind.blocks_per_step * LISTED_LINES,
        lists_panels=False,
        # The more bytes a weight has, the more rows memory is busy for (docs/log.md).
        least_rows_ahead=2 * most_rows if kind.bits == 8 else 3 * most_rows // 4,
    )


@njit(nogil=True)
def _half(low, high):
    """The float of a number of half precision whose two bytes are given."""
    bits = np.uint32(low) | (np.uint32(high) << np.uint32(8))
    size = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    value = np.float32(size.view(np.float32) * np.float32(2.0**112))
    known = value.view(np.uint32)
    if size >= np.uint32(0x7C00 << 13):
        known = np.uint32(size | np.uint32(0x7F800000))
    return np.uint32(known | ((bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@cache
def _embed_kernel(kind: BlockType) -> Kernel:
    bits, zero, has_minima, is_k_type = kind.bits, kind.zero, kind.has_minima, kind.is_k_type
    groups, header, blocks_per_step = kind.groups, kind.header_bytes, kind.blocks_per_step
    block_bytes, scale_bytes, high_lines = kind.block_bytes, kind.scale_bytes, kind.high_lines
    step_bytes, minima_at = kind.step_bytes, 2 * HALF_PANEL
    high_width = max(high_lines, 1)
    words_of_high_line = 8 // high_width

    def code_of_block(lines, word, place):
        if bits == 8:
            return np.int32(lines[LINE_BYTES * word + place])
        byte = np.int32(lines[LINE_BYTES * (high_lines + word // 2) + place])
        code = (byte >> 4) if word % 2 else (byte & 15)
        if bits > 4:
            high = np.int32(lines[LINE_BYTES * (word // words_of_high_line) + place])
            high = high >> (high_width * (word % words_of_high_line))
            code |= (high & ((1 << high_width) - 1)) << 4
        return np.int32(code)

    code_of: Any = njit(nogil=True)(set_variant(code_of_block, kind.name))

    def unpack_one(row, block, lane, scale, minimum):
        lines = block[scale_bytes:]
        scale_now, minimum_now = scale, minimum
        for i in range(row.shape[0]):
            if is_k_type:
                small = block[HALF_PANEL * (i * groups // BLOCK) + lane]
                scale_now = scale * np.float32(np.int8(small) if groups > 1 else small)
                if has_minima:
                    minimum_now = minimum * np.float32(block[HALF_PANEL * groups + lane])
            code = code_of(lines, i // 4, 4 * lane + i % 4) - zero
            value = scale_now * np.float32(code)
            row[i] = value + minimum_now if has_minima else value

    unpack_block: Any = njit(nogil=True)(set_variant(unpack_one, kind.name))

    def embed_quantized_rows(out, token_ids, panels, start, stop):
        """out[t] = row token_ids[t] of the table, for t in [start, stop)."""
        steps = panels.shape[1]
        for t in range(start, stop):
            half = token_ids[t] % PANEL // HALF_PANEL
            lane = token_ids[t] % HALF_PANEL
            lines = panels[token_ids[t] // PANEL].reshape(2 * steps, step_bytes)
            for step in range(steps):
                line = lines[half * steps + step]
                scale = _half(line[2 * lane], line[2 * lane + 1])
                minimum = np.float32(0)
                if has_minima:
                    at = minima_at + 2 * lane
                    minimum = _half(line[at], line[at + 1])
                for block in range(blocks_per_step):
                    first = (step * blocks_per_step + block) * BLOCK
                    place = line[header + block * block_bytes :]
                    unpack_block(out[t, first : first + BLOCK], place, lane, scale, minimum)

    return Kernel(embed_quantized_rows, variant=kind.name)
