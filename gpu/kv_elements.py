"""What a number is stored as in a KV cache, for kernels in Numba-CUDA.

The twin of rawpaged/cpu/kv_elements.py; the bits of bytes are those of kernels/store_kv.cu too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.cuda
import numpy as np

cuda: Any = numba.cuda

_MOST_E4M3 = np.float32(448.0)
_LEAST_NORMAL = np.float32(2.0**-6)
_HALF_STEP = np.uint32(0x7FFFF)
_REBIAS = np.uint32((127 - 7) << 3)
_NAN = np.uint8(0x7F)
# Added to a number below 2**-6, this leaves multiples of 2**-9 in the low bits, rounded.
_SUBNORMAL_STEP = np.float32(2.0**14)
_SUBNORMAL_BITS = np.uint32(0x46800000)

_MOST_INT8 = np.float32(127.0)
# Added to a number below 2**22, this leaves it in the low bits as an integer, rounded.
_INTEGER_STEP = np.float32(1.5 * 2.0**23)
_INTEGER_BITS = np.int32(0x4B400000)


def make_element(store: Callable[..., Any], cache_dtype: str) -> Callable[..., Any]:
    """A device function element(x f32, scale f32) of what a cache of this type holds for x.

    `store` makes elements of the activations' type; the scale is for caches of bytes.
    """

    @cuda.jit(device=True)
    def unscaled(x, scale):
        return store(x)

    @cuda.jit(device=True)
    def e4m3(x, scale):
        x = np.float32(x / scale)
        sign = np.uint32(x.view(np.uint32) >> np.uint32(24)) & np.uint32(0x80)
        if x != x:
            return _NAN
        size = min(abs(x), _MOST_E4M3)
        if size >= _LEAST_NORMAL:
            bits = np.float32(size).view(np.uint32)
            odd = np.uint32(bits >> np.uint32(20)) & np.uint32(1)
            rounded = np.uint32(np.uint32(bits + _HALF_STEP + odd) >> np.uint32(20))
            return np.uint8(np.uint32(rounded - _REBIAS) | sign)
        shifted = np.float32(size + _SUBNORMAL_STEP)
        return np.uint8(np.uint32(shifted.view(np.uint32) - _SUBNORMAL_BITS) | sign)

    @cuda.jit(device=True)
    def int8(x, scale):
        x = np.float32(x / scale)
        x = x if x > -_MOST_INT8 else -_MOST_INT8  # NaN too
        x = x if x < _MOST_INT8 else _MOST_INT8
        shifted = np.float32(x + _INTEGER_STEP)
        return np.int8(shifted.view(np.int32) - _INTEGER_BITS)

    made: Callable[..., Any] = {"fp8_e4m3": e4m3, "int8": int8}.get(cache_dtype, unscaled)
    return made
