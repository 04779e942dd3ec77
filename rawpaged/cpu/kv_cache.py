"""The paged KV cache of one layer: its layout, and copies of blocks.

keys    [num_blocks, num_kv_heads, head_dim, block_size]    16 keys side by side for the scores
values  [num_blocks, num_kv_heads, block_size, value_dim]   value_dim: head_dim rounded up to 16

Elements are float32, or bfloat16 held in uint16. A block is what moves, is shared and is copied.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.backend import KVCache
from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.vector_ir import LANES
from rawpaged.errors import BackendError


def value_dim(head_dim: int) -> int:
    """Columns of a value row in memory."""
    return -(-head_dim // LANES) * LANES


def elements_per_block(num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """Keys and values of one block in one layer, padding included."""
    return num_kv_heads * block_size * (head_dim + value_dim(head_dim))


def new_kv_cache(
    num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
) -> KVCache:
    """A zeroed pool; memory is taken from the system as blocks are first written."""
    if block_size % LANES:
        raise BackendError(
            f"block_size={block_size} is not a multiple of {LANES}, as the CPU backend needs"
        )
    element = np.uint16 if dtype == "bfloat16" else np.float32
    return KVCache(
        keys=np.zeros((num_blocks, num_kv_heads, head_dim, block_size), element),
        values=np.zeros((num_blocks, num_kv_heads, block_size, value_dim(head_dim)), element),
        block_size=block_size,
    )


def as_words(pool: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """u64[num_blocks, words of a block] over the same memory; blocks are 16 elements and more."""
    return pool.reshape((len(pool), math.prod(pool.shape[1:]))).view(np.uint64)


@kernel
def copy_block_pairs(target, source, pairs, start, stop):
    """target[dst] = source[src] for the pairs (src, dst) in [start, stop), in words."""
    for j in range(start, stop):
        to = target[pairs[j, 1]]
        origin = source[pairs[j, 0]]
        for i in range(origin.shape[0]):
            to[i] = origin[i]
