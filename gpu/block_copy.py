"""Copies of whole KV blocks, within a pool or from one to another.

A pool may be pinned host memory, which the kernel reads and writes through unified addressing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rawpaged.gpu import grids
from rawpaged.gpu.arrays import array_info, check
from rawpaged.gpu.device import Device
from rawpaged.gpu.numba_kernels import make_copy_blocks

_WORD = 8


class CopyBlocks:
    """Copies blocks in the arrays of all layers, one after another."""

    def __init__(self, device: Device) -> None:
        self._kernel = device.jit(make_copy_blocks())

    def __call__(self, targets: Sequence[Any], sources: Sequence[Any], pairs: Any) -> None:
        """targets[l][dst] = sources[l][src] for (src, dst) of pairs i64[n, 2], for every layer l.

        Arrays are contiguous [num_blocks, ...] with blocks of equal size and type, a multiple of
        8 bytes. A target may be its source; then no block may be both read and written. No block
        is written twice.
        """
        which = array_info(pairs)
        check(
            which.dtype == "int64" and which.shape[1:] == (2,) and which.is_contiguous,
            pairs=pairs,
        )
        for target, source in zip(targets, sources, strict=True):
            to, origin = array_info(target), array_info(source)
            block_bytes = origin.itemsize * math.prod(origin.shape[1:])
            check(
                to.is_contiguous
                and origin.is_contiguous
                and (to.dtype, to.shape[1:]) == (origin.dtype, origin.shape[1:])
                and block_bytes % _WORD == 0,
                target=target,
                source=source,
            )
            if which.shape[0] > 0 and block_bytes > 0:
                grid, block = grids.rows(which.shape[0], block_bytes // _WORD)
                self._kernel(grid, block, (_as_words(target), _as_words(source), pairs))


def _as_words(pool: Any) -> Any:
    """u64[num_blocks, words of a block] over the same memory."""
    return pool.reshape((pool.shape[0], math.prod(pool.shape[1:]))).view(np.uint64)
