"""Each op against float64 NumPy, with unused memory poisoned."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.backend import Backend, KVCache
from rawpaged.errors import BackendError
from tests import reference
from tests.ops.cases import ATTENTION_CASES, LINEAR_SHAPES, AttentionCase, make_meta, store_kv
from tests.ops.row_cases import (
    NORM_SIZES,
    add_norm_case,
    embed_case,
    gather_case,
    head_norm_case,
    norm_case,
    normal,
    rope_case,
    silu_case,
    stored,
)

Float32 = npt.NDArray[np.float32]


def poisoned(backend: Backend, *shape: int) -> Float32:
    out: Float32 = backend.empty(shape, "float32")
    out[...] = np.nan
    return out


def poison(cache: KVCache, dtype: str) -> None:
    """Fill a pool with NaN."""
    for pool in (cache.keys, cache.values):
        pool[...] = np.nan if dtype == "float32" else 0x7FC0


def widened(pool: npt.NDArray[Any]) -> Float32:
    """Stored numbers as float32; bfloat16 is the upper half of one."""
    if pool.dtype == np.uint16:
        return (pool.astype(np.uint32) << 16).view(np.float32)
    return pool


@pytest.mark.parametrize(("rows", "in_features", "out_features"), LINEAR_SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(
    backend: Backend, rows: int, in_features: int, out_features: int, with_bias: bool
) -> None:
    rng = np.random.default_rng(rows)
    # Values of 8 bits: backends may round activations to bfloat16 before they multiply.
    x = stored(normal(rng, rows, in_features), "bfloat16")
    weight = normal(rng, out_features, in_features)
    bias = normal(rng, out_features) if with_bias else None
    # The row after the last must not be touched by the padding of the last panel.
    out = poisoned(backend, rows + 1, out_features)
    backend.linear(out[:rows], backend.upload(x), backend.pack_linear(weight, bias))
    expected = reference.linear(x, stored(weight, backend.dtype), bias)
    np.testing.assert_allclose(
        backend.download(out[:rows]), expected, rtol=1e-5, atol=1e-5 * in_features**0.5
    )
    assert np.isnan(out[rows]).all()


def test_embed_gives_the_stored_rows_exactly(backend: Backend) -> None:
    case = embed_case()
    out = poisoned(backend, 6, 40)
    backend.embed(out, backend.upload(case.token_ids), backend.pack_linear(case.table, None))
    expected = stored(case.table, backend.dtype)[case.token_ids]
    np.testing.assert_array_equal(backend.download(out), expected)


@pytest.mark.parametrize("size", NORM_SIZES)
def test_rms_norm(backend: Backend, size: int) -> None:
    case = norm_case(size)
    out = poisoned(backend, 5, size)
    backend.rms_norm(out, backend.upload(case.x), backend.upload(case.weight), case.eps)
    np.testing.assert_allclose(out, case.expected, rtol=2e-6, atol=1e-6)


def test_rms_norm_of_heads_in_place(backend: Backend) -> None:
    case = head_norm_case()
    x = backend.upload(case.x)
    backend.rms_norm(x[:, 1:4], x[:, 1:4], backend.upload(case.weight), case.eps)
    np.testing.assert_allclose(x, case.expected, rtol=2e-6, atol=1e-6)


def test_add_rms_norm(backend: Backend) -> None:
    case = add_norm_case()
    out, total = poisoned(backend, 70, 576), backend.upload(case.residual)
    weight = backend.upload(case.weight)
    backend.add_rms_norm(out, backend.upload(case.x), total, weight, case.eps)
    np.testing.assert_array_equal(total, case.x + case.residual)
    np.testing.assert_allclose(out, case.expected, rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [2, 16, 80, 100])
def test_rope_and_store_kv(backend: Backend, head_dim: int) -> None:
    """Two query heads are rotated in place; one of keys and one of values go to their slots."""
    case = rope_case(head_dim=head_dim)
    heads, upload = backend.upload(case.x), backend.upload
    cache = backend.new_kv_cache(3, 1, head_dim, 16)
    poison(cache, backend.dtype)
    before = [cache.keys.copy(), cache.values.copy()]
    slots = np.array([37, -1, 0, 20], np.int64)
    backend.rope_and_store_kv(
        cache,
        heads[:, :2],
        heads[:, 2:3],
        heads[:, 3:4],
        upload(case.positions),
        upload(case.cos_sin),
        upload(slots),
    )
    np.testing.assert_allclose(heads[:, :2], case.expected[:, :2], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(heads[:, 2:], case.x[:, 2:])
    kept = slots >= 0
    block, offset = slots[kept] // 16, slots[kept] % 16
    rounding = {"float32": 1e-5, "bfloat16": 2.0**-8}[backend.dtype]
    keys = widened(cache.keys)[block, 0, :, offset]
    np.testing.assert_allclose(keys, case.expected[kept, 2], rtol=rounding, atol=1e-5)
    values = widened(cache.values)[block, 0, offset, :head_dim]
    np.testing.assert_array_equal(values, stored(case.x[kept, 3], backend.dtype))
    # Nothing else has changed: not where the token without a slot would be, nor the padding.
    before[0][block, 0, :, offset] = cache.keys[block, 0, :, offset]
    before[1][block, 0, offset, :head_dim] = cache.values[block, 0, offset, :head_dim]
    assert before[0].tobytes() == cache.keys.tobytes()
    assert before[1].tobytes() == cache.values.tobytes()


def test_silu_and_mul(backend: Backend) -> None:
    case = silu_case()
    out = poisoned(backend, 9, 112)
    backend.silu_and_mul(out, backend.upload(case.gate_up))
    np.testing.assert_allclose(out, case.expected, rtol=2e-6, atol=1e-30)


def test_gather_rows(backend: Backend) -> None:
    case = gather_case()
    out = poisoned(backend, 3, 12)
    backend.gather_rows(out, backend.upload(case.x), backend.upload(case.rows))
    np.testing.assert_array_equal(out, case.x[case.rows])


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_paged_attention(backend: Backend, case: AttentionCase) -> None:
    rng = np.random.default_rng(6)
    meta, num_blocks = make_meta(case, rng)
    cache = backend.new_kv_cache(num_blocks, case.num_kv_heads, case.head_dim, case.block_size)
    poison(cache, backend.dtype)
    shape = (case.num_kv_heads, case.head_dim)
    history = []
    for row, (queries, kv) in enumerate(case.lengths):
        keys, values = normal(rng, kv, *shape), normal(rng, kv, *shape)
        history.append((keys, values))
        own = np.arange(kv)
        block = meta.block_tables[row, own // case.block_size].astype(np.int64)
        slots = block * case.block_size + own % case.block_size
        old = kv - queries
        store_kv(backend, cache, keys[:old], values[:old], slots[:old])
    new_keys, new_values = (
        np.concatenate([kv[part][-q:] for kv, (q, _) in zip(history, case.lengths, strict=True)])
        for part in (0, 1)
    )
    store_kv(backend, cache, new_keys, new_values, meta.slot_mapping)

    q = normal(rng, len(meta.token_ids), case.num_heads, case.head_dim)
    plan = backend.plan(meta, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads)
    out = poisoned(backend, *q.shape)
    scale = case.head_dim**-0.5
    backend.paged_attention(out, q, cache, plan, scale=scale, sliding_window=case.window)

    for row, (queries, kv) in enumerate(case.lengths):
        begin, end = meta.query_start_loc[row : row + 2]
        keys, values = (stored(part, backend.dtype) for part in history[row])
        expected = reference.attention(
            q[begin:end], keys, values, kv - queries, scale, case.window
        )
        np.testing.assert_allclose(out[begin:end], expected, rtol=1e-4, atol=2e-5)


def test_block_size_that_the_kernels_cannot_take(backend: Backend) -> None:
    with pytest.raises(BackendError, match="block_size=8"):
        backend.new_kv_cache(4, 1, 16, 8)


def test_shapes_that_do_not_fit_are_refused(backend: Backend) -> None:
    x = backend.empty((2, 8), "float32")
    with pytest.raises(ValueError, match="shapes do not fit"):
        backend.linear(x, x, backend.pack_linear(np.ones((8, 9), np.float32), None))
    with pytest.raises(ValueError, match="shapes do not fit"):
        backend.silu_and_mul(x, x)
