"""The ops of rawpaged.backend that meet a KV cache, over launchers for each type of cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.backend import AttentionPlan, KVCache, KVScales, check_scales
from rawpaged.gpu.attention import PagedAttention, Workspace
from rawpaged.gpu.device import Device
from rawpaged.gpu.kv_cache import (
    ELEMENT_TYPES,
    bytes_per_block,
    cache_shape,
    check_cache_shape,
    check_types,
)
from rawpaged.gpu.rope import RopeStore

_WORKSPACE_ITEMS = 1024
"""Partitions of decode attention in flight; more are done in rounds."""


class CacheOps:
    """Pools of `cache_dtype` where scales are given, else of `dtype`, and the ops over both.

    Launchers are made when an op first meets a shape. Raises BackendError for types that the
    kernels do not take.
    """

    def __init__(self, device: Device, *, dtype: str, cache_dtype: str) -> None:
        check_types(dtype, cache_dtype)
        self.dtype = dtype
        self.cache_dtype = cache_dtype
        self._device = device
        self._rope_stores: dict[str, RopeStore] = {}
        self._attentions: dict[tuple[str, int, int, int, int], PagedAttention] = {}
        self._workspaces: dict[tuple[int, int], Workspace] = {}
        self._head_dim_and_block_size: tuple[int, int] | None = None

    def clear(self) -> None:
        """Forget every launcher with its workspace."""
        for kept in (self._rope_stores, self._attentions, self._workspaces):
            kept.clear()

    def bytes_per_block(self, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        check_cache_shape(head_dim, block_size)
        return bytes_per_block(num_kv_heads, head_dim, block_size, self.cache_dtype)

    def new_kv_cache(
        self,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scales: KVScales | None,
    ) -> KVCache:
        check_cache_shape(head_dim, block_size)
        self._head_dim_and_block_size = (head_dim, block_size)
        shape = cache_shape(num_blocks, num_kv_heads, head_dim, block_size)
        empty, upload = self._device.empty, self._device.upload
        if scales is None:
            return KVCache(empty(shape, self.dtype), empty(shape, self.dtype), block_size)
        check_scales(scales, num_kv_heads, self.cache_dtype)
        array_dtype = ELEMENT_TYPES[self.cache_dtype].array_dtype
        return KVCache(
            keys=empty(shape, array_dtype),
            values=empty(shape, array_dtype),
            block_size=block_size,
            key_scale=upload(scales.keys),
            value_scale=upload(scales.values),
        )

    def new_host_kv_cache(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> KVCache:
        check_cache_shape(head_dim, block_size)
        shape = cache_shape(num_blocks, num_kv_heads, head_dim, block_size)
        array_dtype = ELEMENT_TYPES[self.cache_dtype].array_dtype
        return KVCache(
            keys=self._device.pinned(shape, array_dtype),
            values=self._device.pinned(shape, array_dtype),
            block_size=block_size,
        )

    def kv_magnitudes(self, cache: KVCache, num_tokens: int) -> npt.NDArray[np.float32]:
        assert cache.key_scale is None, "for a cache of floats"
        found = []
        for pool in (cache.keys, cache.values):
            heads = np.moveaxis(self._device.download(pool).astype(np.float32), 1, 2)
            tokens = heads.reshape(-1, *heads.shape[2:])[:num_tokens]
            found.append(np.abs(tokens).max(axis=(0, 2)))
        return np.array(found, np.float32)

    def rope_and_store_kv(
        self,
        cache: KVCache,
        q: Any,
        k: Any,
        v: Any,
        positions: Any,
        cos_sin: Any,
        slot_mapping: Any,
    ) -> None:
        cache_dtype = self._dtype_of(cache)
        if cache_dtype not in self._rope_stores:
            self._rope_stores[cache_dtype] = RopeStore(
                self._device, dtype=self.dtype, cache_dtype=cache_dtype
            )
        self._rope_stores[cache_dtype](
            q,
            k,
            v,
            positions,
            cos_sin,
            cache.keys,
            cache.values,
            slot_mapping,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )

    def paged_attention(
        self,
        out: Any,
        q: Any,
        cache: KVCache,
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        attention = self._attention(q.shape[1], cache.keys.shape[1], self._dtype_of(cache))
        attention(
            out,
            q,
            cache.keys,
            cache.values,
            plan,
            scale=scale,
            sliding_window=sliding_window,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )

    def attention(self, num_heads: int, num_kv_heads: int) -> PagedAttention:
        """What plans work for pools of any type: how it is split does not depend on that."""
        return self._attention(num_heads, num_kv_heads, self.cache_dtype)

    def _dtype_of(self, cache: KVCache) -> str:
        return self.dtype if cache.key_scale is None else self.cache_dtype

    def _attention(self, num_heads: int, num_kv_heads: int, cache_dtype: str) -> PagedAttention:
        assert self._head_dim_and_block_size is not None, "new_kv_cache comes first"
        head_dim, block_size = self._head_dim_and_block_size
        key = (cache_dtype, num_heads, num_kv_heads, head_dim, block_size)
        if key not in self._attentions:
            self._attentions[key] = PagedAttention(
                self._device.loader,
                dtype=self.dtype,
                cache_dtype=cache_dtype,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                workspace=self._workspace(num_heads, head_dim),
            )
        return self._attentions[key]

    def _workspace(self, num_heads: int, head_dim: int) -> Workspace:
        """Shared by all layers and types of pools: launches follow one another."""
        key = (num_heads, head_dim)
        if key not in self._workspaces:
            empty = self._device.empty
            self._workspaces[key] = Workspace.allocate(
                lambda shape, dtype: empty(shape, np.dtype(dtype).name), _WORKSPACE_ITEMS, *key
            )
        return self._workspaces[key]
