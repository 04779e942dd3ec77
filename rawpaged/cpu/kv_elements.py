"""Elements of a KV cache in njit code: what a number is stored as, and what e4m3 stands for.

float32, bfloat16 as uint16, and two types of one byte with a scale a KV head: FP8 (e4m3, of OCP's
"8-bit Floating Point Specification", without infinities) as uint8, and int8. Bytes stand for
x / scale, rounded to nearest even and clamped to what is finite: 448, or 127. The bits are those
of the GPU's kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from rawpaged.cpu.floats import stored_like

_U20 = np.uint32(20)
_U24 = np.uint32(24)
_SIGN = np.uint32(0x80)
_SIZE = np.uint32(0x7F)
_ONE = np.uint32(1)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_MOST = np.uint32(0x43E00000)  # 448
_HALF_STEP = np.uint32(0x7FFFF)
_REBIAS = np.uint32((127 - 7) << 3)
_LEAST_NORMAL = np.uint32(0x3C800000)  # 2**-6
# Added to a number below 2**-6, this leaves multiples of 2**-9 in the low bits, rounded.
_SUBNORMAL_STEP = np.float32(2.0**14)
_SUBNORMAL_BITS = np.uint32(0x46800000)

_NORMAL_BIAS = np.uint32((127 - 7) << 23)
_SUBNORMAL_BIAS = np.uint32((127 - 6) << 23)
_SUBNORMAL_OFFSET = np.float32(2.0**-6)
_FIRST_NORMAL = np.uint32(1 << 23)
_NAN_SIZE = np.uint32(0x7F << 20)
_NAN = np.float32(np.nan)

_MOST_INT8 = np.float32(127.0)
_LEAST_INT8 = np.float32(-127.0)
# Added to a number below 2**22, this leaves it in the low bits as an integer, rounded.
_INTEGER_STEP = np.float32(1.5 * 2.0**23)
_INTEGER_BITS = np.int32(0x4B400000)


@njit(nogil=True, error_model="numpy")
def to_e4m3(x):
    """float32 as the nearest e4m3, ties to even; what is larger than 448 as 448; NaN as NaN."""
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32(np.uint32(bits >> _U24) & _SIGN)
    size = np.uint32(bits & _MAGNITUDE)
    capped = min(size, _MOST)
    odd = np.uint32(np.uint32(capped >> _U20) & _ONE)
    normal = np.uint32(np.uint32(np.uint32(capped + _HALF_STEP) + odd) >> _U20)
    normal = np.uint32(normal - _REBIAS)
    shifted = np.float32(np.uint32(capped).view(np.float32) + _SUBNORMAL_STEP)
    subnormal = np.uint32(shifted.view(np.uint32) - _SUBNORMAL_BITS)
    code = normal if capped >= _LEAST_NORMAL else subnormal
    code = _SIZE if size > _INFINITY else code
    return np.uint8(code | sign)


@njit(nogil=True, error_model="numpy")
def from_e4m3(byte):
    """The float32 that an e4m3 stands for; no arithmetic meets a subnormal float32."""
    bits = np.uint32(byte)
    size = np.uint32(np.uint32(bits & _SIZE) << _U20)
    normal = np.uint32(size + _NORMAL_BIAS).view(np.float32)
    subnormal = np.uint32(size + _SUBNORMAL_BIAS).view(np.float32) - _SUBNORMAL_OFFSET
    value = normal if size >= _FIRST_NORMAL else np.float32(subnormal)
    value = _NAN if size == _NAN_SIZE else value
    sign = np.uint32(np.uint32(bits & _SIGN) << _U24)
    return np.uint32(np.float32(value).view(np.uint32) | sign).view(np.float32)


@njit(nogil=True, error_model="numpy")
def to_int8(x):
    """float32 as the nearest integer in [-127, 127], ties to even; NaN as -127, as on a GPU."""
    x = x if x > _LEAST_INT8 else _LEAST_INT8
    x = x if x < _MOST_INT8 else _MOST_INT8
    shifted = np.float32(x + _INTEGER_STEP)
    return np.int8(shifted.view(np.int32) - _INTEGER_BITS)


def stored_scaled(x: Any, scale: Any, cache: Any) -> Any:
    """float32 x as an element of `cache`; the scale is for caches of bytes."""
    raise TypeError("stored_scaled is for compiled code")


@overload(stored_scaled, inline="always")
def _stored_scaled(x, scale, cache):
    if cache.dtype == types.uint8:
        return lambda x, scale, cache: to_e4m3(x / scale)
    if cache.dtype == types.int8:
        return lambda x, scale, cache: to_int8(x / scale)
    return lambda x, scale, cache: stored_like(x, cache)
