"""Paged caches in NumPy: elements, their values, and blocks that nothing may be read from."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]

NUMPY_TYPES: dict[str, Any] = {
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
    scaled = np.clip(x.astype(np.float32) / scale.astype(np.float32)[:, None], -most, most)
    rounded: Floats = (np.rint(scaled) if cache_dtype == "int8" else scaled).astype(element)
    return rounded


def dequantised(elements: Floats, scale: Floats, cache_dtype: str) -> Floats:
    """The float32 values that elements stand for."""
    values = elements.astype(np.float32)
    return values * scale[:, None] if cache_dtype in _LARGEST else values


def raw(elements: Floats, cache_dtype: str) -> Floats:
    """Elements in the dtype that the kernels' launchers take: FP8 as uint8."""
    return elements.view(np.uint8) if cache_dtype == "fp8_e4m3" else elements


def poisoned_pool(shape: tuple[int, ...], cache_dtype: str) -> Floats:
    """A pool of NaN; int8 has none, so the largest value that shows when it is read."""
    if cache_dtype == "int8":
        return np.full(shape, 127, np.int8)
    return np.full(shape, np.nan, NUMPY_TYPES[cache_dtype])
