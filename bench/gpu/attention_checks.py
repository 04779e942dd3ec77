"""Paged attention and the KV store on a device against float64, caches of bytes included."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.checks import UNIT_ROUNDOFF, DeviceOps, each_dtype
from bench.gpu.recorder import Recorder
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target
from rawpaged.backend import BatchMeta, KVCache, KVScales
from rawpaged.errors import BackendError
from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.device import numpy_dtype
from rawpaged.gpu.kv_cache import HEAD_DIMS, StoreKV
from tests import reference
from tests.ops.cases import ATTENTION_CASES, AttentionCase, make_meta, store_kv
from tests.ops.kv_elements import dequantised, poisoned_pool, quantised, raw

_LONG = AttentionCase("thousands", ((1, 5000), (200, 3000), (1, 257)), num_heads=8, head_dim=128)
_MIXED = AttentionCase("mixed", ((20, 50), (1, 70), (1, 2), (2, 33), (1, 300)), num_heads=8)
_FEW = ("decode", "chunks and single tokens", "head size no multiple of 16")


def check_attention(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """The shared cases, then caches of bytes."""
    for ops in each_dtype(target, sizes):
        cases = [*ATTENTION_CASES, _LONG]
        if not sizes.checks_all:
            cases = [case for case in ATTENTION_CASES if case.name in _FEW]
        for case in cases:
            parameters = {"dtype": ops.dtype}
            recorder.check(f"attention/{case.name}", parameters, partial(_check_case, ops, case))
        for cache_dtype in ("fp8_e4m3", "int8") if sizes.checks_all else ("fp8_e4m3",):
            parameters = {"dtype": ops.dtype, "cache_dtype": cache_dtype}
            run = partial(_check_byte_cache, ops, cache_dtype)
            recorder.check("attention/cache of bytes", parameters, run)


def _check_case(ops: DeviceOps, case: AttentionCase) -> None:
    """Nothing but NaN lies in the pool where a request has not written."""
    backend = ops.backend
    if case.head_dim not in HEAD_DIMS:
        try:
            backend.new_kv_cache(1, 1, case.head_dim, case.block_size)
        except BackendError:
            return
        raise AssertionError(f"{case.head_dim=} was not refused")
    rng = np.random.default_rng(6)
    meta, num_blocks = make_meta(case, rng)
    cache = backend.new_kv_cache(num_blocks, case.num_kv_heads, case.head_dim, case.block_size)
    for pool in (cache.keys, cache.values):
        ops.target.device.write(pool, np.full(pool.shape, np.nan, numpy_dtype(ops.dtype)))
    heads = np.concatenate([_history(case, row, rng) for row in range(len(case.lengths))])
    on_device = ops.act(heads)
    first_key = case.num_heads
    first_value = first_key + case.num_kv_heads
    keys, values = on_device[:, first_key:first_value], on_device[:, first_value:]
    store_kv(backend, cache, keys, values, slots_of(case, meta))
    q = ops.act(heads[_new_rows(case), :first_key])
    out = ops.poisoned(q.shape)
    plan = backend.plan(meta, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads)
    scale = case.head_dim**-0.5
    backend.paged_attention(out, q, cache, plan, scale=scale, sliding_window=case.window)
    exact = ops.host(on_device)
    _compare(ops, out, case, ops.host(q), exact[:, first_key:first_value], exact[:, first_value:])


def _check_byte_cache(ops: DeviceOps, cache_dtype: str) -> None:
    """Stored bytes equal NumPy's, and attention over them is that over the numbers they mean."""
    case, device = _MIXED, ops.target.device
    rng = np.random.default_rng(7)
    meta, num_blocks = make_meta(case, rng)
    scale = rng.uniform(0.01, 0.04, (2, case.num_kv_heads)).astype(np.float32)
    heads = np.concatenate([_history(case, row, rng) for row in range(len(case.lengths))])
    heads = ops.rounded(heads)
    first_value = case.num_heads + case.num_kv_heads
    parts = (heads[:, case.num_heads : first_value], heads[:, first_value:])
    stored = [quantised(x, own, cache_dtype) for x, own in zip(parts, scale, strict=True)]
    backend = CudaBackend(device, dtype=ops.dtype, kv_cache_dtype=cache_dtype)
    shape = (num_blocks, case.num_kv_heads, case.head_dim, case.block_size)
    cache = backend.new_kv_cache(*shape, KVScales(*scale))
    on_device, slots = ops.act(heads), slots_of(case, meta)
    keys, values = on_device[:, case.num_heads : first_value], on_device[:, first_value:]
    for store in (_store_alone, store_kv):
        for pool in (cache.keys, cache.values):
            device.write(pool, raw(poisoned_pool(pool.shape, cache_dtype), cache_dtype))
        store(backend, cache, keys, values, slots)
        for elements, pool in zip(stored, (cache.keys, cache.values), strict=True):
            at = device.download(pool)[slots // case.block_size, :, slots % case.block_size]
            np.testing.assert_array_equal(at, raw(elements, cache_dtype))
    q = ops.act(heads[_new_rows(case), : case.num_heads])
    out = ops.poisoned(q.shape)
    plan = backend.plan(meta, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads)
    backend.paged_attention(out, q, cache, plan, scale=case.head_dim**-0.5, sliding_window=None)
    numbers = [dequantised(x, own, cache_dtype) for x, own in zip(stored, scale, strict=True)]
    _compare(ops, out, case, ops.host(q), *numbers)


def _store_alone(
    backend: CudaBackend, cache: KVCache, keys: Any, values: Any, slots: npt.NDArray[np.int64]
) -> None:
    """What RopeStore does without an angle, by the kernel that other projects have."""
    device = backend.device
    store = StoreKV(
        device.loader,
        dtype=backend.dtype,
        cache_dtype=backend.kv_cache_dtype,
        num_kv_heads=keys.shape[1],
        head_dim=keys.shape[2],
        block_size=cache.block_size,
    )
    store(
        cache.keys,
        cache.values,
        keys,
        values,
        device.upload(slots),
        key_scale=cache.key_scale,
        value_scale=cache.value_scale,
    )


def slots_of(case: AttentionCase, meta: BatchMeta) -> npt.NDArray[np.int64]:
    """Slots of every token of every request, in order."""
    slots = []
    for row, (_, kv) in enumerate(case.lengths):
        own = np.arange(kv)
        block = meta.block_tables[row, own // case.block_size].astype(np.int64)
        slots.append(block * case.block_size + own % case.block_size)
    return np.concatenate(slots)


def _history(case: AttentionCase, row: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Queries, keys and values of one request's tokens."""
    heads = case.num_heads + 2 * case.num_kv_heads
    shape = (case.lengths[row][1], heads, case.head_dim)
    return rng.standard_normal(shape).astype(np.float32)


def _new_rows(case: AttentionCase) -> npt.NDArray[np.int64]:
    """Rows, among all tokens, of those that have queries."""
    ends = np.cumsum([kv for _, kv in case.lengths])
    return np.concatenate(
        [np.arange(end - q, end) for end, (q, _) in zip(ends, case.lengths, strict=True)]
    )


def _compare(
    ops: DeviceOps,
    out: Any,
    case: AttentionCase,
    q: npt.NDArray[Any],
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
) -> None:
    """Weights are rounded to the type once, and the result once."""
    got, row, begin = ops.host(out), 0, 0
    for queries, kv in case.lengths:
        part, tokens = slice(begin, begin + queries), slice(row, row + kv)
        scale = case.head_dim**-0.5
        expected = reference.attention(
            q[part], keys[tokens], values[tokens], kv - queries, scale, case.window
        )
        tolerance = 2 * UNIT_ROUNDOFF[ops.dtype] * abs(expected).max()
        np.testing.assert_allclose(got[part], expected, rtol=0, atol=tolerance)
        begin, row = begin + queries, row + kv
