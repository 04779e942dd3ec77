"""CUDA's names give on the host what CUDA's manuals say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawpaged.gpu.module import Function
from tests.hostsim.loader import HostLoader, parse_signatures
from tests.hostsim.wheels import CudaWheels

pytestmark = pytest.mark.gpusim

SOURCE = Path(__file__).with_name("numbers.cu")


@pytest.fixture(scope="module")
def functions(cuda_wheels: CudaWheels) -> dict[str, Function]:
    names = list(parse_signatures(SOURCE.read_text()))
    loader = HostLoader(order="random", seed=1)
    return loader.load(SOURCE.read_text(), names, max_shared_mem=dict.fromkeys(names, 0))


def test_conversions_are_those_of_ml_dtypes(functions: dict[str, Function]) -> None:
    rng = np.random.default_rng(7)
    random = rng.standard_normal(400) * 10.0 ** rng.integers(-4, 3, 400)
    edges = [0.0, -0.0, 448.0, -448.0, 2**-9, 2**-10, 1.5 * 2**-9, 65504.0, 2**-24, 17.0, 19.0]
    x = np.concatenate([random, edges]).astype(np.float32)
    outputs = [np.full(len(x), np.nan, np.float32) for _ in range(3)]
    codes = np.zeros(len(x), np.uint32)
    functions["convert"]((4,), (128,), (x, *outputs, codes, np.int32(len(x))))
    # NVIDIA's conversion saturates; ml_dtypes' gives NaN above the largest number.
    fp8 = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(outputs[0], x.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(outputs[1], x.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(outputs[2], fp8.astype(np.float32))
    np.testing.assert_array_equal(codes, fp8.view(np.uint8))


def test_warp_and_block_collectives(functions: dict[str, Function]) -> None:
    x = np.random.default_rng(8).integers(-99, 100, 32, dtype=np.int32)
    results = np.zeros((32, 18), np.int32)
    functions["collect"]((1,), (32,), (x, results))
    lanes = np.arange(32)

    def bits(flags: Any) -> int:
        return int(np.packbits(flags, bitorder="little").view(np.int32)[0])

    down = np.where(lanes % 16 + 3 < 16, lanes + 3, lanes)
    up = np.where(lanes % 16 >= 3, lanes - 3, lanes)
    remainders = np.fmod(x, 3)  # as C has it
    expected = [
        x[lanes // 8 * 8 + 3],
        x[lanes ^ 5],
        x[down % 32],
        x[up],
        bits(x > 0),
        (x > 90).any(),
        True,
        x.sum(),
        x.min(),
        x.max(),
        -1,
        [bits(remainders == remainder) for remainder in remainders],
        np.where(lanes < 16, x[:16].sum(), 0),
        (x > 0).sum(),
        (x > 90).any(),
        True,
        x[lanes ^ 1].astype(np.float32).view(np.int32),
        x[lanes ^ 1],
    ]
    for column, values in enumerate(expected):
        np.testing.assert_array_equal(results[:, column], values, f"{column=}")


def test_bits(functions: dict[str, Function]) -> None:
    x = np.array([0, 1, 0x80000000, 0xFFFFFFFF, 0x12345678, 6], np.uint32)
    results = np.zeros((6, 8), np.uint32)
    functions["count_bits"]((1,), (6,), (x, results))
    for row, value in zip(results.tolist(), x.tolist(), strict=True):
        digits = f"{value:032b}"
        assert row == [
            digits.count("1"),
            32 - value.bit_length(),
            (value & -value).bit_length(),
            int(digits[::-1], 2),
            value * 0xDEADBEEF >> 32,
            ((value << 32) * 0xDEADBEEF12345678 >> 64) & 0xFFFFFFFF,
            64 - value.bit_length(),
            digits.count("1"),
        ]


def test_rounding_saturates_and_comparisons_pass_over_nan(functions: dict[str, Function]) -> None:
    x = np.array([0.5, 1.5, -1.5, 2.4, -2.6, 1e20, -1e20, np.nan], np.float32)
    rounded, compared = np.zeros((8, 4), np.int32), np.zeros((8, 2), np.float32)
    functions["round_and_compare"]((1,), (8,), (x, rounded, compared))
    low, high = -(2**31), 2**31 - 1
    assert rounded.tolist() == [
        [0, 0, 0, 1],
        [2, 1, 1, 2],
        [-2, -1, -2, -1],
        [2, 2, 2, 3],
        [-3, -2, -3, -2],
        [high] * 4,
        [low] * 4,
        [0] * 4,
    ]
    np.testing.assert_array_equal(compared[:, 0], np.fmin(x, 1))
    np.testing.assert_array_equal(compared[:, 1], np.fmax(x, 1))


def test_atomics(functions: dict[str, Function]) -> None:
    ints, floats = np.array([1, 0, 3, 63], np.int32), np.zeros(1, np.float32)
    unsigneds = np.array([0, 0xFFFFFFFF, 0, 0], np.uint32)
    functions["update_atomically"]((1,), (64,), (ints, unsigneds, floats))
    assert ints.tolist() == [1 + 63 * 32, -5, 63, 64]
    assert unsigneds.tolist() == [0xFFFFFFFF, 0, 64 % 10, 7]
    assert floats[0] == 32


def test_matrix_loads(functions: dict[str, Function]) -> None:
    matrices = np.random.default_rng(9).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    plain, transposed, moved = (np.zeros((32, 4, 2), np.uint16) for _ in range(3))
    arrays = [array.view(np.uint32) for array in (matrices, plain, transposed, moved)]
    functions["load_fragments"]((1,), (32,), tuple(arrays))
    # Lane l holds elements [l // 4][2 * (l % 4)] and the next of each matrix.
    expected = matrices.reshape(4, 32, 2).swapaxes(0, 1)
    turned = matrices.swapaxes(1, 2).reshape(4, 32, 2).swapaxes(0, 1)
    np.testing.assert_array_equal(plain, expected)
    np.testing.assert_array_equal(transposed, turned)
    np.testing.assert_array_equal(moved, turned)
