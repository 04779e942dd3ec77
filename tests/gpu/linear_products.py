"""Products for the matmul kernels: every tile compiled, poisoned operands, float64 beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawpaged.gpu.linear import Linear, PackedLinear, pack
from rawpaged.gpu.linear_kernels import Epilogue, Mode, instance_of, kernel_keys
from rawpaged.gpu.module import Function, source_text
from rawpaged.gpu.tuned import ANY_ROWS, FewRowsTile, GemmTile, LinearTile
from tests.hostsim.loader import HostLoader

Floats = npt.NDArray[Any]

GEMM_TILES = (
    GemmTile(64, 64, 64, 4, 2, 2),
    GemmTile(64, 128, 32, 4, 2, 4),
    GemmTile(128, 128, 64, 3, 2, 4),
)
FEW_ROWS_TILES = (
    FewRowsTile(8, 1, 2),
    FewRowsTile(8, 1, 3),
    FewRowsTile(16, 1, 3),
    FewRowsTile(16, 2, 3),
    FewRowsTile(32, 1, 2),
    FewRowsTile(32, 2, 2),
    FewRowsTile(32, 2, 3),
)
TILES = (*GEMM_TILES, *FEW_ROWS_TILES)
MODES = {
    "bfloat16": (
        Mode(Epilogue.STORE, "bfloat16"),
        Mode(Epilogue.ADD, "float32"),
        Mode(Epilogue.SILU_MUL, "bfloat16"),
    ),
    "float16": (
        Mode(Epilogue.STORE, "float32"),
        Mode(Epilogue.ADD, "float16"),
        Mode(Epilogue.SILU_MUL, "float16"),
    ),
}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


class Compiled:
    """A Loader that compiles every kernel of the tests at once, two sources a dtype."""

    def __init__(self, loader: HostLoader) -> None:
        self._functions: dict[str, Function] = {}
        for dtype, modes in MODES.items():
            keys = kernel_keys(TILES, modes, with_gemv=True)
            instances = [instance_of(dtype, key) for key in keys]
            for source in ("gemm.cu", "gemv.cu"):
                chosen = [one for one in instances if one.declaration.source == source]
                self._functions |= loader.load(
                    source_text(source, chosen),
                    [one.name for one in chosen],
                    max_shared_mem={one.name: one.max_shared_mem for one in chosen},
                )

    def load(
        self, source: str, names: Sequence[str], *, max_shared_mem: Mapping[str, int]
    ) -> dict[str, Function]:
        return {name: self._functions[name] for name in names}


def make_linear(
    loader: Compiled,
    dtype: str,
    tiles: LinearTile | Mapping[int, LinearTile],
    *,
    split: bool = False,
    **options: bool,
) -> Linear:
    """One tile for all numbers of rows, or a table; products are split always or never."""
    table = tiles if isinstance(tiles, Mapping) else {ANY_ROWS: tiles}
    return Linear(
        loader,
        dtype=dtype,
        tiles=table,
        modes=MODES[dtype],
        num_sms=10**6 if split else 1,
        workspace=np.full(10**6 if split else 1, np.nan, np.float32),
        **options,
    )


def make_operands(
    dtype: str, rows: int, out_features: int, in_features: int
) -> tuple[Floats, PackedLinear]:
    """x, a view whose surroundings are NaN, and a packed weight with a bias."""
    rng = np.random.default_rng(rows + 1000 * out_features)
    around = poisoned((rows + 1, in_features + 8), DTYPES[dtype])
    x = around[:rows, :in_features]
    x[...] = rng.standard_normal(x.shape)
    weight = rng.standard_normal((out_features, in_features)) / 4
    bias = rng.standard_normal(out_features)
    return x, pack(weight, bias, dtype=dtype, to_device=to_device)


def poisoned(shape: tuple[int, ...], dtype: Any) -> Floats:
    """NaN, in memory that begins at a multiple of 16 bytes."""
    array: Floats = np.full(shape, np.nan, dtype)
    assert array.ctypes.data % 16 == 0
    return array


def to_device(array: Floats) -> Floats:
    copy = poisoned(array.shape, array.dtype)
    copy[...] = array
    return copy


def run(linear: Linear, x: Floats, weight: PackedLinear, mode: Mode, *, offset: int = 0) -> Floats:
    """The product into a view of a poisoned array, of which nothing else may be written."""
    columns = weight.out_features // mode.halves
    around = poisoned((len(x) + 1, -(-columns // 8) * 8 + 8), DTYPES[mode.out_dtype])
    out = around[: len(x), offset : offset + columns]
    if mode.epilogue is Epilogue.ADD:
        out[...] = before(out.shape)
    linear(out, x, weight, mode.epilogue)
    result = out.copy()
    out[...] = np.nan
    assert np.isnan(around.astype(np.float32)).all(), "written outside of out"
    return result


def before(shape: tuple[int, ...]) -> Floats:
    """What out holds ahead of an addition; exact in every type."""
    values: Floats = np.arange(np.prod(shape)).reshape(shape) % 5 - 2.0
    return values


def assert_product(out: Floats, x: Floats, weight: PackedLinear, mode: Mode) -> None:
    """out is within the bound of float32 sums in any order, and one rounding to its type."""
    exact_x, exact_weight = x.astype(np.float64), weight.weight.astype(np.float64)
    sums = exact_x @ exact_weight.T + weight.bias
    size = abs(exact_x) @ abs(exact_weight).T + abs(weight.bias)
    # Tensor cores truncate where they align addends: twice float32's unit roundoff a step.
    error = (x.shape[1] + 16) * 2.0**-23 * size
    if mode.epilogue is Epilogue.SILU_MUL:
        (gate, up), (gate_error, up_error) = np.split(sums, 2, 1), np.split(error, 2, 1)
        silu = gate / (1 + np.exp(-gate))
        sums = silu * up
        # |silu'| < 1.1; the activation itself takes a few operations.
        error = 1.1 * gate_error * (abs(up) + up_error) + abs(silu) * up_error
        error += 2.0**-20 * abs(sums)
    elif mode.epilogue is Epilogue.ADD:
        sums = sums + before(sums.shape)
        error = error + 2.0**-23 * abs(sums)
    error += UNIT_ROUNDOFF[mode.out_dtype] * (abs(sums) + error) + 1e-30
    wrong = ~(abs(out.astype(np.float64) - sums) <= error)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, first at {np.argwhere(wrong)[0]}"
