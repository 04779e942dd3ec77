"""The kernels of gpu/kernels/gemm.cu and gpu/kernels/gemv.cu by what they compute and how."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from rawpaged.gpu.module import Instance, KernelDeclaration, instantiate
from rawpaged.gpu.tuned import FewRowsTile, GemmTile

C_TYPES = {"bfloat16": "bf16", "float16": "half", "float32": "float"}
_LABELS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

SLICE_UNIT = 64
MOST_SLICES = 8
REDUCE_THREADS = 128
GEMV_THREADS = 128
GEMV_ROWS = (1, 2, 4)
"""Numbers of rows for which gemv is compiled; others take the next one."""

_OPERANDS = "const T* x, long long x_stride, const T* w"
_RESULT = "const float* bias, Out* out, long long out_stride, int M, int N"
_GEMM = KernelDeclaration("gemm.cu", "gemm", f"{_OPERANDS}, {_RESULT}, int K, int slice")
_GEMM_SLICE = KernelDeclaration(
    "gemm.cu", "gemm_slice", f"{_OPERANDS}, float* workspace, int M, int N, int K, int slice"
)
_GEMM_REDUCE = KernelDeclaration(
    "gemm.cu", "gemm_reduce", f"const float* workspace, {_RESULT}, int slices"
)
_FEW_ROWS = KernelDeclaration("gemv.cu", "few_rows", f"{_OPERANDS}, {_RESULT}, int K, int slice")
_GEMV = KernelDeclaration("gemv.cu", "gemv", f"{_OPERANDS}, {_RESULT}, int K")


class Epilogue(IntEnum):
    """What becomes of x @ weight.T + bias; the numbers are those of gemm.cu and gemv.cu."""

    STORE = 0
    """out = it."""
    ADD = 1
    """out += it."""
    SILU_MUL = 2
    """out = silu(gate) * up, where its columns are [gate | up]."""


@dataclass(frozen=True, slots=True)
class Mode:
    """An epilogue and the dtype of out: the linear's own, or "float32"."""

    epilogue: Epilogue
    out_dtype: str

    @property
    def label(self) -> str:
        return f"{_LABELS[self.out_dtype]}_{self.epilogue.name.lower()}"

    @property
    def halves(self) -> int:
        """Rows of the weight behind a column of out."""
        return 2 if self.epilogue is Epilogue.SILU_MUL else 1


def slice_length(in_features: int) -> int:
    """Elements of K that are summed in one chain; a function of K alone, see gemm.cu."""
    return SLICE_UNIT * -(-in_features // (SLICE_UNIT * MOST_SLICES))


def gemv_columns(mode: Mode) -> int:
    """Columns of out that a warp of gemv computes: four rows of the weight at a time."""
    return 4 // mode.halves


@dataclass(frozen=True, slots=True)
class KernelKey:
    """One kernel of a dtype: its function in the .cu files, its mode and its tile.

    The tile of gemv is its number of rows, that of gemm_reduce None.
    """

    function: Literal["gemm", "gemm_slice", "gemm_reduce", "few_rows", "gemv"]
    mode: Mode
    tile: GemmTile | FewRowsTile | int | None = None


def slice_key(tile: GemmTile, mode: Mode) -> KernelKey:
    """The gemm_slice kernel of a mode, shared by all modes of as many halves."""
    epilogue = Epilogue.SILU_MUL if mode.halves == 2 else Epilogue.STORE
    return KernelKey("gemm_slice", Mode(epilogue, "float32"), tile)


def kernel_keys(
    tiles: Iterable[GemmTile | FewRowsTile], modes: Iterable[Mode], *, with_gemv: bool = False
) -> tuple[KernelKey, ...]:
    """All kernels that a Linear of these tiles and modes may launch."""
    tiles = tuple(dict.fromkeys(tiles))
    keys = []
    for mode in modes:
        for tile in tiles:
            if isinstance(tile, FewRowsTile):
                keys.append(KernelKey("few_rows", mode, tile))
            else:
                keys += [
                    KernelKey("gemm", mode, tile),
                    slice_key(tile, mode),
                    KernelKey("gemm_reduce", mode),
                ]
        keys += [KernelKey("gemv", mode, rows) for rows in GEMV_ROWS if with_gemv]
    return tuple(dict.fromkeys(keys))


def instance_of(dtype: str, key: KernelKey) -> Instance:
    """The kernel for x and weights of `dtype`."""
    mode, tile = key.mode, key.tile
    name = f"{key.function}_{_LABELS[dtype]}_{mode.label}"
    types = {"T": C_TYPES[dtype], "Out": C_TYPES[mode.out_dtype]}
    epilogue = int(mode.epilogue)
    if isinstance(tile, FewRowsTile):
        return instantiate(
            _FEW_ROWS,
            f"{name}_{tile.rows}x{16 * tile.groups}_s{tile.stages}",
            (f"Shape<{tile.rows}, {tile.groups}, {tile.stages}>", epilogue),
            types=types,
            threads=32 * MOST_SLICES,
            max_shared_mem=tile.shared_bytes(MOST_SLICES),
        )
    if isinstance(tile, GemmTile):
        extents = f"{tile.rows}, {tile.columns}, {tile.depth}, {tile.stages}"
        return instantiate(
            _GEMM_SLICE if key.function == "gemm_slice" else _GEMM,
            f"{name}_{tile.rows}x{tile.columns}x{tile.depth}_s{tile.stages}",
            (f"Shape<{extents}, {tile.warp_rows}, {tile.warp_columns}>", epilogue),
            types=types,
            threads=tile.threads,
            # Two CTAs fit every SM's shared memory, so that registers should leave room for them.
            min_blocks=2 if tile.shared_bytes <= 48 * 1024 else 1,
            max_shared_mem=tile.shared_bytes,
        )
    if tile is None:
        return instantiate(_GEMM_REDUCE, name, (epilogue,), types=types, threads=REDUCE_THREADS)
    arguments = (tile, gemv_columns(mode), epilogue)
    return instantiate(_GEMV, f"{name}_m{tile}", arguments, types=types, threads=GEMV_THREADS)
