"""Copies of KV blocks between pools, which every backend has to do exactly; NumPy says how.

Blocks hold random bits, and NaN where nothing may be written, so that a word too many shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from rawpaged.backend import LARGEST_ELEMENT, Backend, KVCache, KVScales

BLOCK_SIZE = 16

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CopyCase:
    """Pairs (src, dst) copied from a pool of `num_sources` blocks to one of `num_targets`.

    Each pool is the device's or the host's; num_targets None: the source pool itself.
    """

    name: str
    pairs: tuple[tuple[int, int], ...]
    num_sources: int = 6
    num_targets: int | None = None
    from_host: bool = False
    to_host: bool = False
    num_layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 64


COPY_CASES = (
    CopyCase("one block within a pool", ((4, 1),)),
    CopyCase("a source to several targets", ((2, 0), (2, 5), (3, 1))),
    CopyCase("nothing", ()),
    CopyCase("nothing from an empty pool", (), num_sources=0, num_targets=2, to_host=True),
    CopyCase("swap out", ((5, 0), (0, 2), (3, 1)), num_targets=4, to_host=True),
    CopyCase("swap in", ((1, 5), (0, 3)), num_sources=2, num_targets=7, from_host=True),
    CopyCase("the same ids in both pools", ((0, 0), (1, 1)), num_targets=2, to_host=True),
    CopyCase("between pools of the host", ((1, 2),), num_targets=3, from_host=True, to_host=True),
    CopyCase("one head", ((0, 1),), num_kv_heads=1, num_layers=1),
    CopyCase("large heads", ((3, 0), (1, 4)), head_dim=256, num_kv_heads=3),
    CopyCase("more than one thread's share", tuple((i, 300 + i) for i in range(300)), 600),
)


@st.composite
def copy_cases(draw: st.DrawFn) -> CopyCase:
    """Any pairs that the contract of `copy_blocks` allows."""
    num_sources = draw(st.integers(0, 9))
    within = draw(st.booleans())
    num_targets = num_sources if within else draw(st.integers(0, 9))
    targets = draw(st.permutations(range(num_targets)))
    targets = targets[: draw(st.integers(0, num_targets))]
    sources = [i for i in range(num_sources) if not within or i not in targets]
    if not sources:
        targets = []
    return CopyCase(
        "drawn",
        tuple((draw(st.sampled_from(sources)), target) for target in targets),
        num_sources=num_sources,
        num_targets=None if within else num_targets,
        from_host=draw(st.booleans()),
        to_host=draw(st.booleans()),
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([64, 80, 128])),
    )


def check_copy_blocks(backend: Backend, case: CopyCase) -> None:
    """Copy, and compare every byte of all pools with NumPy's copy of them."""
    rng = np.random.default_rng(len(case.pairs))
    sources = _pools(backend, case, case.num_sources, case.from_host)
    targets = sources
    if case.num_targets is not None:
        targets = _pools(backend, case, case.num_targets, case.to_host)
    for cache in sources:
        for array in (cache.keys, cache.values):
            blocks = _bytes(array)
            blocks[...] = rng.integers(0, 256, blocks.shape, np.uint8)
    before = [_copies(cache) for cache in sources]
    expected = [_copies(cache) for cache in targets]
    for old, new in zip(before, expected, strict=True):
        for old_blocks, new_blocks in zip(old, new, strict=True):
            for source, target in case.pairs:
                new_blocks[target] = old_blocks[source]
    backend.copy_blocks(targets, sources, np.array(case.pairs, np.int64).reshape(-1, 2))
    _assert_equal(targets, expected)
    if targets is not sources:
        _assert_equal(sources, before)


def _pools(backend: Backend, case: CopyCase, num_blocks: int, on_host: bool) -> list[KVCache]:
    """A pool a layer, full of NaN."""
    shape = (num_blocks, case.num_kv_heads, case.head_dim, BLOCK_SIZE)
    scales = None
    if backend.kv_cache_dtype in LARGEST_ELEMENT:
        scales = KVScales(*np.ones((2, case.num_kv_heads), np.float32))
    caches = [
        backend.new_host_kv_cache(*shape) if on_host else backend.new_kv_cache(*shape, scales)
        for _ in range(case.num_layers)
    ]
    for cache in caches:
        for array in (cache.keys, cache.values):
            _bytes(array)[...] = 0xFF  # NaN in every type of cache but int8
    return caches


def _bytes(array: npt.NDArray[Any]) -> Bytes:
    """u8[num_blocks, bytes of a block] over the same memory."""
    block_bytes = array.nbytes // len(array) if len(array) else 0
    return array.reshape(-1).view(np.uint8).reshape(len(array), block_bytes)


def _copies(cache: KVCache) -> list[Bytes]:
    return [_bytes(array).copy() for array in (cache.keys, cache.values)]


def _assert_equal(caches: list[KVCache], expected: list[list[Bytes]]) -> None:
    for cache, arrays in zip(caches, expected, strict=True):
        for array, blocks in zip((cache.keys, cache.values), arrays, strict=True):
            np.testing.assert_array_equal(_bytes(array), blocks)
