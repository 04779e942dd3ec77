"""Rows picked out of an array: launches gpu/kernels/gather_rows.cu."""

from __future__ import annotations

from typing import Any

from rawpaged.gpu.arrays import array_info, check, has_contiguous_axes
from rawpaged.gpu.module import Instance, KernelDeclaration, Loader, instantiate, load_kernels

_GATHER_ROWS = KernelDeclaration(
    "gather_rows.cu",
    "gather_rows",
    "W* out, const W* x, const int* rows, int words, long long out_stride, long long x_stride",
)
_WORDS = {16: "Vec16", 4: "unsigned", 2: "unsigned short"}
"""C types to copy in, by their bytes."""
_THREADS = 128
_WORDS_A_THREAD = 4


def instances() -> dict[int, Instance]:
    """A kernel for each size of word."""
    return {
        size: instantiate(
            _GATHER_ROWS, f"gather_rows_{size}b", (word,), types={"W": word}, threads=_THREADS
        )
        for size, word in _WORDS.items()
    }


class GatherRows:
    """Copies chosen rows of arrays whose elements have two or four bytes."""

    def __init__(self, loader: Loader) -> None:
        kernels = instances()
        loaded = load_kernels(loader, list(kernels.values()))
        self._kernels = {size: loaded[kernel.name] for size, kernel in kernels.items()}

    def __call__(self, out: Any, x: Any, rows: Any) -> None:
        """out[len(rows), d] = x[rows], both of one type; rows int32, each within x.

        Rows are contiguous, and out and x do not overlap.
        """
        to, source, picked = array_info(out), array_info(x), array_info(rows)
        check(
            len(source.shape) == 2
            and to.shape == (*picked.shape, source.shape[1])
            and to.dtype == source.dtype
            and to.itemsize in (2, 4)
            and has_contiguous_axes(to, 1)
            and has_contiguous_axes(source, 1)
            and picked.dtype == "int32"
            and picked.is_contiguous,
            out=out,
            x=x,
            rows=rows,
        )
        if 0 in to.shape:
            return
        steps = [info.strides[0] * info.itemsize for info in (to, source)]
        row_bytes = to.shape[1] * to.itemsize
        addresses = (to.pointer, source.pointer, row_bytes, *steps)
        size = next(size for size in _WORDS if all(part % size == 0 for part in addresses))
        words = row_bytes // size
        parts = -(-words // (_THREADS * _WORDS_A_THREAD))
        self._kernels[size](
            (to.shape[0], parts),
            (_THREADS,),
            out,
            x,
            rows,
            words,
            *(step // size for step in steps),
        )
