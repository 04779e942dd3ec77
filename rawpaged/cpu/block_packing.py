"""From rows of GGUF's blocks to panels (`block_types.py`), without changing a bit of a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rawpaged.cpu.block_types import BLOCK, HALF_PANEL, WORDS, BlockType
from rawpaged.cpu.panel_kernel import PANEL
from rawpaged.cpu.weight_memory import Allocate

Bytes = npt.NDArray[np.uint8]

_CHUNK_CODES = 1 << 20
"""Codes that are unpacked at a time, about: they stay in a cache."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Rows taken apart: n rows of s steps of b blocks."""

    codes: Bytes  # u8[n, s, b, 32]
    scales: Bytes  # bytes of f16[n, s]
    minima: Bytes | None  # bytes of f16[n, s]
    block_scales: list[Bytes]  # u8[n, s, b] each: as in the panel's blocks; empty but for K types


def pack_blocks(rows: Bytes, kind: BlockType, allocate: Allocate) -> Bytes:
    """u8[num_panels, steps, 2 * step_bytes] of rows u8[out_features, row_bytes].

    Each panel is its two halves, one after the other. Columns past the last have scales of zero.
    """
    num_rows, row_bytes = rows.shape
    read = _READERS[kind.name]
    steps = row_bytes // _stored_bytes(kind)
    num_panels = -(-num_rows // PANEL)
    panels = allocate((num_panels, steps, 2 * kind.step_bytes), np.uint8)
    halves = panels.reshape(2 * num_panels, steps, kind.step_bytes)
    halves_at_once = max(1, _CHUNK_CODES // (HALF_PANEL * steps * kind.step_size))
    for first in range(0, len(halves), halves_at_once):
        target = halves[first : first + halves_at_once]
        part = rows[first * HALF_PANEL : (first + len(target)) * HALF_PANEL]
        missing = len(target) * HALF_PANEL - len(part)
        if missing:
            part = np.concatenate([part, np.zeros((missing, row_bytes), np.uint8)])
        _pack(target, read(part.reshape(len(part), steps, -1)), kind)
    return panels


def _pack(target: Bytes, blocks: _Blocks, kind: BlockType) -> None:
    """target u8[halves, steps, step_bytes] = sixteen rows each."""
    num_halves, steps, _ = target.shape
    headers = [blocks.scales] if blocks.minima is None else [blocks.scales, blocks.minima]
    for index, header in enumerate(headers):
        columns = header.view(np.uint16).reshape(num_halves, HALF_PANEL, steps).swapaxes(1, 2)
        at = 2 * HALF_PANEL * index
        target[:, :, at : at + 2 * HALF_PANEL].view(np.uint16)[...] = columns
    parts = target[:, :, kind.header_bytes :].reshape(
        num_halves, steps, kind.blocks_per_step, kind.block_bytes
    )
    for index, scales in enumerate(blocks.block_scales):
        by_block = scales.reshape(num_halves, HALF_PANEL, steps, -1).transpose(0, 2, 3, 1)
        parts[..., HALF_PANEL * index : HALF_PANEL * (index + 1)] = by_block
    words = blocks.codes.view(np.uint32)  # each of four codes
    words = words.reshape(num_halves, HALF_PANEL, steps, kind.blocks_per_step, WORDS)
    words = np.ascontiguousarray(words.transpose(0, 2, 3, 4, 1))
    lines = _lines(words, kind)
    parts[..., kind.scale_bytes :] = lines.view(np.uint8).reshape(*parts.shape[:3], -1)


def _lines(words: npt.NDArray[np.uint32], kind: BlockType) -> npt.NDArray[np.uint32]:
    """u32[..., lines, 16] of words u32[..., 8, 16]."""
    if kind.bits == 8:
        return words
    lines = np.zeros((*words.shape[:-2], kind.bits, HALF_PANEL), np.uint32)
    width, low = kind.high_lines, lines[..., kind.high_lines :, :]
    np.left_shift(words[..., 1::2, :] & 0x0F0F0F0F, 4, out=low)
    low |= words[..., ::2, :] & 0x0F0F0F0F
    if width:
        mask = 0x01010101 if width == 1 else 0x03030303
        per_line = WORDS // width
        for word in range(WORDS):
            bits = (words[..., word, :] >> 4) & mask
            lines[..., word // per_line, :] |= bits << (width * (word % per_line))
    return lines


# What follows reads u8[n, s, bytes of a stored block], as gguf/quants.py of llama.cpp defines it.

_Reader = Callable[[Bytes], _Blocks]


def _stored_bytes(kind: BlockType) -> int:
    """Bytes of a step in a file."""
    halves = 2 * (1 + kind.has_minima)
    scales = {"Q4_K": 12, "Q5_K": 12, "Q6_K": 16}.get(kind.name, 0)
    return halves + scales + kind.step_size * kind.bits // 8


def _nibbles(packed: Bytes) -> Bytes:
    """u8[n, s, 32 * b] of u8[n, s, 16 * b]: of each block the lower halves, then the upper."""
    blocks = packed.reshape(*packed.shape[:2], -1, packed.shape[-1])
    codes = np.empty((*blocks.shape[:3], 2 * blocks.shape[3]), np.uint8)
    half = blocks.shape[3]
    np.bitwise_and(blocks, 15, out=codes[..., :half])
    np.right_shift(blocks, 4, out=codes[..., half:])
    return codes


def _read_4_bits(has_minima: bool, has_fifth_bits: bool) -> _Reader:
    def read(stored: Bytes) -> _Blocks:
        scales, at = stored[..., :2], 2
        minima = None
        if has_minima:
            minima, at = stored[..., 2:4], 4
        fifth = None
        if has_fifth_bits:
            fifth, at = stored[..., at : at + 4], at + 4
        codes = _nibbles(stored[..., at:])
        if fifth is not None:
            codes |= np.unpackbits(fifth, axis=-1, bitorder="little").reshape(codes.shape) << 4
        return _Blocks(codes, _own(scales), None if minima is None else _own(minima), [])

    return read


def _read_8_bits(stored: Bytes) -> _Blocks:
    codes = stored[..., None, 2:] ^ np.uint8(128)  # signed to unsigned, 128 for zero
    return _Blocks(codes, _own(stored[..., :2]), None, [])


def _read_k_with_minima(has_fifth_bits: bool) -> _Reader:
    def read(stored: Bytes) -> _Blocks:
        shape = stored.shape[:2]
        minima = _own(stored[..., 2:4])
        minima[..., 1] ^= 128  # the sign
        at = 48 if has_fifth_bits else 16
        # 32 bytes hold the lower halves of one block and the upper of the next.
        pairs = stored[..., at:].reshape(*shape, 4, 32)
        codes = np.empty((*shape, 4, 2, BLOCK), np.uint8)
        np.bitwise_and(pairs, 15, out=codes[..., 0, :])
        np.right_shift(pairs, 4, out=codes[..., 1, :])
        codes = codes.reshape(*shape, 8, BLOCK)
        if has_fifth_bits:
            bits = np.arange(8, dtype=np.uint8)[:, None]  # of block b bit b
            codes |= ((stored[..., None, 16:48] >> bits) & 1) << 4
        return _Blocks(codes, _own(stored[..., :2]), minima, _six_bits(stored[..., 4:16]))

    return read


def _six_bits(packed: Bytes) -> list[Bytes]:
    """Scales and minima u8[n, s, 8] of their u8[n, s, 12]."""
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (rest >> 4) | ((second >> 6) << 4)], axis=-1)
    return [scales, minima]


def _read_6_bits(stored: Bytes) -> _Blocks:
    shape = stored.shape[:2]
    low = stored[..., :128].reshape(*shape, 2, 1, 2, BLOCK)
    high = stored[..., 128:192].reshape(*shape, 2, 1, BLOCK)
    codes = np.empty((*shape, 2, 4, BLOCK), np.uint8)  # halves of 128, blocks in them
    codes[..., :2, :] = low[..., 0, :, :] & 15
    codes[..., 2:, :] = low[..., 0, :, :] >> 4
    places = 2 * np.arange(4, dtype=np.uint8)[:, None]
    codes |= ((high >> places) & 3) << 4
    scales = stored[..., 192:208].reshape(*shape, 8, 2)
    of_groups = [_own(scales[..., group]) for group in range(2)]
    return _Blocks(codes.reshape(*shape, 8, BLOCK), _own(stored[..., 208:]), None, of_groups)


def _own(array: Bytes) -> Bytes:
    """A contiguous copy."""
    return np.array(array, order="C")


_READERS: dict[str, _Reader] = {
    "Q4_0": _read_4_bits(has_minima=False, has_fifth_bits=False),
    "Q4_1": _read_4_bits(has_minima=True, has_fifth_bits=False),
    "Q5_0": _read_4_bits(has_minima=False, has_fifth_bits=True),
    "Q5_1": _read_4_bits(has_minima=True, has_fifth_bits=True),
    "Q8_0": _read_8_bits,
    "Q4_K": _read_k_with_minima(has_fifth_bits=False),
    "Q5_K": _read_k_with_minima(has_fifth_bits=True),
    "Q6_K": _read_6_bits,
}
