"""Weights in blocks: what they stand for, bit for bit, and products against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from ml_dtypes import bfloat16

from rawpaged.backend import QuantizedRows
from rawpaged.cpu.block_kernel import BlockArithmetic, best_block_arithmetic
from rawpaged.cpu.block_types import BLOCK_TYPES
from rawpaged.cpu.features import FEATURES, CpuFeatures
from rawpaged.cpu.joined_linear import JoinedLinear, LinearOps, pack_parts
from rawpaged.cpu.quantized_linear import QuantizedLinear, QuantizedLinearOp, pack_quantized
from rawpaged.cpu.threads import ThreadTeam
from tests.cpu.blocks import TYPE_NAMES, block_size, dequantized, random_rows
from tests.ops.row_cases import Float32, normal


@pytest.fixture(params=get_args(BlockArithmetic))
def arithmetic(request: pytest.FixtureRequest) -> BlockArithmetic:
    if request.param == "byte_dots" and not FEATURES.avx512_vnni:
        pytest.skip("this processor has no dot products of bytes")
    kind: BlockArithmetic = request.param
    return kind


def run(
    x: Float32,
    weight: QuantizedLinear,
    arithmetic: BlockArithmetic | None = None,
    *,
    num_threads: int = 1,
) -> Float32:
    """x @ W.T, in the middle of memory that must stay as it is."""
    team = ThreadTeam(num_threads)
    room = np.full((len(x) + 2, weight.out_features + 2), np.nan, np.float32)
    op = QuantizedLinearOp(team, arithmetic)
    op.multiply(room[1:-1, 1:-1], op.prepare(x), weight)
    team.close()
    inner = room[1:-1, 1:-1].copy()
    room[1:-1, 1:-1] = np.nan
    assert np.isnan(room).all()
    return inner


def rounded(x: Float32) -> npt.NDArray[np.float64]:
    """x as the products see it: of each 32 the largest is 127."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / largest))
    return np.reshape(codes.astype(np.float64) * (largest / np.float32(127)), x.shape)


@pytest.mark.parametrize("type_name", TYPE_NAMES)
@pytest.mark.parametrize("out_features", [1, 16, 70])
def test_embedding_is_what_the_library_dequantises(type_name: str, out_features: int) -> None:
    rng = np.random.default_rng(0)
    in_features = 2 * block_size(type_name)
    rows = random_rows(rng, type_name, out_features, in_features)
    packed = pack_quantized(type_name, rows, None)
    assert (packed.in_features, packed.out_features) == (in_features, out_features)
    ids = rng.permutation(out_features).astype(np.int32)
    out = np.full((out_features, in_features), np.nan, np.float32)
    team = ThreadTeam(2)
    QuantizedLinearOp(team).embed(out, ids, packed)
    team.close()
    np.testing.assert_array_equal(out, dequantized(rows, type_name)[ids])


@pytest.mark.parametrize("scale", [0x0001, 0x83FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E00])
def test_scales_of_any_size(scale: int, arithmetic: BlockArithmetic) -> None:
    """Subnormal, largest, infinite and no number: as numbers of half precision are."""
    rows = np.zeros((3, 34), np.uint8)
    rows[:, :2] = np.frombuffer(np.uint16(scale).tobytes(), np.uint8)
    rows[:, 2:] = 1
    packed = pack_quantized("Q8_0", rows, None)
    with np.errstate(invalid="ignore"):
        expected = dequantized(rows, "Q8_0")
    team = ThreadTeam(1)
    out = np.zeros((3, 32), np.float32)
    QuantizedLinearOp(team).embed(out, np.arange(3, dtype=np.int32), packed)
    team.close()
    np.testing.assert_array_equal(out, expected)
    product = run(np.full((2, 32), 127, np.float32), packed, arithmetic)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(product, np.full((2, 3), 32 * 127 * expected[0, 0]), rtol=1e-6)


