"""The ops of rawpaged.backend that meet a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rawpaged.backend import AttentionPlan, KVCache, KVScales, check_block_pairs, check_scales
from rawpaged.cpu import kv_cache
from rawpaged.cpu.arguments import RowsOf
from rawpaged.cpu.attention_op import AttentionOp
from rawpaged.cpu.checks import check_shapes
from rawpaged.cpu.kv_ahead import KVAhead
from rawpaged.cpu.kv_cache import as_words, copy_block_pairs
from rawpaged.cpu.linear import ROW_GRAIN, best_arithmetic
from rawpaged.cpu.linear_inputs import Input
from rawpaged.cpu.products import Arithmetic
from rawpaged.cpu.rope import rope_and_store_rows
from rawpaged.cpu.threads import PerRow, ThreadTeam

Float32 = npt.NDArray[np.float32]

_COPY_GRAIN_BYTES = 32 << 10
"""Bytes copied in a part, at least: a microsecond or more."""


class CacheOps:
    """Pools of `cache_dtype` where scales are given, else of `dtype`, and the ops over both."""

    def __init__(
        self, team: ThreadTeam, ahead: KVAhead, *, dtype: str, cache_dtype: str
    ) -> None:
        self.dtype = dtype
        self.cache_dtype = cache_dtype
        self._team = team
        self._ahead = ahead
        # Queries and weights stay float32 where the model is, whatever the cache holds.
        pairs: Arithmetic = "bfloat16" if dtype == "float32" else best_arithmetic(dtype)
        self._attention = AttentionOp(team, pairs)

    def new_kv_cache(
        self,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scales: KVScales | None,
    ) -> KVCache:
        cache_dtype = self.dtype
        if scales is not None:
            check_scales(scales, num_kv_heads, self.cache_dtype)
            cache_dtype = self.cache_dtype
        shape = (num_blocks, num_kv_heads, head_dim, block_size)
        return kv_cache.new_kv_cache(*shape, cache_dtype, scales)

    def new_host_kv_cache(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> KVCache:
        shape = (num_blocks, num_kv_heads, head_dim, block_size)
        return kv_cache.new_kv_cache(*shape, self.cache_dtype, None)

    def rope_and_store_kv(
        self,
        cache: KVCache,
        q: Float32,
        k: Float32,
        v: Float32,
        positions: npt.NDArray[np.int32],
        cos_sin: Float32,
        slot_mapping: npt.NDArray[np.int64],
    ) -> None:
        check_shapes(
            k.shape == v.shape
            and k.shape == (len(slot_mapping), cache.keys.shape[1], kv_cache.head_dim_of(cache))
            and len(q) == len(positions) == len(slot_mapping)
            and q.shape[2] == k.shape[2] == cos_sin.shape[1],
            q=q,
            k=k,
            v=v,
            positions=positions,
            slot_mapping=slot_mapping,
            cos_sin=cos_sin,
            cache=cache.keys,
        )
        if q.size == 0:
            return
        grain = max(1, ROW_GRAIN * len(q) // q.size)
        self._team.run(
            rope_and_store_rows,
            PerRow(len(q)),
            cache.keys,
            cache.values,
            RowsOf(q),
            RowsOf(k),
            RowsOf(v),
            positions,
            cos_sin,
            slot_mapping,
            *kv_cache.scales_of(cache),
            grain=grain,
        )

    def copy_blocks(
        self,
        targets: Sequence[KVCache],
        sources: Sequence[KVCache],
        pairs: npt.NDArray[np.int64],
    ) -> None:
        check_block_pairs(targets, sources, pairs)
        for target, source in zip(targets, sources, strict=True):
            for to, origin in ((target.keys, source.keys), (target.values, source.values)):
                check_shapes(
                    to.shape[1:] == origin.shape[1:] and to.dtype == origin.dtype,
                    target=to,
                    source=origin,
                )
                to_words, origin_words = as_words(to), as_words(origin)
                grain = max(1, _COPY_GRAIN_BYTES // max(1, origin_words.strides[0]))
                self._team.run(
                    copy_block_pairs, len(pairs), to_words, origin_words, pairs, grain=grain
                )

    def paged_attention(
        self,
        out: Input,
        q: Float32,
        cache: KVCache,
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        check_shapes(
            out.shape == q.shape and q.shape[2] == kv_cache.head_dim_of(cache),
            out=out,
            q=q,
            cache=cache.keys,
        )
        self._ahead.before_attention(cache, plan, sliding_window)
        self._attention(out, q, cache, plan, scale=scale, sliding_window=sliding_window)
