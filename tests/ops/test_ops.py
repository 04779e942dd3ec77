"""Each op against float64 NumPy, with unused memory poisoned."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.backend import Backend
from rawpaged.errors import BackendError
from tests import reference
from tests.ops.cases import ATTENTION_CASES, LINEAR_SHAPES, AttentionCase, make_meta
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


@pytest.mark.parametrize(("rows", "in_features", "out_features"), LINEAR_SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(
    backend: Backend, rows: int, in_features: int, out_features: int, with_bias: bool
) -> None:
    rng = np.random.default_rng(rows)
    x, weight = normal(rng, rows, in_features), normal(rng, out_features, in_features)
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


def test_rope(backend: Backend) -> None:
    case = rope_case()
    x = backend.upload(case.x)
    cos_sin = backend.upload(case.cos_sin)
    backend.rope(x[:, : case.num_rotated], backend.upload(case.positions), cos_sin)
    np.testing.assert_allclose(x, case.expected, rtol=1e-5, atol=1e-5)


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
    for pool in (cache.keys, cache.values):
        pool[...] = np.nan if backend.dtype == "float32" else 0x7FC0
    shape = (case.num_kv_heads, case.head_dim)
    history = []
    for row, (queries, kv) in enumerate(case.lengths):
        keys, values = normal(rng, kv, *shape), normal(rng, kv, *shape)
        history.append((keys, values))
        own = np.arange(kv)
        block = meta.block_tables[row, own // case.block_size].astype(np.int64)
        slots = block * case.block_size + own % case.block_size
        old = kv - queries
        backend.store_kv(cache, keys[:old], values[:old], slots[:old])
    new_keys, new_values = (
        np.concatenate([kv[part][-q:] for kv, (q, _) in zip(history, case.lengths, strict=True)])
        for part in (0, 1)
    )
    backend.store_kv(cache, new_keys, new_values, meta.slot_mapping)

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
