"""Shapes that every backend's ops are held against; one table, so that backends cannot drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.backend import Backend, BatchMeta, KVCache


@dataclass(frozen=True)
class AttentionCase:
    """A ragged batch: (queries, KV length) of each request."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None


ATTENTION_CASES = (
    AttentionCase("one token alone", ((1, 1),)),
    AttentionCase("decode", ((1, 17), (1, 16), (1, 15), (1, 100))),
    AttentionCase("whole prompts", ((33, 33), (16, 16), (1, 1))),
    AttentionCase("chunks and single tokens", ((20, 50), (1, 70), (7, 7), (1, 2), (64, 129))),
    AttentionCase("multi-head", ((5, 40), (1, 33)), num_heads=3, num_kv_heads=3),
    AttentionCase("multi-query", ((5, 40), (1, 33)), num_heads=8, num_kv_heads=1),
    AttentionCase("group of three", ((9, 40), (1, 200)), num_heads=9, num_kv_heads=3),
    AttentionCase("group larger than a tile", ((2, 20),), num_heads=40, num_kv_heads=1),
    AttentionCase("head size 16", ((5, 40), (1, 33)), head_dim=16),
    AttentionCase("head size 80", ((5, 40), (1, 33)), head_dim=80),
    AttentionCase("head size 96", ((5, 40), (1, 33)), head_dim=96),
    AttentionCase("head size 128", ((5, 40), (1, 33)), head_dim=128),
    AttentionCase("head size 256", ((5, 40), (1, 33)), head_dim=256),
    AttentionCase("head size no multiple of 16", ((5, 40), (1, 33)), head_dim=100),
    AttentionCase("block size 32", ((20, 50), (1, 70)), block_size=32),
    AttentionCase("block size 128", ((20, 50), (1, 300)), block_size=128),
    AttentionCase("window inside a block", ((1, 100), (30, 90)), window=5),
    AttentionCase("window of blocks", ((1, 100), (64, 129), (1, 3)), window=32),
    AttentionCase("window longer than all", ((1, 100), (20, 20)), window=1000),
    AttentionCase("window of one", ((1, 40), (3, 20)), window=1),
)

LINEAR_SHAPES = (
    # rows, in_features, out_features
    (1, 64, 64),
    (1, 576, 1000),
    (2, 1, 33),
    (3, 7, 31),
    (4, 64, 1),
    (7, 100, 95),
    (8, 33, 32),
    (13, 257, 70),
    (64, 128, 160),
)


def make_meta(case: AttentionCase, rng: np.random.Generator) -> tuple[BatchMeta, int]:
    """The case's batch over blocks in random order, and the size of a pool with blocks to spare."""
    needed = [-(-kv // case.block_size) for _, kv in case.lengths]
    num_blocks = sum(needed) + 3
    order = rng.permutation(num_blocks).astype(np.int32)
    tables = np.zeros((len(needed), max(needed)), np.int32)
    positions, slots, used = [], [], 0
    for row, (count, (queries, kv)) in enumerate(zip(needed, case.lengths, strict=True)):
        tables[row, :count] = order[used : used + count]
        used += count
        own = np.arange(kv - queries, kv, dtype=np.int32)
        positions.append(own)
        block = tables[row, own // case.block_size].astype(np.int64)
        slots.append(block * case.block_size + own % case.block_size)
    query_lens = [q for q, _ in case.lengths]
    meta = BatchMeta(
        token_ids=np.zeros(sum(query_lens), np.int32),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_start_loc=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        seq_lens=np.array([kv for _, kv in case.lengths], np.int32),
        block_tables=tables,
        logits_rows=np.zeros(0, np.int32),
    )
    return meta, num_blocks


def store_kv(
    backend: Backend, cache: KVCache, keys: Any, values: Any, slots: npt.NDArray[np.int64]
) -> None:
    """Write keys and values as they are: rotated by no angle."""
    num_tokens, _, head_dim = keys.shape
    cos_sin = np.concatenate([np.ones(head_dim // 2), np.zeros(head_dim // 2)])[None]
    backend.rope_and_store_kv(
        cache,
        backend.empty((num_tokens, 1, head_dim), backend.activation_dtype),
        keys,
        values,
        backend.upload(np.zeros(num_tokens, np.int32)),
        backend.upload(cos_sin.astype(np.float32)),
        backend.upload(slots),
    )
