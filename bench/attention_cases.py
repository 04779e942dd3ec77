"""Cases of the ops on the paged KV cache: writing to it, copying it, decoding and prefilling."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from bench.op_cases import (
    Float32,
    OpCase,
    Prepared,
    cold_copies,
    item_bytes,
    normal,
    product_of,
    stored,
)
from rawpaged.backend import Backend, BatchMeta, KVCache
from rawpaged.cpu.kv_cache import by_slot
from rawpaged.models.config import ModelConfig
from tests import reference
from tests.ops.cases import store_kv

BLOCK_SIZE = 16
_CHECKED_REQUESTS = 4
_MOST_SLOT_SETS = 4096
MAX_POOL_BYTES = 2**30
"""Cases whose KV alone is larger are left out."""


def attention_cases(model: ModelConfig, rows: int, contexts: list[int], dtype: str) -> list[OpCase]:
    """`rows` tokens written, decoded (a request each) and prefilled (of one); blocks copied."""
    cases = [_rope_and_store_kv(model, rows, dtype), _copy_blocks(model, rows, dtype)]
    token_bytes = _kv_bytes_per_token(model, dtype)
    for context in contexts:
        if rows * context * token_bytes <= MAX_POOL_BYTES:
            cases.append(_paged_attention("decode", model, rows, 1, context, dtype))
        if 1 < rows <= context:
            cases.append(_paged_attention("prefill", model, 1, rows, context, dtype))
    return cases


def make_batch(block_tables: npt.NDArray[np.int32], queries: int, context: int) -> BatchMeta:
    """Requests with `queries` new tokens each, at the end of `context` tokens of KV."""
    num_requests = len(block_tables)
    own = np.arange(context - queries, context, dtype=np.int32)
    blocks = block_tables[:, own // BLOCK_SIZE].astype(np.int64)
    return BatchMeta(
        token_ids=np.zeros(num_requests * queries, np.int32),
        positions=np.tile(own, num_requests),
        slot_mapping=(blocks * BLOCK_SIZE + own % BLOCK_SIZE).reshape(-1),
        query_start_loc=np.arange(0, num_requests * queries + 1, queries, dtype=np.int32),
        seq_lens=np.full(num_requests, context, np.int32),
        block_tables=block_tables,
        logits_rows=np.zeros(0, np.int32),
    )


def attention_flops(num_heads: int, head_dim: int, queries: int, context: int) -> int:
    """Products of scores and weighted values over the keys that each query sees."""
    visible = queries * context - queries * (queries - 1) // 2
    return 4 * num_heads * head_dim * visible


def _kv_bytes_per_token(model: ModelConfig, dtype: str) -> int:
    return 2 * item_bytes(dtype) * model.num_kv_heads * model.head_dim


def _rope_and_store_kv(model: ModelConfig, rows: int, dtype: str) -> OpCase:
    q_heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim

    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        frequencies = 10000.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))
        angles = np.arange(1024)[:, None] * frequencies
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        positions = rng.integers(0, 1024, rows).astype(np.int32)
        num_slots = max(rows, cold_copies(_kv_bytes_per_token(model, dtype)))
        cache = backend.new_kv_cache(-(-num_slots // BLOCK_SIZE), kv_heads, head_dim, BLOCK_SIZE)
        qkv = normal(rng, rows, q_heads + 2 * kv_heads, head_dim)
        q, k, v = qkv[:, :q_heads], qkv[:, q_heads:-kv_heads], qkv[:, -kv_heads:]
        # Tokens of requests that decode go to unrelated slots.
        sets = min(num_slots // rows, _MOST_SLOT_SETS)
        slots = rng.permutation(num_slots)[: sets * rows].reshape(sets, rows)
        call = partial(backend.rope_and_store_kv, cache, q, k, v, positions, table)

        def check() -> None:
            rotated = reference.rope(qkv[:, :-kv_heads], positions, frequencies)
            call(slots[0])
            np.testing.assert_allclose(q, rotated[:, :q_heads], rtol=1e-5, atol=1e-5)
            keys, values = (_widened(x[slots[0]]) for x in by_slot(cache, len(cache.keys)))
            rounding = 1e-5 if dtype == "float32" else 2.0**-8
            np.testing.assert_allclose(keys, rotated[:, q_heads:], rtol=rounding, atol=1e-5)
            np.testing.assert_array_equal(values[..., :head_dim], stored(v, dtype))

        return Prepared([partial(call, each) for each in slots], check)

    return OpCase(
        op="rope_and_store_kv",
        name="rope_and_store_kv",
        rows=rows,
        num_bytes=rows
        * (_kv_bytes_per_token(model, dtype) + 4 * head_dim * (2 * q_heads + 2 * kv_heads + 1)),
        num_flops=3 * rows * (q_heads + kv_heads) * head_dim,
        stored=True,
        prepare=prepare,
    )


def _copy_blocks(model: ModelConfig, rows: int, dtype: str) -> OpCase:
    """`rows` blocks of one layer, to other blocks of the same pool."""
    shape = (model.num_kv_heads, model.head_dim)
    num_bytes = rows * 2 * BLOCK_SIZE * _kv_bytes_per_token(model, dtype)

    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        sets = cold_copies(num_bytes)
        cache = backend.new_kv_cache(2 * sets * rows, *shape, BLOCK_SIZE)
        keys = normal(rng, 2 * sets * rows * BLOCK_SIZE, *shape)
        store_kv(backend, cache, keys, -keys, np.arange(len(keys)))
        pairs = rng.permutation(2 * sets * rows).reshape(sets, rows, 2).astype(np.int64)

        def check() -> None:
            before = [backend.download(pool).copy() for pool in (cache.keys, cache.values)]
            backend.copy_blocks([cache], [cache], pairs[0])
            for pool, old in zip((cache.keys, cache.values), before, strict=True):
                old[pairs[0][:, 1]] = old[pairs[0][:, 0]]
                np.testing.assert_array_equal(backend.download(pool), old)

        return Prepared([partial(backend.copy_blocks, [cache], [cache], p) for p in pairs], check)

    return OpCase(
        op="copy_blocks",
        name="copy_blocks",
        rows=rows,
        num_bytes=num_bytes,
        num_flops=0,
        stored=True,
        prepare=prepare,
    )


def _paged_attention(
    name: str, model: ModelConfig, requests: int, queries: int, context: int, dtype: str
) -> OpCase:
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    rows = requests * queries
    kv_bytes = requests * context * _kv_bytes_per_token(model, dtype)
    scale = head_dim**-0.5

    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        copies = cold_copies(kv_bytes)
        width = -(-context // BLOCK_SIZE)
        cache = backend.new_kv_cache(copies * requests * width, kv_heads, head_dim, BLOCK_SIZE)
        order = rng.permutation(copies * requests * width).astype(np.int32)
        tables = order.reshape(copies, requests, width)
        history = normal(rng, 2, _CHECKED_REQUESTS, context, kv_heads, head_dim)
        _fill(backend, cache, tables, history)
        plans = [
            backend.plan(
                make_batch(table, queries, context), num_heads=heads, num_kv_heads=kv_heads
            )
            for table in tables
        ]
        q = normal(rng, rows, heads, head_dim)
        out = backend.empty(q.shape, "float32")
        calls = [
            partial(backend.paged_attention, out, q, cache, plan, scale=scale, sliding_window=None)
            for plan in plans
        ]

        def check() -> None:
            calls[0]()
            for request in range(min(requests, _CHECKED_REQUESTS)):
                part = slice(request * queries, (request + 1) * queries)
                keys, values = (stored(kv[request], dtype) for kv in history)
                expected = reference.attention(
                    q[part], keys, values, context - queries, scale, None
                )
                # Queries and weights may be rounded to bfloat16.
                atol = 2e-5 if dtype == "float32" else 2.0**-8 * np.abs(values).max()
                np.testing.assert_allclose(out[part], expected, rtol=1e-4, atol=atol)

        return Prepared(calls, check)

    return OpCase(
        op="paged_attention",
        name=name,
        rows=rows,
        context=context,
        num_bytes=kv_bytes + 8 * rows * heads * head_dim,
        num_flops=requests * attention_flops(heads, head_dim, queries, context),
        stored=True,
        product=product_of(dtype),
        prepare=prepare,
    )


def _fill(
    backend: Backend, cache: KVCache, tables: npt.NDArray[np.int32], history: Float32
) -> None:
    """Write histories f32[2, n, context, kv_heads, head_dim] to requests by turns, in each copy."""
    _, count, context, _, _ = history.shape
    for copy in tables:
        for request, table in enumerate(copy):
            slots = make_batch(table[None], context, context).slot_mapping
            keys, values = history[:, request % count]
            store_kv(backend, cache, keys, values, slots)


def _widened(pool: npt.NDArray[np.uint16] | Float32) -> Float32:
    """Stored numbers as float32; bfloat16 is the upper half of one."""
    if pool.dtype == np.uint16:
        return (pool.astype(np.uint32) << 16).view(np.float32)
    return pool.astype(np.float32)
