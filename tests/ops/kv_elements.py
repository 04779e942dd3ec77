"""Elements of KV caches in NumPy: what numbers become, what they stand for, and poison."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]

NUMPY_TYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "int8": np.int8,
}
_LARGEST = {"fp8_e4m3": 448.0, "int8": 127.0}


def quantised(x: Floats, scale: Floats, cache_dtype: str) -> Floats:
    """x [n, heads, d] as a cache's elements: x / scale by head, clamped, rounded to even."""
    element = NUMPY_TYPES[cache_dtype]
    if cache_dtype not in _LARGEST:
        same: Floats = x.astype(element)
        return same
    most = np.float32(_LARGEST[cache_dtype])
    with np.errstate(over="ignore"):
        quotient = x.astype(np.float32) / scale.astype(np.float32)[:, None]
    scaled = np.clip(quotient, -most, most)
    rounded: Floats = (np.rint(scaled) if cache_dtype == "int8" else scaled).astype(element)
    return rounded


def dequantised(elements: Floats, scale: Floats, cache_dtype: str) -> Floats:
    """The float32 values that elements stand for."""
    values = elements.astype(np.float32)
    return values * scale[:, None] if cache_dtype in _LARGEST else values


def raw(elements: Floats, cache_dtype: str) -> Floats:
    """Elements in the dtype that the GPU kernels' launchers take: FP8 as uint8."""
    return elements.view(np.uint8) if cache_dtype == "fp8_e4m3" else elements


def on_cpu(elements: Floats, cache_dtype: str) -> Floats:
    """Elements in the dtype of the CPU's caches: FP8 as uint8, bfloat16 as uint16."""
    bits = {"fp8_e4m3": np.uint8, "bfloat16": np.uint16}
    return elements.view(bits[cache_dtype]) if cache_dtype in bits else elements


def from_cpu(pool: Floats, cache_dtype: str) -> Floats:
    """A CPU's pool as elements."""
    return pool.view(NUMPY_TYPES[cache_dtype])


def poison_for(pool: Floats) -> float:
    """NaN as either backend's pool holds it; int8 has none, so the largest: it shows when read."""
    nan = {np.dtype(np.uint16): 0x7FC0, np.dtype(np.uint8): 0x7F, np.dtype(np.int8): 127}
    return nan.get(pool.dtype, np.nan)


def poisoned_pool(shape: tuple[int, ...], cache_dtype: str) -> Floats:
    """A pool of poison."""
    pool: Floats = np.empty(shape, NUMPY_TYPES[cache_dtype])
    pool[...] = poison_for(pool)
    return pool