@pytest.mark.parametrize("type_name", TYPE_NAMES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_float64(type_name: str, with_bias: bool, arithmetic: BlockArithmetic) -> None:
    """Exactly of activations as they are rounded; within half a percent of what they were."""
    rng = np.random.default_rng(1)
    in_features, out_features = 4 * block_size(type_name), 90
    rows = random_rows(rng, type_name, out_features, in_features)
    bias = normal(rng, out_features) if with_bias else None
    x = normal(rng, 11, in_features)
    out = run(x, pack_quantized(type_name, rows, bias), arithmetic, num_threads=2)
    weight = dequantized(rows, type_name).astype(np.float64)
    added = 0.0 if bias is None else bias.astype(np.float64)
    expected = rounded(x) @ weight.T + added
    sums_of_sizes = np.abs(x).astype(np.float64) @ np.abs(weight).T
    assert (np.abs(out - expected) <= 1e-5 * sums_of_sizes + 1e-6).all()
    of_exact = x.astype(np.float64) @ weight.T + added
    # Each activation is off by at most half a step, 1/254 of the largest of its block.
    steps = np.abs(x.reshape(11, -1, 32)).max(-1, keepdims=True) / 254
    most = np.broadcast_to(steps, (11, in_features // 32, 32)).reshape(x.shape)
    assert (np.abs(out - of_exact) <= most @ np.abs(weight).T + 1e-5 * sums_of_sizes + 1e-6).all()
    mean = np.sqrt(((out - of_exact) ** 2).mean() / (of_exact**2).mean())
    assert 1e-4 < mean < 1e-2


@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_bits_of_a_row_depend_on_nothing_else(type_name: str) -> None:
    """Not on the batch, the threads or the way to multiply."""
    rng = np.random.default_rng(2)
    in_features = 256 if block_size(type_name) == 256 else 96
    rows = random_rows(rng, type_name, 70, in_features)
    weight = pack_quantized(type_name, rows, normal(rng, 70))
    x = normal(rng, 300, in_features)
    alone = np.concatenate([run(row[None], weight) for row in x[:41]])
    for count in (*range(2, 41), 129, 300):
        together = run(x[:count], weight, num_threads=1 + count % 3)
        np.testing.assert_array_equal(together[:41], alone[:count])
    if FEATURES.fma:
        np.testing.assert_array_equal(run(x[:41], weight, "floats", num_threads=2), alone)


def test_activations(arithmetic: BlockArithmetic) -> None:
    """Largest, tiny, zero, not finite: each row for itself."""
    rows = np.zeros((20, 2 * 34), np.uint8)
    rows[:, [1, 35]] = 0x3C  # 1
    rows[:, 2:34] = rows[:, 36:] = 1
    weight = pack_quantized("Q8_0", rows, None)
    x = np.ones((7, 64), np.float32)
    x[0, 5], x[1, 5], x[2, 63] = np.nan, np.inf, -np.inf
    x[3] = 1e-40
    x[4] = 0
    x[5] = 1e36
    out = run(x, weight, arithmetic)
    assert np.isnan(out[:3]).all()
    assert (out[3:5] == 0).all()
    np.testing.assert_allclose(out[5], 64e36, rtol=1e-6)
    assert (out[6] == 64).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_different_types(dtype: str) -> None:
    """Blocks of two types and an array side by side, as the parts by themselves."""
    rng = np.random.default_rng(3)
    first, second = (random_rows(rng, name, 40, 256) for name in ("Q4_K", "Q6_K"))
    array = normal(rng, 24, 256)
    bias = normal(rng, 144)
    parts: list[npt.NDArray[Any] | QuantizedRows]
    parts = [QuantizedRows("Q4_K", first), QuantizedRows("Q6_K", second), array]
    joined = pack_parts([parts[0], parts[0], *parts[1:]], bias, dtype)
    assert isinstance(joined, JoinedLinear)
    assert len(joined.parts) == 3
    assert (joined.in_features, joined.out_features) == (256, 144)
    assert joined.nbytes == sum(part.nbytes for part in joined.parts)
    x = normal(rng, 5, 256)
    team = ThreadTeam(2)
    ops = LinearOps(team, dtype)
    out = np.full((5, 144), np.nan, np.float32)
    ops.linear(out, x, joined)
    begin = 0
    for part in [parts[0], parts[0], *parts[1:]]:
        count = len(part.blocks if isinstance(part, QuantizedRows) else part)
        alone = np.full((5, count), np.nan, np.float32)
        ops.linear(alone, x, pack_parts([part], bias[begin : begin + count], dtype))
        np.testing.assert_array_equal(out[:, begin : begin + count], alone)
        begin += count
    team.close()
    assert begin == 144


def test_numbers_of_different_types_beside_blocks() -> None:
    """float16 and bfloat16, which NumPy does not join by itself."""
    rng = np.random.default_rng(5)
    halves = normal(rng, 24, 256).astype(np.float16), normal(rng, 40, 256).astype(bfloat16)
    blocks = QuantizedRows("Q8_0", random_rows(rng, "Q8_0", 32, 256))
    joined = pack_parts([blocks, *halves], None, "float32")
    assert joined.row_types == (("Q8_0", 32), (None, 64))
    assert isinstance(joined, JoinedLinear)
    out = np.full((64, 256), np.nan, np.float32)
    team = ThreadTeam(1)
    LinearOps(team, "float32").embed(out, np.arange(64, dtype=np.int32), joined.parts[1])
    team.close()
    expected = np.concatenate([part.astype(np.float32) for part in halves])
    np.testing.assert_array_equal(out, expected)


def test_bits_of_a_weight() -> None:
    """What the plan of the memory counts on is what is taken."""
    rng = np.random.default_rng(4)
    assert set(BLOCK_TYPES) == set(TYPE_NAMES)
    for name, kind in BLOCK_TYPES.items():
        panels = pack_quantized(name, random_rows(rng, name, 64, 512), None).panels
        assert panels.nbytes * 8 == 64 * 512 * kind.bits_per_weight


def test_choice_of_arithmetic() -> None:
    assert best_block_arithmetic(CpuFeatures(True, True, False, True)) == "byte_dots"
    assert best_block_arithmetic(CpuFeatures(True, True, True, False)) == "floats"


SCRIPT = """
import sys, zlib, numpy as np
from tests.cpu.test_quantized_linear import normal, pack_quantized, random_rows, run
rng = np.random.default_rng(0)
x, rows = normal(rng, 3, 256), random_rows(rng, "Q6_K", 45, 256)
print(zlib.crc32(run(x, pack_quantized("Q6_K", rows, None)).tobytes()))
"""


def checksums(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(not FEATURES.avx512_vnni, reason="the host must be able to run all of them")
def test_processors_that_are_not_here() -> None:
    """The same bits with AVX2 as with AVX512-VNNI; without fused multiply-add merely close ones."""
    here = checksums()
    assert checksums(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+fma") == here
    assert checksums(NUMBA_CPU_NAME="x86-64") != here
