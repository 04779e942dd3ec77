"""Linear layers and the embedding: weights as panels of 32 columns, and the loops over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from rawpaged.cpu.arguments import RowsOf
from rawpaged.cpu.compiling import Kernel, kernel
from rawpaged.cpu.features import FEATURES, CpuFeatures
from rawpaged.cpu.fetch_lists import list_pieces
from rawpaged.cpu.floats import row_of, stored_like
from rawpaged.cpu.kv_ahead import KVAhead, Share
from rawpaged.cpu.linear_inputs import Input, LinearInput, check_form
from rawpaged.cpu.panel_kernel import LISTED_LINES, PANEL, make_panel_kernel
from rawpaged.cpu.products import Arithmetic
from rawpaged.cpu.threads import PerRow, ThreadTeam
from rawpaged.cpu.vector_ir import FETCHED_BYTES, FETCHED_LINES
from rawpaged.cpu.weight_memory import Allocate

MOST_ROWS = 8 if FEATURES.avx512f else 4
"""Rows of x that one pass over a panel takes: as many as there are registers for, or enough."""
_BLOCK_ROWS = 128
"""Rows of x that a panel is multiplied with at a time: some 20 us of work."""
ROW_GRAIN = 4096
"""Elements of a row-wise op in a part, at least: a microsecond."""
_GRAIN_BYTES = 32 << 10
"""Weights read in a part, at least: a microsecond."""


def best_arithmetic(dtype: str, features: CpuFeatures = FEATURES) -> Arithmetic:
    """The fastest way to multiply with weights of a type."""
    if dtype == "float32":
        return "float32"
    return "bfloat16_dot" if features.avx512_bf16 else "bfloat16"


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """W [out_features, in_features] in panels of 32 columns, zeros past both ends.

    A word of four bytes is a float32, W[p * 32 + j, k] = panels[p, k, j], or two bfloat16: W[.., k]
    is the lower half of panels[p, k // 2, j] for even k, the upper half for odd k.
    """

    panels: npt.NDArray[Any]  # f32 or u32[num_panels, steps, 32]
    bias: npt.NDArray[np.float32]  # f32[num_panels * 32], zeros where there is none
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + self.bias.nbytes

    @property
    def row_types(self) -> tuple[tuple[str | None, int], ...]:
        return ((None, self.out_features),)


def pack_linear(
    weight: npt.NDArray[Any],
    bias: npt.NDArray[Any] | None,
    dtype: str,
    allocate: Allocate = np.empty,
) -> PackedLinear:
    """Copy weight into panels of `dtype`; bfloat16 is rounded to nearest even."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    packed_bias = np.zeros(num_panels * PANEL, np.float32)
    if bias is not None:
        packed_bias[:out_features] = bias
    word: npt.DTypeLike = np.float32
    element: npt.DTypeLike = np.float32
    if dtype == "bfloat16":
        word, element = np.uint32, ml_dtypes.bfloat16
    in_word = 4 // np.dtype(element).itemsize
    steps = -(-in_features // in_word)
    panels = allocate((num_panels, steps, PANEL), word)
    rows = np.zeros((PANEL, steps * in_word), element)
    for panel in range(num_panels):
        part = weight[panel * PANEL : (panel + 1) * PANEL]
        rows[: len(part), :in_features] = part
        rows[len(part) :] = 0
        panels[panel] = rows.view(word).T
    return PackedLinear(panels, packed_bias, out_features, in_features)


class LinearOp:
    """out = x @ W.T + bias in one kind of arithmetic; keeps room for prepared activations."""

    def __init__(
        self, team: ThreadTeam, arithmetic: Arithmetic, ahead: KVAhead | None = None
    ) -> None:
        self._team = team
        self._ahead = ahead or KVAhead(team)
        self._arithmetic = arithmetic
        self._kernel = _KERNELS[arithmetic]
        self._scratch = np.empty(0, np.uint8)

    def __call__(
        self, out: npt.NDArray[np.float32], x: Input, weight: PackedLinear
    ) -> None:
        """out f32[n, out_features]; x f32[n, in_features], rounded to bfloat16 for dots."""
        x_prepared = self._prepare(x)
        share = self._ahead.share(weight.in_features * weight.out_features)
        run_linear_kernel(
            self._team, self._kernel, out, x_prepared, weight.panels, weight.bias, share
        )

    @property
    def input_dtype(self) -> npt.DTypeLike:
        """The form of x that needs no preparation (`linear_inputs.py`)."""
        return np.uint16 if self._arithmetic == "bfloat16_dot" else np.float32

    def release(self) -> None:
        """Give the room back."""
        self._scratch = np.empty(0, np.uint8)

    def _prepare(self, x: Input) -> npt.NDArray[Any]:
        """x as the kernel takes it."""
        if isinstance(x, LinearInput):
            check_form(x, self.input_dtype)
            return x.data
        rows, columns = x.shape
        if self._arithmetic == "bfloat16_dot":
            prepared: npt.NDArray[Any] = self._room(rows, columns + columns % 2, np.uint16)
            kernel = rounded_rows
        elif self._arithmetic == "bfloat16" and columns % 2:
            prepared = self._room(rows, columns + 1, np.float32)
            kernel = padded_rows
        else:
            return x
        grain = 1 + ROW_GRAIN // columns
        self._team.run(kernel, PerRow(rows), prepared, RowsOf(x), grain=grain)
        return prepared

    def _room(self, rows: int, columns: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        size = rows * columns * np.dtype(dtype).itemsize
        if size > len(self._scratch):
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size].view(dtype).reshape(rows, columns)


def run_linear_kernel(
    team: ThreadTeam,
    kernel: Kernel,
    out: npt.NDArray[np.float32],
    x: npt.NDArray[Any],
    panels: npt.NDArray[Any],
    bias: npt.NDArray[np.float32],
    ahead: Share,
) -> None:
    """Share one of `make_linear_kernel`'s by blocks of rows and panels; x as its tiles take it."""
    team.run(
        kernel,
        PerRow(len(x), _BLOCK_ROWS, len(panels)),
        RowsOf(out),
        RowsOf(x),
        panels,
        bias,
        *ahead,
        grain=_GRAIN_BYTES // (panels.nbytes // len(panels)),
    )


@kernel
def rounded_rows(out, x, start, stop):
    """out u16[n, columns] = x as bfloat16, then a zero if x has an odd number of columns."""
    for t in range(start, stop):
        source = row_of(x, t)
        target = out[t]
        target[-1] = 0
        for i in range(source.shape[0]):
            target[i] = stored_like(source[i], out)


@kernel
def padded_rows(out, x, start, stop):
    """out f32[n, columns + 1] = x, then a zero."""
    for t in range(start, stop):
        source = row_of(x, t)
        target = out[t]
        target[source.shape[0]] = 0
        for i in range(source.shape[0]):
            target[i] = source[i]


def make_linear_kernel(
    make_tile: Callable[[int], Callable[..., None]],
    variant: str,
    most_rows: int,
    *,
    listed_lines: int,
    lists_panels: bool,
    least_rows_ahead: int,
) -> Kernel:
    """The loops over panels and rows around `make_tile(most_rows)`, as of `make_panel_kernel`.

    A step fetches `listed_lines` of what is listed: what `kv_ahead.py` is about, and with
    lists_panels the next panel. With fewer than least_rows_ahead rows memory is busy, and nothing
    is listed.
    """
    run_tile = make_tile(most_rows)

    def linear_panels(out, x, panels, bias, blocks_ahead, share_ahead, start, stop):
        """out = x @ W.T + bias for items [start, stop): blocks of rows times panels.

        The last arguments but two say what to fetch beside (`kv_ahead.py`).
        """
        steps = panels.shape[1]
        panel_bytes = panels.strides[0]
        num_panels = len(panels)
        num_blocks = (x.num_rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS
        all_tiles = (x.num_rows + most_rows - 1) // most_rows
        num_items = num_panels * num_blocks
        scratch = np.empty((most_rows, PANEL), np.float32)
        room = (steps * listed_lines + FETCHED_LINES - 1) // FETCHED_LINES
        listed = np.empty(room, np.int64)
        pieces = np.empty((1 + _BLOCK_ROWS // most_rows) * room, np.int64)
        for item in range(start, stop):
            # Blocks one after the other: with many rows a thread computes the rows that it has
            # computed in the op before and will in the next, so that they are in its own caches.
            block = item // num_panels
            panel = item % num_panels
            first = all_tiles * block // num_blocks * most_rows
            rows = min(all_tiles * (block + 1) // num_blocks * most_rows, x.num_rows) - first
            column = panel * PANEL
            columns = min(PANEL, out.columns - column)
            num_tiles = (rows + most_rows - 1) // most_rows
            # All tiles but the first find the panel in the cache, and memory would be idle. What
            # this thread most likely reads next is fetched then.
            following = panels[panel].ctypes.data
            fetched = 0
            if num_tiles > 1 and panel + 1 < num_panels:
                following += panel_bytes
                fetched = panel_bytes // num_tiles
            num_pieces = 0
            if rows >= least_rows_ahead:
                num_pieces = list_pieces(pieces, blocks_ahead, share_ahead, item, num_items)
            num_of_panel = 0
            if lists_panels and num_pieces > 0:
                num_of_panel = min(room, (fetched + FETCHED_BYTES - 1) // FETCHED_BYTES)
            of_tile = (num_pieces + num_tiles - 1) // num_tiles
            for tile in range(num_tiles):
                low = first + rows * tile // num_tiles
                high = first + rows * (tile + 1) // num_tiles
                target = out.address + low * out.stride + 4 * column
                stride = out.stride
                if columns < PANEL:
                    target = scratch.ctypes.data
                    stride = 4 * PANEL
                num_listed = num_of_panel
                for i in range(num_listed):
                    listed[i] = following + tile * fetched + i * FETCHED_BYTES
                for i in range(tile * of_tile, min((tile + 1) * of_tile, num_pieces)):
                    if num_listed < room:
                        listed[num_listed] = pieces[i]
                        num_listed += 1
                run_tile(
                    high - low,
                    x.address + low * x.stride,
                    x.stride,
                    panels[panel].ctypes.data,
                    steps,
                    bias[column:].ctypes.data,
                    target,
                    stride,
                    following + tile * fetched,
                    fetched // steps,
                    listed.ctypes.data,
                    num_listed,
                )
                if columns < PANEL:
                    for row in range(low, high):
                        row_of(out, row)[column:] = scratch[row - low, :columns]

    return Kernel(linear_panels, variant=variant)


_KERNELS: dict[Arithmetic, Kernel] = {
    arithmetic: make_linear_kernel(
        partial(make_panel_kernel, arithmetic),
        arithmetic,
        MOST_ROWS,
        listed_lines=LISTED_LINES,
        lists_panels=True,
        least_rows_ahead=2 * MOST_ROWS + 1,
    )
    for arithmetic in get_args(Arithmetic)
}


@kernel
def embed_rows(out, token_ids, panels, start, stop):
    """out[t] = row token_ids[t] of the table, for t in [start, stop)."""
    for t in range(start, stop):
        panel = token_ids[t] // PANEL
        column = token_ids[t] % PANEL
        _unpack(row_of(out, t), panels[panel, :, column])


def embed_table(
    team: ThreadTeam,
    out: npt.NDArray[np.float32],
    token_ids: npt.NDArray[np.int32],
    table: PackedLinear,
) -> None:
    """out f32[n, in_features] = rows `token_ids` of the table."""
    grain = 1 + ROW_GRAIN // table.in_features
    team.run(embed_rows, PerRow(len(out)), RowsOf(out), token_ids, table.panels, grain=grain)


def _unpack(row: Any, words: Any) -> None:
    """row = the elements in a column of words."""
    raise TypeError("_unpack is for compiled code")


@overload(_unpack)
def _unpack_words(row, words):
    if words.dtype == types.float32:

        def floats(row, words):
            row[:] = words

        return floats

    def pairs(row, words):
        for step in range(row.shape[0] // 2):
            row[2 * step] = np.uint32(words[step] << np.uint32(16)).view(np.float32)
            row[2 * step + 1] = np.uint32(words[step] & np.uint32(0xFFFF0000)).view(np.float32)
        if row.shape[0] % 2:
            row[-1] = np.uint32(words[-1] << np.uint32(16)).view(np.float32)

    return pairs
