"""Batches for attention kernels: random requests in poisoned pools, a run, float64 beside it.

Nothing that a batch does not own may be read: the pools are NaN outside of written slots, and block
tables point far away outside of visible keys.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.gpu.attention import PagedAttention, RaggedBatch, Workspace
from rawpaged.gpu.attention_work import AttentionWork
from rawpaged.gpu.kv_cache import cache_shape
from tests import reference
from tests.hostsim.loader import HostLoader
from tests.ops.cases import AttentionCase
from tests.ops.kv_elements import NUMPY_TYPES, dequantised, poisoned_pool, quantised, raw

Floats = npt.NDArray[Any]

PARTITION_TOKENS = 32
NO_BLOCK = 2**30
"""In block tables where no block may be looked up."""


@dataclass(frozen=True)
class Extras:
    """What the shared cases do not have."""

    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    soft_cap: float | None = None
    sinks: bool = False


PLAIN = Extras()


class Batch:
    """Arrays of one case: random keys and values in blocks at random places."""

    def __init__(self, case: AttentionCase, extras: Extras = PLAIN, seed: int = 0) -> None:
        self.case, self.extras = case, extras
        rng = np.random.default_rng(seed)
        self.counts = [queries for queries, _ in case.lengths]
        self.query_start_loc = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)
        self.seq_lens = np.array([kv for _, kv in case.lengths], np.int32)
        scales = rng.uniform(0.01, 0.04, (2, case.num_kv_heads)).astype(np.float32)
        self.key_scale, self.value_scale = scales
        needed = [-(-kv // case.block_size) for _, kv in case.lengths]
        order = rng.permutation(sum(needed) + 3).astype(np.int32)
        shape = cache_shape(len(order), case.num_kv_heads, case.head_dim, case.block_size)
        pools = [poisoned_pool(shape, extras.cache_dtype) for _ in range(2)]
        self.block_tables = np.full((len(needed), max(needed) + 1), NO_BLOCK, np.int32)
        self.history = []
        for row, (queries, kv) in enumerate(case.lengths):
            first_seen = 0 if case.window is None else max(0, kv - queries + 1 - case.window)
            tokens = np.arange(kv)
            block = order[sum(needed[:row]) + tokens // case.block_size]
            seen = tokens >= first_seen
            self.block_tables[row, tokens[seen] // case.block_size] = block[seen]
            self.history.append(
                [
                    self._fill(pool, block, tokens % case.block_size, seen, scale, rng)
                    for pool, scale in zip(pools, scales, strict=True)
                ]
            )
        self.keys, self.values = (raw(pool, extras.cache_dtype) for pool in pools)
        self.q = self._queries(rng)
        self.sinks = (
            rng.standard_normal(case.num_heads).astype(np.float32) if extras.sinks else None
        )

    def _fill(
        self,
        pool: Floats,
        block: Floats,
        offset: Floats,
        seen: Floats,
        scale: Floats,
        rng: np.random.Generator,
    ) -> Floats:
        """Write a request's visible elements; the values that they stand for, of all."""
        shape = (len(block), self.case.num_kv_heads, self.case.head_dim)
        elements = quantised(rng.standard_normal(shape), scale, self.extras.cache_dtype)
        pool[block[seen], :, offset[seen]] = elements[seen]
        return dequantised(elements, scale, self.extras.cache_dtype)

    def _queries(self, rng: np.random.Generator) -> Floats:
        """A view of rows that hold keys and values too, as the model's are."""
        case = self.case
        heads = case.num_heads + 2 * case.num_kv_heads
        qkv = rng.standard_normal((sum(self.counts), heads, case.head_dim))
        q: Floats = qkv.astype(NUMPY_TYPES[self.extras.dtype])[:, : case.num_heads]
        return q

    def only(self, rows: Sequence[int]) -> Batch:
        """The same requests, fewer and in another order, in blocks at other places."""
        part = copy.copy(self)
        part.counts = [self.counts[row] for row in rows]
        part.query_start_loc = np.concatenate([[0], np.cumsum(part.counts)]).astype(np.int32)
        part.seq_lens = self.seq_lens[list(rows)]
        part.q = np.concatenate(
            [self.q[self.query_start_loc[row] : self.query_start_loc[row + 1]] for row in rows]
        )
        moved = np.random.default_rng(1).permutation(len(self.keys)).astype(np.int32)
        part.keys, part.values = np.empty_like(self.keys), np.empty_like(self.values)
        part.keys[moved], part.values[moved] = self.keys, self.values
        table = self.block_tables[list(rows)]
        used = table != NO_BLOCK
        part.block_tables = np.where(used, moved[np.where(used, table, 0)], NO_BLOCK)
        return part

    def expected(self, *, plain: bool = False) -> Floats:
        """In float64, or the straightforward computation: float32, rounded to the type once."""
        case, out = self.case, []
        for row, (keys, values) in enumerate(self.history):
            begin, end = self.query_start_loc[row : row + 2]
            start = case.lengths[row][1] - case.lengths[row][0]
            arguments = (start, case.head_dim**-0.5, case.window, self.extras.soft_cap, self.sinks)
            attend = _attention_float32 if plain else reference.attention
            out.append(attend(self.q[begin:end], keys, values, *arguments))
        result = np.concatenate(out)
        return result.astype(self.q.dtype).astype(np.float64) if plain else result


