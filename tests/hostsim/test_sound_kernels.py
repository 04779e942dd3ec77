"""Right kernels raise no alarm, and give right results, however their threads take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawpaged.gpu.module import Function
from tests.hostsim.conftest import ORDERS
from tests.hostsim.loader import HostLoader, Order, parse_signatures
from tests.hostsim.wheels import CudaWheels

pytestmark = pytest.mark.gpusim

SOURCE = Path(__file__).with_name("sound.cu")
TURNS: tuple[tuple[Order, int, bool], ...] = (
    *((order, seed, False) for order, seed in ORDERS),
    ("random", 2, True),
    ("random", 3, True),
)


@pytest.fixture(params=TURNS, ids=str, scope="module")
def functions(request: pytest.FixtureRequest, cuda_wheels: CudaWheels) -> dict[str, Function]:
    order, seed, preempt = request.param
    return load(HostLoader(order=order, seed=seed, preempt=preempt))


def load(loader: HostLoader) -> dict[str, Function]:
    names = list(parse_signatures(SOURCE.read_text()))
    return loader.load(SOURCE.read_text(), names, max_shared_mem=dict.fromkeys(names, 0))


def uniform(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).uniform(-1, 1, shape).astype(dtype)


def test_sums_of_blocks(functions: dict[str, Function]) -> None:
    x, sums = uniform(300), np.full(3, np.nan, np.float32)
    functions["sum_block"]((3,), (128,), (x, sums, np.int32(300)))
    expected = [x[start : start + 128].sum(dtype=np.float64) for start in (0, 128, 256)]
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_halves_of_warps_apart(functions: dict[str, Function], rounds: int) -> None:
    x, y = uniform(64), np.full(64, np.nan, np.float32)
    functions["reverse_half_warps"]((1,), (64,), (x, y, np.int32(rounds)))
    rows = x.reshape(4, 16)
    np.testing.assert_array_equal(y.reshape(4, 16), rows[:, ::-1] if rounds % 2 else rows)


@pytest.mark.parametrize(
    ("name", "dtype"), [("multiply_bf16", ml_dtypes.bfloat16), ("multiply_half", np.float16)]
)
@pytest.mark.parametrize("depth", [16, 48])
def test_product_on_tensor_cores(
    functions: dict[str, Function], name: str, dtype: Any, depth: int
) -> None:
    a, b = uniform(32, depth, dtype=dtype), uniform(8, depth, dtype=dtype)
    c = np.full((32, 8), np.nan, np.float32)
    functions[name]((2,), (32,), (a, b, c, np.int32(depth)))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5)


def test_counts_by_atomics(functions: dict[str, Function]) -> None:
    x = np.random.default_rng(6).integers(0, 16, 200, dtype=np.int32)
    counts = np.zeros(16, np.int32)
    functions["count_values"]((4,), (64,), (x, counts, np.int32(200)))
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=16))


@pytest.mark.parametrize("n", [1, 31, 33, 64])
def test_threads_that_leave_early(functions: dict[str, Function], n: int) -> None:
    x, y = uniform(64), np.zeros(64, np.float32)
    functions["leave_before_the_barrier"]((1,), (64,), (x, y, np.int32(n)))
    np.testing.assert_array_equal(y[:n], x[:n][::-1])
    assert not y[n:].any()


@pytest.mark.parametrize("name", ["take_over_by_one_fence", "take_over_by_many_fences"])
def test_last_block_takes_over(functions: dict[str, Function], name: str) -> None:
    x, y, count = uniform(64), np.full(256, np.nan, np.float32), np.zeros(1, np.uint32)
    functions[name]((3,), (64,), (x, y, count))
    np.testing.assert_allclose(y[192:], 6 * x, rtol=1e-6)


def test_views_that_overlap(functions: dict[str, Function]) -> None:
    rows = uniform(4, 96)
    q, k = rows[:, :32], rows[:, 32:64]
    expected = q + k
    functions["add_in_place"]((4,), (32,), (q, k, np.int32(96)))
    np.testing.assert_array_equal(q, expected)


def test_plain_mode_gives_the_same_bits(cuda_wheels: CudaWheels) -> None:
    a = uniform(32, 48, dtype=ml_dtypes.bfloat16)
    results = []
    for loader in (HostLoader(), HostLoader("plain"), HostLoader("plain", order="random", seed=4)):
        results.append(np.full((32, 8), np.nan, np.float32))
        load(loader)["multiply_bf16"]((2,), (32,), (a, a[:8].copy(), results[-1], np.int32(48)))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
