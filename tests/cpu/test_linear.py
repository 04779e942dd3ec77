"""Every kind of arithmetic: right, and the same bits for a row whatever is computed with it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import pytest

from rawpaged.cpu.arguments import RowsOf
from rawpaged.cpu.features import FEATURES, VARIABLE, CpuFeatures, detect_features
from rawpaged.cpu.linear import LinearOp, PackedLinear, best_arithmetic, embed_rows, pack_linear
from rawpaged.cpu.products import Arithmetic
from rawpaged.cpu.threads import ThreadTeam
from rawpaged.errors import ConfigError
from tests import reference
from tests.ops.cases import LINEAR_SHAPES
from tests.ops.row_cases import Float32, normal, stored

MANY_ROWS = ((130, 24, 40), (300, 10, 33), (256, 64, 32))
"""Rows enough for several blocks of them."""


@pytest.fixture(params=get_args(Arithmetic))
def arithmetic(request: pytest.FixtureRequest) -> Arithmetic:
    if request.param == "bfloat16_dot" and not FEATURES.avx512_bf16:
        pytest.skip("this processor has no dot products of bfloat16")
    kind: Arithmetic = request.param
    return kind


def weight_type(arithmetic: Arithmetic) -> str:
    return "float32" if arithmetic == "float32" else "bfloat16"


def run(
    arithmetic: Arithmetic, x: Float32, weight: PackedLinear, *, num_threads: int = 1
) -> Float32:
    """x @ W.T, in the middle of memory that must stay as it is."""
    team = ThreadTeam(num_threads)
    room = np.full((len(x) + 2, weight.out_features), np.nan, np.float32)
    LinearOp(team, arithmetic)(room[1:-1], x, weight)
    team.close()
    assert np.isnan(room[[0, -1]]).all()
    return room[1:-1]


@pytest.mark.parametrize("shape", LINEAR_SHAPES + MANY_ROWS, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_float64(
    arithmetic: Arithmetic, shape: tuple[int, int, int], with_bias: bool
) -> None:
    """Of activations that bfloat16 holds exactly."""
    rows, in_features, out_features = shape
    rng = np.random.default_rng(rows)
    dtype = weight_type(arithmetic)
    x, weight = stored(normal(rng, rows, in_features), "bfloat16"), normal(rng, *shape[:0:-1])
    bias = normal(rng, out_features) if with_bias else None
    out = run(arithmetic, x, pack_linear(weight, bias, dtype), num_threads=2)
    expected = reference.linear(x, stored(weight, dtype), bias)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * in_features**0.5)


def test_rounding_of_activations(arithmetic: Arithmetic) -> None:
    """At most half a unit of 8 bits for each; a tenth of a percent in the mean."""
    rng = np.random.default_rng(1)
    dtype = weight_type(arithmetic)
    x, weight = normal(rng, 9, 576), stored(normal(rng, 200, 576), dtype)
    out = run(arithmetic, x, pack_linear(weight, None, dtype))
    expected = reference.linear(x, weight, None)
    error = np.abs(out - expected)
    sums_of_sizes = np.abs(x).astype(np.float64) @ np.abs(weight).T
    unit = 2.0**-9 if arithmetic == "bfloat16_dot" else 0.0
    assert (error <= (unit + 1e-5) * sums_of_sizes).all()
    mean = np.sqrt((error**2).mean() / (expected**2).mean())
    assert mean < (2e-3 if arithmetic == "bfloat16_dot" else 1e-6)


def test_bits_of_a_row_do_not_depend_on_the_batch(arithmetic: Arithmetic) -> None:
    rng = np.random.default_rng(2)
    weight = pack_linear(normal(rng, 70, 96), normal(rng, 70), weight_type(arithmetic))
    x = normal(rng, 300, 96)
    alone = np.concatenate([run(arithmetic, row[None], weight) for row in x[:41]])
    for rows in (*range(2, 41), 129, 300):
        together = run(arithmetic, x[:rows], weight, num_threads=1 + rows % 3)
        np.testing.assert_array_equal(together[:41], alone[:rows])


def test_rows_of_a_wider_array(arithmetic: Arithmetic) -> None:
    rng = np.random.default_rng(3)
    weight = pack_linear(normal(rng, 40, 24), None, weight_type(arithmetic))
    wide = normal(rng, 5, 60)
    expected = run(arithmetic, np.ascontiguousarray(wide[:, 7:31]), weight)
    np.testing.assert_array_equal(run(arithmetic, wide[:, 7:31], weight), expected)


@pytest.mark.parametrize("in_features", [8, 7])
def test_what_is_not_finite_stays_in_its_row(arithmetic: Arithmetic, in_features: int) -> None:
    weight = pack_linear(np.ones((33, in_features), np.float32), None, weight_type(arithmetic))
    x = np.ones((3, in_features), np.float32)
    x[0, -1], x[2, 0] = np.nan, np.inf
    out = run(arithmetic, x, weight)
    assert np.isnan(out[0]).all()
    assert (out[1] == in_features).all()
    assert (out[2] == np.inf).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_features", [1, 6, 7])
def test_embedding_is_exact(dtype: str, in_features: int) -> None:
    table = normal(np.random.default_rng(4), 70, in_features)
    ids = np.array([0, 69, 31, 32, 33, 69], np.int32)
    out = np.full((6, in_features), np.nan, np.float32)
    team = ThreadTeam(1)
    team.run(embed_rows, 6, RowsOf(out), ids, pack_linear(table, None, dtype).panels)
    team.close()
    np.testing.assert_array_equal(out, stored(table, dtype)[ids])


def test_weights_are_rounded_to_even() -> None:
    """Halfway values, and those of another type."""
    weight = np.array([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2.0**-133]], np.float64)
    packed = pack_linear(weight, None, "bfloat16")
    halves = packed.panels[0, :, 0].copy().view(np.uint16)
    widened = (halves.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(widened, [1, 1 + 2**-6, -1, 2.0**-133])


# Features


def test_features_leave_nothing_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = __import__("numba.core.config").core.config
    monkeypatch.delenv(VARIABLE, raising=False)
    everything = "+fma,+avx512f,+avx512bf16,+avx512vnni"
    for name, given, expected in (
        ("generic", None, ()),
        ("haswell", "+avx2,+fma", ("fma",)),
        ("znver4", everything, ("fma", "avx512f", "avx512_bf16", "avx512_vnni")),
        (None, "-avx512f,+fma,+avx512bf16", ("fma",)),
    ):
        monkeypatch.setattr(config, "CPU_NAME", name)
        monkeypatch.setattr(config, "CPU_FEATURES", given)
        assert detect_features().names == expected


def test_features_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = __import__("numba.core.config").core.config
    monkeypatch.setattr(config, "CPU_FEATURES", "+fma,+avx512f,+avx512bf16")
    monkeypatch.setattr(config, "CPU_NAME", "x")
    for wanted, expected in (
        ("none", ()),
        ("", ("fma", "avx512f", "avx512_bf16")),
        ("avx512f, fma", ("fma", "avx512f")),
    ):
        monkeypatch.setenv(VARIABLE, wanted)
        assert detect_features().names == expected
    monkeypatch.setenv(VARIABLE, "fma,avx513")
    with pytest.raises(ConfigError, match="'avx513' is not one of"):
        detect_features()
    monkeypatch.setenv(VARIABLE, "avx512_vnni")
    with pytest.raises(ConfigError, match="this machine has only"):
        detect_features()


def test_choice_of_arithmetic() -> None:
    everything, nothing = CpuFeatures(True, True, True, True), CpuFeatures(*[False] * 4)
    assert best_arithmetic("float32", everything) == "float32"
    assert best_arithmetic("bfloat16", everything) == "bfloat16_dot"
    assert best_arithmetic("bfloat16", nothing) == "bfloat16"


SCRIPT = """
import sys, zlib, numpy as np
from tests.cpu.test_linear import normal, pack_linear, run
rng = np.random.default_rng(0)
x, weight = normal(rng, 11, 30), normal(rng, 45, 30)
for arithmetic, dtype in (("float32", "float32"), ("bfloat16", "bfloat16")):
    out = run(arithmetic, x, pack_linear(weight, None, dtype))
    exact = x.astype(np.float64) @ weight.T
    assert abs(out - exact).max() < (1e-5 if dtype == "float32" else 0.2)
    print(zlib.crc32(out.tobytes()))
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


@pytest.mark.skipif(not FEATURES.avx512f, reason="the host must be able to run all of them")
def test_processors_that_are_not_here() -> None:
    """The same bits with AVX2 as with AVX-512; without fused multiply-add merely close ones."""
    here = checksums()
    assert checksums(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+fma") == here
    assert checksums(**{VARIABLE: "none"}) != here
    assert checksums(NUMBA_CPU_NAME="x86-64") != here
