"""The paged KV cache of one layer: its layout, and copies of blocks.

keys    [num_blocks, num_kv_heads, head_dim / p, block_size, p]    keys side by side for the scores
values  [num_blocks, num_kv_heads, block_size / p, value_dim, p]   value_dim: head_dim up to 16s

Elements are float32, bfloat16 held in uint16, e4m3 held in uint8, or int8; the last two have a
scale a KV head for keys and for values. p is 1 for float32, else 2: kernels multiply pairs
(`products.py`), of neighbours in head_dim for keys, of neighbouring tokens for values. A block is
what moves, is shared and is copied.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawpaged.backend import KVCache, KVScales
from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.vector_ir import LANES
from rawpaged.cpu.weight_memory import zeros
from rawpaged.errors import BackendError

ELEMENTS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "fp8_e4m3": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
}
"""Types of a cache by name, as their elements are held."""


def value_dim(head_dim: int) -> int:
    """Columns of a value row in memory."""
    return -(-head_dim // LANES) * LANES


def bytes_per_block(num_kv_heads: int, head_dim: int, block_size: int, cache_dtype: str) -> int:
    """Keys and values of one block in one layer, padding included."""
    elements = num_kv_heads * block_size * (head_dim + value_dim(head_dim))
    return elements * ELEMENTS[cache_dtype].itemsize


def new_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_dtype: str,
    scales: KVScales | None,
) -> KVCache:
    """A zeroed pool; memory is taken from the system as blocks are first written."""
    if block_size % LANES:
        raise BackendError(
            f"block_size={block_size} is not a multiple of {LANES}, as the CPU backend needs"
        )
    element = ELEMENTS[cache_dtype]
    pair = 1 if cache_dtype == "float32" else 2
    if head_dim % pair:
        raise BackendError(f"head_dim={head_dim} is odd; a cache of {cache_dtype} holds pairs")
    key_shape = (num_blocks, num_kv_heads, head_dim // pair, block_size, pair)
    value_shape = (num_blocks, num_kv_heads, block_size // pair, value_dim(head_dim), pair)
    return KVCache(
        keys=zeros(key_shape, element),
        values=zeros(value_shape, element),
        block_size=block_size,
        key_scale=None if scales is None else scales.keys,
        value_scale=None if scales is None else scales.values,
    )


def head_dim_of(cache: KVCache) -> int:
    """Numbers in a key."""
    return int(cache.keys.shape[2] * cache.keys.shape[4])


def scales_of(cache: KVCache) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """A cache's scales f32[num_kv_heads], as kernels take them: ones for a cache of floats."""
    if cache.key_scale is not None:
        return cache.key_scale, cache.value_scale
    unit = _unit_scale(cache.keys.shape[1])
    return unit, unit


@lru_cache
def _unit_scale(num_kv_heads: int) -> npt.NDArray[np.float32]:
    return np.ones(num_kv_heads, np.float32)


def magnitudes(cache: KVCache, num_tokens: int) -> npt.NDArray[np.float32]:
    """Largest of keys and of values by head, f32[2, num_kv_heads], in the first slots."""
    assert cache.key_scale is None, "for a cache of floats"
    found = []
    for tokens in by_slot(cache, -(-num_tokens // cache.block_size)):
        tokens = tokens[:num_tokens]
        floats = tokens.view(ml_dtypes.bfloat16) if tokens.dtype == np.uint16 else tokens
        found.append(np.abs(floats.astype(np.float32)).max(axis=(0, 2)))
    return np.array(found, np.float32)


def by_slot(cache: KVCache, num_blocks: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Copies of keys and values of the first blocks, [slots, num_kv_heads, head_dim or value_dim].

    Elements are as they are held.
    """
    keys, values = cache.keys[:num_blocks], cache.values[:num_blocks]
    slots, heads = num_blocks * cache.block_size, keys.shape[1]
    return (
        keys.transpose(0, 3, 1, 2, 4).reshape(slots, heads, -1),
        values.transpose(0, 2, 4, 1, 3).reshape(slots, heads, -1),
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
