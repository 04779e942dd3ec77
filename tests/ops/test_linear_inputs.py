"""An input of linear layers in their own form gives the bits that float32 gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.backend import LinearWeight, QuantizedRows
from rawpaged.cpu.backend import CpuBackend
from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.linear_inputs import LinearInput
from tests.cpu.blocks import random_rows
from tests.ops.cases import AttentionCase, make_meta

NUM_TOKENS = 21
Float32 = npt.NDArray[np.float32]


@pytest.fixture(params=["float32", "bfloat16"])
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    opened = CpuBackend(dtype=request.param, num_threads=2)
    yield opened
    opened.close()


def weights(backend: CpuBackend, kind: str, in_features: int) -> list[LinearWeight]:
    """Two layers that take inputs of one form, or of two where `kind` says so."""
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((40, in_features)).astype(np.float32)
    plain = backend.pack_linear(floats, None)
    if kind == "floats":
        return [plain, backend.pack_linear(floats[::-1], None)]
    layers: list[LinearWeight] = [
        backend.pack_quantized([QuantizedRows(name, random_rows(rng, name, 64, in_features))], None)
        for name in ("Q8_0", "Q4_1")
    ]
    return [*layers, plain] if kind == "mixed" else layers


def makers(backend: CpuBackend, size: int) -> dict[str, Callable[[Any], None]]:
    """Ops that write an input of `size` columns; rows of zeros and of infinities are among them."""
    rng = np.random.default_rng(1)
    x, residual = rng.standard_normal((2, NUM_TOKENS, size)).astype(np.float32)
    x[3] = residual[3] = 0
    x[4, 5] = np.inf
    gate_up = rng.standard_normal((NUM_TOKENS, 2 * size)).astype(np.float32) * 10
    gate_up[7, :size] = 0
    weight = rng.standard_normal(size).astype(np.float32)
    return {
        "rms_norm": lambda out: backend.rms_norm(out, residual, weight, 1e-5),
        "add_rms_norm": lambda out: backend.add_rms_norm(out, x, residual.copy(), weight, 1e-5),
        "silu_and_mul": lambda out: backend.silu_and_mul(out, gate_up),
    }


@pytest.mark.parametrize("kind", ["floats", "blocks", "mixed"])
@pytest.mark.parametrize("size", [96, 31])
def test_the_bits_of_float32(backend: CpuBackend, kind: str, size: int) -> None:
    if kind != "floats" and size % 32:
        pytest.skip("blocks have 32 columns")
    layers = weights(backend, kind, size)
    rows = np.array([4, 0, 20, 7, 3], np.int32)
    for make in makers(backend, size).values():
        plain = np.full((NUM_TOKENS, size), np.nan, np.float32)
        make(plain)
        own = backend.linear_input(NUM_TOKENS + 2, layers)[:NUM_TOKENS]
        make(own)
        assert own.shape == plain.shape
        chosen = backend.linear_input(len(rows), layers)
        backend.gather_rows(chosen, own, rows)
        for layer in layers:
            for x, expected_x in ((own, plain), (chosen, plain[rows])):
                out = np.empty((2, len(x), layer.out_features), np.float32)
                backend.linear(out[0], x, layer)
                backend.linear(out[1], expected_x, layer)
                np.testing.assert_array_equal(out[0], out[1])


@pytest.mark.parametrize("kind", ["floats", "blocks", "mixed"])
@pytest.mark.parametrize("head_dim", [64, 48])
def test_attention_gives_the_bits_of_float32(
    backend: CpuBackend, kind: str, head_dim: int
) -> None:
    """Whole tiles, and a long query that is split and merged; blocks lie in heads, or across."""
    case = AttentionCase(
        "", ((1, 2100), (20, 300)), num_heads=4, num_kv_heads=2, head_dim=head_dim
    )
    rng = np.random.default_rng(2)
    meta, num_blocks = make_meta(case, rng)
    cache = backend.new_kv_cache(num_blocks, 2, head_dim, case.block_size)
    for pool in (cache.keys, cache.values):
        floats = rng.standard_normal(pool.shape).astype(np.float32)
        pool[...] = floats.view(np.uint32) >> 16 if pool.dtype == np.uint16 else floats
    q = rng.standard_normal((NUM_TOKENS, 4, head_dim)).astype(np.float32)
    layers = weights(backend, kind, 4 * head_dim)
    plan = backend.plan(meta, num_heads=4, num_kv_heads=2)
    assert plan.work.num_merges[0] > 0
    plain = np.full((NUM_TOKENS, 4 * head_dim), np.nan, np.float32)
    own = backend.linear_input(NUM_TOKENS + 2, layers, piece=head_dim)[:NUM_TOKENS]
    for out in (plain, own):
        heads = out.reshape((NUM_TOKENS, 4, head_dim))
        backend.paged_attention(heads, q, cache, plan, scale=0.1, sliding_window=None)
    assert isinstance(own, LinearInput) == has_form(backend, kind, head_dim)
    for layer in layers:
        products = np.empty((2, NUM_TOKENS, layer.out_features), np.float32)
        backend.linear(products[0], own, layer)
        backend.linear(products[1], plain, layer)
        assert np.isfinite(products).all()
        np.testing.assert_array_equal(products[0], products[1])


def has_form(backend: CpuBackend, kind: str, head_dim: int) -> bool:
    """Whether attention can write the form that the layers of a kind take."""
    if kind == "blocks":
        return head_dim % 32 == 0
    return kind == "floats" and backend.dtype == "bfloat16" and FEATURES.avx512_bf16


def test_each_form_is_used() -> None:
    """So that the comparison above compares different things."""
    backend = CpuBackend(dtype="bfloat16", num_threads=1)
    blocks = backend.linear_input(3, weights(backend, "blocks", 64))
    assert isinstance(blocks, LinearInput)
    assert blocks.data.dtype == np.uint8
    assert (blocks.shape, blocks[:2].shape) == ((3, 64), (2, 64))
    assert isinstance(backend.linear_input(3, weights(backend, "mixed", 64)), np.ndarray)
    plain = weights(backend, "floats", 64)[0]
    with pytest.raises((TypeError, ValueError), match="made for other weights"):
        backend.linear(np.empty((3, 40), np.float32), blocks, plain)
    backend.close()
