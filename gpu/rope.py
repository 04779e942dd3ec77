"""Rotary position embedding with the writing of keys and values to the cache.

The twin of rawpaged/cpu/rope.py, in the half-split order of Hugging Face checkpoints (Su et al.
2021).
"""

from __future__ import annotations

from typing import Any

from rawpaged.gpu import grids
from rawpaged.gpu.arrays import ArrayInfo, array_info, check
from rawpaged.gpu.device import Device
from rawpaged.gpu.kv_cache import ELEMENT_TYPES, check_types, checked_scales
from rawpaged.gpu.numba_kernels import make_rope_store


class RopeStore:
    """Rotates q in place, and k on its way to a cache; stores v beside it.

    dtype is "bfloat16" or "float16"; cache_dtype is the same, "fp8_e4m3" (arrays of uint8) or
    "int8". One launch for both; k itself stays as it is. Raises BackendError for other types.
    """

    def __init__(self, device: Device, *, dtype: str, cache_dtype: str) -> None:
        check_types(dtype, cache_dtype)
        self.dtype = dtype
        self.cache_type = ELEMENT_TYPES[cache_dtype]
        self._kernel = device.jit(make_rope_store(dtype, cache_dtype))

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
        *,
        key_scale: Any = None,
        value_scale: Any = None,
    ) -> None:
        """q T[n, num_heads, head_dim], k and v T[n, num_kv_heads, head_dim], views of any stride.

        The cache is C[num_blocks, num_kv_heads, block_size, head_dim] for keys and for values;
        slot_mapping i64[n] is block_id * block_size + offset, negative for a token to leave out.
        Scales f32[num_kv_heads] go with caches of bytes and only with them: what is stored is
        x / scale, rounded to nearest even and clamped to the finite range, for int8 [-127, 127].
        """
        queries, keys, values = array_info(q), array_info(k), array_info(v)
        pools = [array_info(cache_keys), array_info(cache_values)]
        slots = array_info(slot_mapping)
        check(
            queries.dtype == self.dtype
            and _has_angles(queries, positions, cos_sin)
            and keys.shape == values.shape
            and len(keys.shape) == 3
            and (keys.shape[0], keys.shape[2]) == (queries.shape[0], queries.shape[2])
            and all(info.dtype == self.dtype for info in (keys, values))
            and all(self._holds(pool, keys) for pool in pools)
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
        scales = checked_scales(self.cache_type, keys.shape[1], key_scale, value_scale)
        if 0 in queries.shape:
            return
        num_heads = queries.shape[1] + keys.shape[1]
        grid, block = grids.heads(queries.shape[0], num_heads, queries.shape[2] // 2)
        args = (q, k, v, positions, cos_sin, cache_keys, cache_values, slot_mapping)
        # Not read in a cache that has none.
        self._kernel(grid, block, (*args, *(scales or (cos_sin[0], cos_sin[0]))))

    def _holds(self, pool: ArrayInfo, keys: ArrayInfo) -> bool:
        return (
            pool.dtype == self.cache_type.array_dtype
            and len(pool.shape) == 4
            and (pool.shape[1], pool.shape[3]) == keys.shape[1:]
        )


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
