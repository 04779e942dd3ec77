"""Every pair of bytes of a cache becomes the elements that it stands for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.hostsim.loader import HostLoader

pytestmark = pytest.mark.gpusim


def widened(loader: HostLoader, c_type: str, cache_type: str) -> np.ndarray[Any, Any]:
    """u32[65536]: two elements of each pair."""
    source = f"""
#include "attention.cuh"
extern "C" __global__ void widen(unsigned* out) {{
  const unsigned pair = threadIdx.x + 256 * blockIdx.x;
  out[pair] = widen2<{c_type}>(0xabcd0000u | pair, (const {cache_type}*)0);
}}
"""
    out = np.zeros(65536, np.uint32)
    function = loader.load(source, ["widen"], max_shared_mem={"widen": 0})["widen"]
    function((256,), (256,), (out,))
    return out


@pytest.mark.parametrize(
    ("c_type", "dtype"), [("bf16", ml_dtypes.bfloat16), ("half", np.float16)]
)
@pytest.mark.parametrize(
    ("cache_type", "cache_dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("int8", np.int8)]
)
def test_all_pairs(
    cuda_wheels: object, c_type: str, dtype: Any, cache_type: str, cache_dtype: Any
) -> None:
    pairs = np.arange(65536, dtype=np.uint16)
    expected = pairs.view(cache_dtype).astype(np.float32)
    found = widened(HostLoader(), c_type, cache_type).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(expected).any() == (cache_type == "e4m3")
