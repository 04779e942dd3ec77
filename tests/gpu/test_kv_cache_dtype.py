"""The engine with caches of bytes over simulated kernels, beside the CPU's with the same scales."""

from __future__ import annotations

import numpy as np
import pytest

from rawpaged.backend import KVScales
from rawpaged.engine.engine import Engine
from tests.engine.helpers import golden, request, run, tiny_engine
from tests.gpu.test_engine import gpu_engine, rows_of

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("cuda_wheels", "numba_cuda")]

KV_CACHE_DTYPES = ("fp8_e4m3", "int8")
TOLERANCE = 0.02
"""Of logits with a standard deviation of 0.6; FP8 itself moves them by more, see below.

Not as little as with caches of floats: what half precision moves over the middle between two steps
of the cache goes to the other one.
"""


def scales_of(engine: Engine) -> list[KVScales]:
    scales = engine.runner.kv_scales
    assert scales is not None
    return list(scales)


@pytest.mark.parametrize(("kv_cache_dtype", "enforce_eager"), [("fp8_e4m3", False), ("int8", True)])
def test_logits_are_the_cpus(kv_cache_dtype: str, enforce_eager: bool) -> None:
    """A prompt in two chunks, then tokens one by one."""
    ids = golden("qwen3")["input_ids"].tolist()[:60]
    cpu = tiny_engine("qwen3", kv_cache_dtype=kv_cache_dtype)
    gpu = gpu_engine(
        "qwen3",
        "float16",
        kv_cache_dtype=kv_cache_dtype,
        kv_scales=scales_of(cpu),
        enforce_eager=enforce_eager,
        budget=33,
    )
    cache = gpu.runner.kv_caches[0]
    assert cache.keys.nbytes == 40 * 16 * cache.keys.shape[1] * cache.keys.shape[3]
    tokens = [run(engine, [request("a", ids, max_tokens=5)])["a"] for engine in (cpu, gpu)]
    assert tokens[0] == tokens[1]
    error = np.abs(rows_of(gpu, "a") - rows_of(cpu, "a")).max()
    cpu.close()
    gpu.close()
    assert error < TOLERANCE


def test_the_tolerance_tells_fp8_from_the_others() -> None:
    """The same prompt with a cache of floats, on the CPU."""
    ids = golden("qwen3")["input_ids"].tolist()[:60]
    rows = []
    for kv_cache_dtype in (None, *KV_CACHE_DTYPES):
        engine = tiny_engine("qwen3", kv_cache_dtype=kv_cache_dtype)
        run(engine, [request("a", ids, max_tokens=5)])
        rows.append(rows_of(engine, "a")[-1])
        engine.close()
    for one, other in ((0, 1), (1, 2)):
        assert np.abs(rows[one] - rows[other]).max() > 1.2 * TOLERANCE


def test_calibration_finds_what_the_cpu_finds() -> None:
    cpu = tiny_engine(kv_cache_dtype="int8")
    gpu = gpu_engine("llama", "float16", kv_cache_dtype="int8")
    for mine, other in zip(scales_of(gpu), scales_of(cpu), strict=True):
        np.testing.assert_allclose(mine.keys, other.keys, rtol=5e-3)
        np.testing.assert_allclose(mine.values, other.values, rtol=5e-3)
    cpu.close()
    gpu.close()