def _attention_float32(
    q: Floats,
    keys: Floats,
    values: Floats,
    start: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Floats | None,
) -> Floats:
    """The formula with every operation in float32, one query and head at a time."""
    out = np.empty(q.shape, np.float32)
    group = q.shape[1] // keys.shape[1]
    for t in range(q.shape[0]):
        last = start + t
        first = 0 if window is None else max(0, last + 1 - window)
        for h in range(q.shape[1]):
            k, v = (
                part[first : last + 1, h // group].astype(np.float32) for part in (keys, values)
            )
            scores = k @ q[t, h].astype(np.float32) * np.float32(scale)
            if soft_cap is not None:
                scores = np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))
            most = scores.max() if sinks is None else max(scores.max(), sinks[h])
            weights = np.exp(scores - most)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - most))
            out[t, h] = weights @ v / total
    return out


def make_attention(
    loader: HostLoader,
    case: AttentionCase,
    extras: Extras = PLAIN,
    *,
    max_items: int = 64,
    partition_tokens: int = PARTITION_TOKENS,
    grid_items: int = 1024,
) -> tuple[PagedAttention, Workspace]:
    """The launcher of a case and its workspace, full of NaN."""
    workspace = Workspace.allocate(np.empty, max_items, case.num_heads, case.head_dim)
    for array in (workspace.out, workspace.top, workspace.sum):
        array[...] = np.nan
    attention = PagedAttention(
        loader,
        dtype=extras.dtype,
        cache_dtype=extras.cache_dtype,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        workspace=workspace,
        partition_tokens=partition_tokens,
        grid_items=grid_items,
    )
    return attention, workspace


def run(attention: PagedAttention, batch: Batch, work: AttentionWork | None = None) -> Floats:
    """The output, in an array whose rows have a gap that must stay as it is."""
    case, extras = batch.case, batch.extras
    wide = np.full((len(batch.q), case.num_heads + 1, case.head_dim), np.nan, batch.q.dtype)
    out = wide[:, : case.num_heads]
    plan = RaggedBatch(
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_tables,
        work or attention.plan(batch.query_start_loc, batch.seq_lens),
    )
    is_scaled = attention.cache_type.is_scaled
    attention(
        out,
        batch.q,
        batch.keys,
        batch.values,
        plan,
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
        soft_cap=extras.soft_cap,
        key_scale=batch.key_scale if is_scaled else None,
        value_scale=batch.value_scale if is_scaled else None,
        sinks=batch.sinks,
    )
    assert np.isnan(wide[:, case.num_heads :].astype(np.float32)).all()
    return out


def check_case(loader: HostLoader, case: AttentionCase, extras: Extras = PLAIN) -> None:
    batch = Batch(case, extras)
    attention, _ = make_attention(loader, case, extras)
    check_output(run(attention, batch), batch)


def check_output(out: Floats, batch: Batch) -> None:
    """At most twice as far from float64 as the formula in float32, rounded to the type once."""
    expected = batch.expected()
    error = np.abs(out.astype(np.float64) - expected).max()
    plain_error = np.abs(batch.expected(plain=True) - expected).max()
    rounding = np.finfo(np.float32).eps
    assert error <= 2 * plain_error + rounding, f"{error=} {plain_error=}"


def bits(x: Floats) -> bytes:
    return np.ascontiguousarray(x).tobytes()
