"""Choices that depend on the device, as plain tables keyed by sm (90 for compute capability 9.0).

An sm that is not listed takes FALLBACK_SM, whose choices fit the least shared memory that any
device from sm_80 on has (99 KiB a block). No choice changes a result's bits. The values are
reasoned (shared memory, registers, number of CTAs), not measured yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FALLBACK_SM = 86

ANY_ROWS = 1 << 30
"""Key of the tile for all numbers of rows above the other keys."""


@dataclass(frozen=True, slots=True)
class GemmTile:
    """A CTA's part of a product by kernels/gemm.cu, for many rows."""

    rows: int
    """Of x."""
    columns: int
    """Of the product: rows of the weight."""
    depth: int
    """Columns of x and weight in one stage, 32 or 64."""
    stages: int
    warp_rows: int
    warp_columns: int

    @property
    def threads(self) -> int:
        return 32 * self.warp_rows * self.warp_columns

    @property
    def shared_bytes(self) -> int:
        return 2 * self.stages * (self.rows + self.columns) * self.depth


@dataclass(frozen=True, slots=True)
class FewRowsTile:
    """A CTA's part of a product by few_rows of kernels/gemv.cu, for up to 32 rows."""

    rows: int
    """Of x: 8, 16, 24 or 32."""
    groups: int
    """Of 16 rows of the weight."""
    stages: int

    def shared_bytes(self, slices: int) -> int:
        """For a CTA of that many warps."""
        return slices * 2 * self.stages * (16 * self.groups + self.rows) * 64


LinearTile = GemmTile | FewRowsTile
"""A tile for wgmma and TMA (sm_90a, sm_100a) would be a third kind, with a kernel of its own."""

_GEMM_64 = GemmTile(64, 64, 64, 4, 2, 2)
_GEMM_64_128 = GemmTile(64, 128, 32, 4, 2, 4)
# One CTA an SM: two accumulators of a slice-wise sum leave no registers for a second. Its warps
# take 64x32, as shared memory feeds the tensor cores from sm_80 on no less; 64 deep, so that they
# meet at half as many barriers. docs/log.md has the reasoning.
_GEMM_128 = GemmTile(128, 128, 64, 3, 2, 4)

_99_KIB: Mapping[int, LinearTile] = {
    8: FewRowsTile(8, 1, 2),  # two CTAs an SM
    16: FewRowsTile(16, 1, 3),
    32: FewRowsTile(32, 1, 2),
    64: _GEMM_64,
    256: _GEMM_64_128,
    ANY_ROWS: _GEMM_128,
}
_163_KIB: Mapping[int, LinearTile] = {
    **_99_KIB,
    8: FewRowsTile(8, 1, 3),  # two CTAs an SM, three where it has 228 KiB
    16: FewRowsTile(16, 2, 3),
    32: FewRowsTile(32, 2, 2),
}
_227_KIB: Mapping[int, LinearTile] = {**_163_KIB, 32: FewRowsTile(32, 2, 3)}

LINEAR_TILES: Mapping[int, Mapping[int, LinearTile]] = {
    80: _163_KIB,
    86: _99_KIB,
    89: _99_KIB,
    90: _227_KIB,
    100: _227_KIB,
    120: _99_KIB,
}
"""By sm, then by the most rows of x for which a tile is taken: the smallest key that suffices."""


def linear_tiles(sm: int) -> Mapping[int, LinearTile]:
    """Tiles of a device by their most rows."""
    return LINEAR_TILES.get(sm, LINEAR_TILES[FALLBACK_SM])
