"""Each op against float64 NumPy, with unused memory poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.backend import Backend, KVCache, KVScales
from rawpaged.cpu.kv_cache import by_slot
from rawpaged.devices import open_backend
from rawpaged.errors import BackendError
from tests import reference
from tests.ops.cases import ATTENTION_CASES, LINEAR_SHAPES, AttentionCase, make_meta, store_kv
from tests.ops.kv_elements import (
    NUMPY_TYPES,
    dequantised,
    from_cpu,
    on_cpu,
    poison_for,
    quantised,
)
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


KEY_SCALE, VALUE_SCALE = 0.03, 0.04
"""Of the first head; others have larger ones. Normal numbers fit into int8 with most of them."""


@dataclass(frozen=True, slots=True)
class Caching:
    """A backend and one type of cache that it has."""

    backend: Backend
    cache_dtype: str

    def scales(self, num_kv_heads: int) -> tuple[Float32, Float32]:
        heads = np.arange(num_kv_heads, dtype=np.float32) / np.float32(1000)
        return heads + np.float32(KEY_SCALE), heads + np.float32(VALUE_SCALE)

    def new_cache(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> KVCache:
        """A pool of poison."""
        scales = None
        if self.cache_dtype in ("fp8_e4m3", "int8"):
            scales = KVScales(*self.scales(num_kv_heads))
        shape = (num_blocks, num_kv_heads, head_dim, block_size)
        cache = self.backend.new_kv_cache(*shape, scales)
        for pool in (cache.keys, cache.values):
            pool[...] = poison_for(pool)
        return cache

    def read(self, elements: npt.NDArray[Any], scale: Float32 | None) -> Float32:
        """What elements of head 0 stand for."""
        factor = np.float32(1) if scale is None else scale[0]
        return from_cpu(elements, self.cache_dtype).astype(np.float32) * factor

    def stand_for(self, keys: Float32, values: Float32) -> list[Float32]:
        """Numbers [n, heads, d] as they come back out of the cache."""
        return [
            dequantised(quantised(x, scale, self.cache_dtype), scale, self.cache_dtype)
            for x, scale in zip((keys, values), self.scales(keys.shape[1]), strict=True)
        ]


@pytest.fixture(params=["float32", "bfloat16", "fp8_e4m3", "int8"])
def caching(request: pytest.FixtureRequest) -> Iterator[Caching]:
    """The CPU backend with each type of cache; that of the weights matters to no other op here."""
    cache_dtype = str(request.param)
    dtype = "float32" if cache_dtype == "float32" else "bfloat16"
    opened = open_backend("cpu", dtype=dtype, kv_cache_dtype=cache_dtype, num_threads=2)
    yield Caching(opened, cache_dtype)
    opened.close()


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
def test_rope_and_store_kv(caching: Caching, head_dim: int) -> None:
    """Two query heads are rotated in place; one of keys and one of values go to their slots."""
    case, backend = rope_case(head_dim=head_dim), caching.backend
    heads, upload = backend.upload(case.x), backend.upload
    cache = caching.new_cache(3, 1, head_dim, 16)
    before = by_slot(cache, 3)
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
    all_keys, all_values = by_slot(cache, 3)
    keys = caching.read(all_keys[slots[kept], 0], cache.key_scale)
    # Half a step of each type: float32 and bfloat16, e4m3 above 2**-6 times the scale or below it,
    # and int8.
    rtol, step = {
        "float32": (1e-5, 0.0),
        "bfloat16": (2.0**-8, 0.0),
        "fp8_e4m3": (2.0**-4, 2.0**-10 * KEY_SCALE),
        "int8": (0.0, 0.5 * KEY_SCALE),
    }[caching.cache_dtype]
    np.testing.assert_allclose(keys, case.expected[kept, 2], rtol=rtol, atol=step + 1e-5)
    values = from_cpu(all_values[slots[kept], 0, :head_dim], caching.cache_dtype)
    scale = np.array([VALUE_SCALE], np.float32)
    expected = quantised(case.x[kept, 3:4], scale, caching.cache_dtype)
    np.testing.assert_array_equal(values, expected[:, 0])
    # Nothing else has changed: not where the token without a slot would be, nor the padding.
    for old, now in zip(before, (all_keys, all_values), strict=True):
        old[slots[kept], 0, :head_dim] = now[slots[kept], 0, :head_dim]
        assert old.tobytes() == now.tobytes()


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "int8"])
def test_elements_of_bytes_bit_for_bit(cache_dtype: str) -> None:
    """Every magnitude and sign, ties, what is beyond the range, and what is not a number."""
    rng = np.random.default_rng(0)
    special = [0.0, -0.0, np.inf, -np.inf, 448, 463.9, 464, 480, -449, 126.5, 127.5, 0.5, 1.5, 2.5]
    special += [2.0**-10, 3 * 2.0**-10, 2.0**-6, 2.0**-6 * (1 - 2.0**-24), 1.0625, 1.1875, 1e-40]
    random = rng.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    finite = random[np.isfinite(random)]
    spread = np.exp(4 * normal(rng, 4000))
    numbers = np.concatenate([np.array(special, np.float32), finite, normal(rng, 4000), spread])
    x = np.ascontiguousarray(numbers[: len(numbers) // 64 * 64].reshape(-1, 2, 32))
    x[-1, :, :2] = [np.nan, -np.nan]
    scales = np.array([1.0, 0.3], np.float32)
    backend = open_backend("cpu", dtype="float32", kv_cache_dtype=cache_dtype, num_threads=1)
    slots = np.arange(len(x), dtype=np.int64)
    num_blocks = -(-len(x) // 16)
    cache = backend.new_kv_cache(num_blocks, 2, 32, 16, KVScales(scales, scales))
    with np.errstate(invalid="ignore"):
        store_kv(backend, cache, x, x, slots)
        expected = quantised(np.nan_to_num(x, nan=-1e9), scales, cache_dtype)
    keys, found = (from_cpu(pool[: len(x)], cache_dtype) for pool in by_slot(cache, num_blocks))
    # Without an angle keys are as they were, but for what times 0 is not a number.
    both = np.isfinite(x).all(axis=-1)
    np.testing.assert_array_equal(keys[both], found[both])
    is_nan = np.isnan(x)
    assert found[~is_nan].tobytes() == expected[~is_nan].tobytes()
    if cache_dtype == "fp8_e4m3":
        assert np.isnan(found[is_nan].astype(np.float32)).all()
    else:
        assert (found[is_nan] == -127).all()
    backend.close()


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
def test_paged_attention(caching: Caching, case: AttentionCase) -> None:
    rng = np.random.default_rng(6)
    backend = caching.backend
    meta, num_blocks = make_meta(case, rng)
    cache = caching.new_cache(num_blocks, case.num_kv_heads, case.head_dim, case.block_size)
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
        keys, values = caching.stand_for(*history[row])
        expected = reference.attention(q[begin:end], keys, values, kv - queries, scale, case.window)
        # Queries and weights may be rounded to 8 bits: tests/cpu/test_attention.py is closer.
        largest = np.abs(values).max()
        atol = 2e-5 if backend.dtype == "float32" else 2.0**-8 * largest
        np.testing.assert_allclose(out[begin:end], expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "int8"])
def test_every_byte_is_read_as_what_it_stands_for(cache_dtype: str) -> None:
    """A token that sees only itself gets its value back, NaN too."""
    backend = open_backend("cpu", dtype="float32", kv_cache_dtype=cache_dtype, num_threads=1)
    scale = np.array([0.75], np.float32)
    cache = backend.new_kv_cache(1, 1, 256, 16, KVScales(scale, scale))
    numbers = np.arange(256).astype(np.uint8).view(NUMPY_TYPES[cache_dtype])
    cache.values[0, 0, 0, :, 0] = on_cpu(numbers, cache_dtype)
    case = AttentionCase("one token", ((1, 1),), num_heads=1, num_kv_heads=1, head_dim=256)
    made, _ = make_meta(case, np.random.default_rng(0))
    meta = replace(made, block_tables=np.zeros((1, 1), np.int32))
    plan = backend.plan(meta, num_heads=1, num_kv_heads=1)
    out = poisoned(backend, 1, 1, 256)
    q = np.ones((1, 1, 256), np.float32)
    backend.paged_attention(out, q, cache, plan, scale=1.0, sliding_window=None)
    np.testing.assert_array_equal(out[0, 0], numbers.astype(np.float32) * scale)
    assert np.isnan(out).sum() == (2 if cache_dtype == "fp8_e4m3" else 0)
    backend.close()


def test_scales_that_do_not_fit_are_refused() -> None:
    scale = np.ones(2, np.float32)
    others: list[Any] = [scale.astype(np.float64), scale[:1], -scale, scale * 0, scale * np.inf]
    for wrong in others:
        with pytest.raises(ValueError, match="scales"):
            KVScales(scale, wrong)
    plain = open_backend("cpu", dtype="float32", num_threads=1)
    with pytest.raises(ValueError, match="a cache of float32 has no scales"):
        plain.new_kv_cache(1, 2, 16, 16, KVScales(scale, scale))
    quantised = open_backend("cpu", dtype="float32", kv_cache_dtype="int8", num_threads=1)
    with pytest.raises(ValueError, match="2 scales do not fit num_kv_heads=3"):
        quantised.new_kv_cache(1, 3, 16, 16, KVScales(scale, scale))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_magnitudes_of_the_first_tokens(dtype: str) -> None:
    backend = open_backend("cpu", dtype=dtype, num_threads=1)
    cache = backend.new_kv_cache(3, 2, 20, 16)
    rng = np.random.default_rng(0)
    keys, values = normal(rng, 48, 2, 20), normal(rng, 48, 2, 20)
    values[33, 1, 4] = 100  # of a token that is not asked for
    keys[32, 0, 19] = -50
    store_kv(backend, cache, keys, values, np.arange(48))
    expected = [np.abs(stored(part[:33], dtype)).max((0, 2)) for part in (keys, values)]
    np.testing.assert_array_equal(backend.kv_magnitudes(cache, 33), expected)
    assert expected[0][0] == 50


def test_block_size_that_the_kernels_cannot_take(backend: Backend) -> None:
    with pytest.raises(BackendError, match="block_size=8"):
        backend.new_kv_cache(4, 1, 16, 8)


def test_shapes_that_do_not_fit_are_refused(backend: Backend) -> None:
    x = backend.empty((2, 8), "float32")
    with pytest.raises(ValueError, match="shapes do not fit"):
        backend.linear(x, x, backend.pack_linear(np.ones((8, 9), np.float32), None))
    with pytest.raises(ValueError, match="shapes do not fit"):
        backend.silu_and_mul(x, x)
