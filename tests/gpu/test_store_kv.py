"""Writing keys and values to a paged cache, bit for bit against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from rawpaged.errors import BackendError
from rawpaged.gpu.kv_cache import BLOCK_SIZES, StoreKV, bytes_per_block, cache_shape
from tests.hostsim.loader import HostLoader
from tests.ops.kv_elements import NUMPY_TYPES, poisoned_pool, quantised, raw

pytestmark = pytest.mark.gpusim

TYPES = (
    ("bfloat16", "bfloat16", 64),
    ("float16", "float16", 80),
    ("bfloat16", "fp8_e4m3", 80),
    ("bfloat16", "int8", 96),
    ("float16", "fp8_e4m3", 256),
    ("float16", "int8", 128),
)
NUM_KV_HEADS = 3


def make_store(
    loader: HostLoader, dtype: str, cache_dtype: str, head_dim: int, block_size: int
) -> StoreKV:
    return StoreKV(
        loader,
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        block_size=block_size,
    )


@pytest.mark.parametrize(("dtype", "cache_dtype", "head_dim"), TYPES)
def test_slots_are_written_and_nothing_else(
    host_loader: HostLoader, dtype: str, cache_dtype: str, head_dim: int
) -> None:
    rng = np.random.default_rng(0)
    num_tokens, num_blocks, block_size = 7, 5, 16
    qkv = (4 * rng.standard_normal((num_tokens, 4 + 2 * NUM_KV_HEADS, head_dim))).astype(
        NUMPY_TYPES[dtype]
    )
    qkv[0, 4:, :4] = [3000.0, -3000.0, 0.0, 0.03]  # beyond the range, and where FP8 is subnormal
    keys, values = qkv[:, 4 : 4 + NUM_KV_HEADS], qkv[:, 4 + NUM_KV_HEADS :]
    slots = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int64)
    slots[3] = -1
    shape = cache_shape(num_blocks, NUM_KV_HEADS, head_dim, block_size)
    pools = [raw(poisoned_pool(shape, cache_dtype), cache_dtype) for _ in range(2)]
    expected = [pool.copy() for pool in pools]
    scales = [np.array([0.5, 1.7, 0.03], np.float32), np.array([1.0, 0.1, 3.0], np.float32)]
    kept = slots >= 0
    for pool, x, scale in zip(expected, (keys, values), scales, strict=True):
        stored = raw(quantised(x[kept], scale, cache_dtype), cache_dtype)
        pool[slots[kept] // block_size, :, slots[kept] % block_size] = stored

    store = make_store(host_loader, dtype, cache_dtype, head_dim, block_size)
    is_scaled = store.cache_type.is_scaled
    key_scale, value_scale = scales if is_scaled else (None, None)
    store(pools[0], pools[1], keys, values, slots, key_scale=key_scale, value_scale=value_scale)
    for pool, wanted in zip(pools, expected, strict=True):
        assert pool.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes(host_loader: HostLoader, block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    keys, values = (
        rng.standard_normal((9, NUM_KV_HEADS, 64)).astype(NUMPY_TYPES["bfloat16"]) for _ in range(2)
    )
    slots = rng.permutation(3 * block_size)[:9].astype(np.int64)
    shape = cache_shape(3, NUM_KV_HEADS, 64, block_size)
    pools = [poisoned_pool(shape, "bfloat16") for _ in range(2)]
    store = make_store(host_loader, "bfloat16", "bfloat16", 64, block_size)
    store(pools[0], pools[1], keys, values, slots)
    for pool, x in zip(pools, (keys, values), strict=True):
        assert np.array_equal(pool[slots // block_size, :, slots % block_size], x)
        assert np.isnan(pool.astype(np.float32)).sum() == pool.size - x.size


def test_what_does_not_fit_is_refused(host_loader: HostLoader) -> None:
    store = make_store(host_loader, "bfloat16", "int8", 64, 16)
    shape = cache_shape(2, NUM_KV_HEADS, 64, 16)
    pool = poisoned_pool(shape, "int8")
    x = np.zeros((2, NUM_KV_HEADS, 64), NUMPY_TYPES["bfloat16"])
    slots = np.zeros(2, np.int64)
    scale = np.ones(NUM_KV_HEADS, np.float32)
    with pytest.raises(ValueError, match="needs key_scale"):
        store(pool, pool.copy(), x, x, slots)
    with pytest.raises(ValueError, match="do not fit"):
        store(pool, pool.copy(), x, x, slots, key_scale=scale, value_scale=scale[:2])
    with pytest.raises(ValueError, match=r"slot_mapping: int32\[2\]"):
        store(pool, pool.copy(), x, x, slots.astype(np.int32), key_scale=scale, value_scale=scale)
    unaligned = np.zeros((2, NUM_KV_HEADS * 64 + 4), x.dtype)[:, 4:].reshape(2, -1, 64)
    aligned = make_store(host_loader, "bfloat16", "bfloat16", 64, 16)
    wide = poisoned_pool(shape, "bfloat16")
    with pytest.raises(ValueError, match="has no scales"):
        aligned(wide, wide.copy(), x, x, slots, key_scale=scale)
    with pytest.raises(ValueError, match="do not fit"):
        aligned(wide, wide.copy(), unaligned, unaligned, slots)
    with pytest.raises(BackendError, match="block_size=24"):
        make_store(host_loader, "bfloat16", "bfloat16", 64, 24)
    with pytest.raises(BackendError, match="cache_dtype='float16'"):
        make_store(host_loader, "bfloat16", "float16", 64, 16)
    with pytest.raises(BackendError, match="dtype='float32'"):
        make_store(host_loader, "float32", "float32", 64, 16)


def test_no_tokens(host_loader: HostLoader) -> None:
    store = make_store(host_loader, "bfloat16", "bfloat16", 64, 16)
    pool = poisoned_pool(cache_shape(1, NUM_KV_HEADS, 64, 16), "bfloat16")
    empty = np.zeros((0, NUM_KV_HEADS, 64), NUMPY_TYPES["bfloat16"])
    store(pool, pool.copy(), empty, empty, np.zeros(0, np.int64))


def test_bytes_per_block() -> None:
    assert bytes_per_block(8, 128, 16, "bfloat16") == 2 * 8 * 128 * 16 * 2
    assert bytes_per_block(8, 128, 16, "fp8_e4m3") == 2 * 8 * 128 * 16
