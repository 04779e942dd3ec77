"""Rotary position embedding with the writing of keys and values to the cache.

The twin of rawpaged/cpu/rope.py, in the half-split order of Hugging Face checkpoints (Su et al.
2021).
"""

from __future__ import annotations

from typing import Any

from rawpaged.gpu import grids
from rawpaged.gpu.arrays import ArrayInfo, array_info, check
from rawpaged.gpu.device import Device
from rawpaged.gpu.numba_kernels import LABELS, make_rope_store


class RopeStore:
    """Rotates q in place, and k on its way to a cache of the same type; stores v beside it.

    One launch for both; k itself stays as it is.
    """

    def __init__(self, device: Device) -> None:
        self._kernels = {dtype: device.jit(make_rope_store(dtype)) for dtype in LABELS}

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        positions: Any,
        cos_sin: Any,
        cache_keys: Any,
        cache_values: Any,
        slot_mapping: Any,
    ) -> None:
        """q T[n, num_heads, head_dim], k and v T[n, num_kv_heads, head_dim], views of any stride.

        The cache is T[num_blocks, num_kv_heads, block_size, head_dim] for keys and for values;
        slot_mapping i64[n] is block_id * block_size + offset, negative for a token to leave out.
        """
        queries, keys, values = array_info(q), array_info(k), array_info(v)
        pools = [array_info(cache_keys), array_info(cache_values)]
        slots = array_info(slot_mapping)
        check(
            queries.dtype in self._kernels
            and _has_angles(queries, positions, cos_sin)
            and keys.shape == values.shape
            and len(keys.shape) == 3
            and (keys.shape[0], keys.shape[2]) == (queries.shape[0], queries.shape[2])
            and all(info.dtype == queries.dtype for info in (keys, values, *pools))
            and all(_holds(pool, keys) for pool in pools)
            and pools[0].shape == pools[1].shape
            and (slots.dtype, slots.shape) == ("int64", keys.shape[:1]),
            q=q,
            k=k,
            v=v,
            positions=positions,
            cos_sin=cos_sin,
            cache_keys=cache_keys,
            cache_values=cache_values,
            slot_mapping=slot_mapping,
        )
        if 0 in queries.shape:
            return
        num_heads = queries.shape[1] + keys.shape[1]
        grid, block = grids.heads(queries.shape[0], num_heads, queries.shape[2] // 2)
        args = (q, k, v, positions, cos_sin, cache_keys, cache_values, slot_mapping)
        self._kernels[queries.dtype](grid, block, args)


def _has_angles(heads: ArrayInfo, positions: Any, cos_sin: Any) -> bool:
    """Whether every token has a position, and the table an angle for each pair of a head."""
    at, table = array_info(positions), array_info(cos_sin)
    return (
        len(heads.shape) == 3
        and heads.shape[2] % 2 == 0
        and (at.dtype, at.shape) == ("int32", heads.shape[:1])
        and table.dtype == "float32"
        and len(table.shape) == 2
        and table.shape[1] == heads.shape[2]
    )


def _holds(pool: ArrayInfo, keys: ArrayInfo) -> bool:
    return len(pool.shape) == 4 and (pool.shape[1], pool.shape[3]) == keys.shape[1:]
