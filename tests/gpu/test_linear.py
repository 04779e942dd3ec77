"""Matmul kernels on the simulator, against float64, with unused memory poisoned."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rawpaged.gpu.linear import Linear, bytes_moved, flops, pack, workspace_size
from rawpaged.gpu.linear_kernels import Epilogue, Mode, slice_length
from rawpaged.gpu.tuned import (
    ANY_ROWS,
    LINEAR_TILES,
    FewRowsTile,
    GemmTile,
    LinearTile,
    linear_tiles,
)
from tests.gpu.linear_products import (
    DTYPES,
    FEW_ROWS_TILES,
    GEMM_TILES,
    MODES,
    TILES,
    Compiled,
    assert_product,
    make_linear,
    make_operands,
    poisoned,
    run,
    to_device,
)
from tests.hostsim.conftest import ORDERS
from tests.hostsim.loader import HostLoader
from tests.hostsim.traffic import KernelTraffic
from tests.hostsim.wheels import CudaWheels

pytestmark = pytest.mark.gpusim

CASES = [(dtype, mode) for dtype, modes in MODES.items() for mode in modes]
CASE_IDS = [f"{dtype}-{mode.label}" for dtype, mode in CASES]

# The other type differs in conversions and multiplication only.
ORDERED_CASES = [
    pytest.param(order, dtype, mode, id=f"{order[0]}-{dtype}-{mode.label}")
    for dtype, mode in CASES
    for order in ORDERS
    if dtype == "bfloat16" or order == ORDERS[0]
]


@pytest.fixture(scope="module")
def loader(request: pytest.FixtureRequest, cuda_wheels: CudaWheels) -> Compiled:
    """Kernels under the checker, in the order of the parameter, or forward."""
    order, seed = getattr(request, "param", ORDERS[0])
    return Compiled(HostLoader(order=order, seed=seed))


@pytest.mark.parametrize(("loader", "dtype", "mode"), ORDERED_CASES, indirect=["loader"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("tile", GEMM_TILES, ids=str)
def test_gemm(loader: Compiled, tile: GemmTile, split: bool, dtype: str, mode: Mode) -> None:
    linear = make_linear(loader, dtype, tile, split=split)
    # A tile and a bit in both directions; the last slice is half, and not a whole stage.
    for rows, out_features in ((tile.rows + 5, 34), (3, tile.columns + 38)):
        x, weight = make_operands(dtype, rows, out_features, 168)
        assert_product(run(linear, x, weight, mode), x, weight, mode)


@pytest.mark.parametrize(("loader", "dtype", "mode"), ORDERED_CASES, indirect=["loader"])
@pytest.mark.parametrize("tile", FEW_ROWS_TILES, ids=str)
def test_few_rows(loader: Compiled, tile: FewRowsTile, dtype: str, mode: Mode) -> None:
    linear = make_linear(loader, dtype, tile)
    for rows, out_features, in_features in (
        (1, 54, 520),
        (tile.rows, 40, 72),
        (tile.rows - 3, 2, 8),
    ):
        x, weight = make_operands(dtype, rows, out_features, in_features)
        assert_product(run(linear, x, weight, mode), x, weight, mode)


@pytest.mark.parametrize(("loader", "dtype", "mode"), ORDERED_CASES, indirect=["loader"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_gemv(loader: Compiled, rows: int, dtype: str, mode: Mode) -> None:
    linear = make_linear(loader, dtype, GEMM_TILES[0], batch_invariant=False)
    for out_features, in_features in ((38, 520), (2, 8)):
        x, weight = make_operands(dtype, rows, out_features, in_features)
        assert_product(run(linear, x, weight, mode), x, weight, mode)


@pytest.mark.parametrize("dtype", MODES)
@pytest.mark.parametrize("tile", [GEMM_TILES[0], FEW_ROWS_TILES[0]], ids=["gemm", "few rows"])
@pytest.mark.parametrize("out_features", [1, 17, 31])
def test_odd_columns_and_unaligned_results(
    loader: Compiled, out_features: int, tile: LinearTile, dtype: str
) -> None:
    x, weight = make_operands(dtype, 5, out_features, 72)
    for split in (False, True):
        linear = make_linear(loader, dtype, tile, split=split)
        for mode in MODES[dtype][:2]:
            for offset in (0, 1):
                out = run(linear, x, weight, mode, offset=offset)
                assert_product(out, x, weight, mode)


@pytest.mark.parametrize("mode", MODES["bfloat16"], ids=lambda mode: mode.label)
def test_bits_of_a_row_do_not_depend_on_the_batch(loader: Compiled, mode: Mode) -> None:
    dtype = "bfloat16"
    table: dict[int, LinearTile] = {
        8: FEW_ROWS_TILES[0],
        32: FEW_ROWS_TILES[5],
        64: GEMM_TILES[0],
        ANY_ROWS: GEMM_TILES[2],
    }
    x, weight = make_operands(dtype, 130, 70, 600)
    assert slice_length(600) == 128
    linears = [make_linear(loader, dtype, table, split=split) for split in (False, True)]
    whole = run(linears[0], x, weight, mode)
    for rows in (1, 2, 7, 32, 33, 65, 130):
        for linear in linears:
            out = run(linear, x[:rows], weight, mode)
            assert out.tobytes() == whole[:rows].tobytes(), f"{rows=}"
            # Another place in the batch; the addition's own operand moves with the row.
            if mode.epilogue is not Epilogue.ADD:
                out = run(linear, x[130 - rows :], weight, mode)
                assert out.tobytes() == whole[130 - rows :].tobytes(), f"{rows=}"


@pytest.mark.parametrize(("dtype", "mode"), CASES[:4], ids=CASE_IDS[:4])
def test_all_tiles_give_the_same_bits(loader: Compiled, dtype: str, mode: Mode) -> None:
    x, weight = make_operands(dtype, 8, 70, 600)
    results = {
        run(make_linear(loader, dtype, tile, split=split), x, weight, mode).tobytes()
        for tile in TILES
        for split in (False, True)
    }
    assert len(results) == 1


def test_without_batch_invariance_sums_have_another_order(loader: Compiled) -> None:
    """Shows that the comparisons of bits above can fail."""
    x, weight = make_operands("float16", 4, 70, 1000)
    mode = Mode(Epilogue.STORE, "float32")
    results = [
        run(
            make_linear(loader, "float16", FEW_ROWS_TILES[0], batch_invariant=invariant),
            x,
            weight,
            mode,
        )
        for invariant in (True, False)
    ]
    assert (results[0] != results[1]).any()


def test_silu_of_large_numbers(loader: Compiled) -> None:
    gates = np.array([0.0, 1000.0, -1000.0, 88.0, -88.0, -20.0, 2.0, -2.0])
    weight = np.zeros((16, 8))
    weight[:8, 0] = gates
    weight[8:, 1] = 3.0
    packed = pack(weight, None, dtype="bfloat16", to_device=to_device)
    x = to_device(np.eye(2, 8, dtype=ml_dtypes.bfloat16).sum(0, keepdims=True))
    with np.errstate(over="ignore"):
        expected = gates / (1 + np.exp(-gates)) * 3
    for tile in (GEMM_TILES[0], FEW_ROWS_TILES[0]):
        out = run(make_linear(loader, "bfloat16", tile), x, packed, MODES["bfloat16"][2])
        np.testing.assert_allclose(out[0].astype(np.float64), expected, rtol=2**-7, atol=1e-30)


@pytest.fixture(scope="module")
def profiling(cuda_wheels: CudaWheels) -> tuple[HostLoader, Compiled]:
    """A loader that counts, and the kernels that it compiled."""
    host = HostLoader(profile=True)
    return host, Compiled(host)


def aligned_traffic(
    profiling: tuple[HostLoader, Compiled],
    tile: LinearTile,
    mode: Mode,
    shape: tuple[int, int, int],
    *,
    split: bool = False,
) -> dict[str, KernelTraffic]:
    """Traffic by function of a product (rows, out_features, in_features) without gaps."""
    host, loader = profiling
    rows, out_features, _ = shape
    x, weight = make_operands("bfloat16", *shape)
    out = poisoned((rows, out_features // mode.halves), DTYPES[mode.out_dtype])
    linear = make_linear(loader, "bfloat16", tile, split=split)
    linear(out, to_device(x), weight, mode.epilogue)
    return {name.split("_bf16")[0]: traffic for name, traffic in host.take_traffic().items()}


@pytest.mark.parametrize("mode", MODES["bfloat16"], ids=lambda mode: mode.label)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("tile", GEMM_TILES, ids=str)
def test_traffic_of_gemm(
    profiling: tuple[HostLoader, Compiled], tile: GemmTile, split: bool, mode: Mode
) -> None:
    m, n, k = tile.rows + 3, 2 * tile.columns - 32, 128
    traffic = aligned_traffic(profiling, tile, mode, (m, n, k), split=split)
    product = traffic["gemm_slice" if split else "gemm"]
    out = traffic["gemm_reduce" if split else "gemm"]
    assert product.wavefronts == product.ideal_wavefronts > 0
    for kernel in traffic.values():
        assert kernel.sectors <= 1.1 * kernel.ideal_sectors
    # Each row tile reads the whole weight, each column tile all of x, and nothing beyond them.
    assert product.array_bytes("w") == 2 * (2 * n * k)
    assert product.array_bytes("x") == 2 * (2 * m * k)
    itemsize = np.dtype(DTYPES[mode.out_dtype]).itemsize
    out_bytes = m * n // mode.halves * itemsize
    assert out.array_bytes("out", write=True) == out_bytes
    assert out.array_bytes("out") == (out_bytes if mode.epilogue is Epilogue.ADD else 0)
    if split:
        assert product.array_bytes("workspace", write=True) == 2 * m * n * 4
        assert out.array_bytes("workspace") == 2 * m * n * 4


@pytest.mark.parametrize("mode", MODES["bfloat16"], ids=lambda mode: mode.label)
@pytest.mark.parametrize("tile", FEW_ROWS_TILES, ids=str)
def test_traffic_of_few_rows(
    profiling: tuple[HostLoader, Compiled], tile: FewRowsTile, mode: Mode
) -> None:
    m, n, k = tile.rows - 3, 72, 1024
    traffic = aligned_traffic(profiling, tile, mode, (m, n, k))["few_rows"]
    assert traffic.array_bytes("w") == 2 * n * k
    assert traffic.array_bytes("x") == 2 * m * k * -(-n // (16 * tile.groups))
    # Conflicts and partial sectors are left in the last step only, once a CTA.
    assert traffic.wavefronts <= 1.1 * traffic.ideal_wavefronts
    assert traffic.sectors <= 1.01 * traffic.ideal_sectors


@pytest.mark.parametrize("mode", MODES["bfloat16"], ids=lambda mode: mode.label)
def test_traffic_of_gemv(profiling: tuple[HostLoader, Compiled], mode: Mode) -> None:
    host, loader = profiling
    x, weight = make_operands("bfloat16", 1, 64, 1024)
    out = poisoned((1, 64 // mode.halves), DTYPES[mode.out_dtype])
    linear = make_linear(loader, "bfloat16", TILES[0], batch_invariant=False)
    linear(out, to_device(x), weight, mode.epilogue)
    (traffic,) = host.take_traffic().values()
    assert traffic.array_bytes("w") == 2 * 64 * 1024
    assert traffic.sectors <= 1.01 * traffic.ideal_sectors


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(150, 300, 1096), (5, 1000, 2048)]
)
def test_larger_products(
    cuda_wheels: CudaWheels, rows: int, out_features: int, in_features: int
) -> None:
    mode = Mode(Epilogue.STORE, "bfloat16")
    linear = Linear(
        HostLoader("plain"),
        dtype="bfloat16",
        tiles={8: FEW_ROWS_TILES[1], ANY_ROWS: GEMM_TILES[2]},
        modes=[mode],
        num_sms=1,
        workspace=np.zeros(1, np.float32),
    )
    x, weight = make_operands("bfloat16", rows, out_features, in_features)
    assert_product(run(linear, x, weight, mode), x, weight, mode)


def test_no_rows(loader: Compiled) -> None:
    x, weight = make_operands("bfloat16", 1, 16, 16)
    out = poisoned((1, 16), DTYPES["bfloat16"])
    make_linear(loader, "bfloat16", TILES[0])(out[:0], x[:0], weight)
    assert np.isnan(out.astype(np.float32)).all()


def test_what_does_not_fit_is_refused(loader: Compiled) -> None:
    linear = make_linear(loader, "bfloat16", {8: FEW_ROWS_TILES[0], 64: GEMM_TILES[0]})
    x, weight = make_operands("bfloat16", 65, 34, 24)
    out = poisoned((65, 34), DTYPES["bfloat16"])
    wrong_x = (
        x[:3].astype(np.float16),
        x[:3, :16],
        x[:4],
        poisoned((3, 31), x.dtype)[:, :24],  # rows 62 bytes apart
        poisoned((3, 32), x.dtype)[:, 1:25],  # rows begin within a chunk
        poisoned((3, 48), x.dtype)[:, ::2],
    )
    for wrong in wrong_x:
        with pytest.raises(ValueError, match="do not fit"):
            linear(out[:3], wrong, weight)
    with pytest.raises(ValueError, match="do not fit"):
        linear(out[:3, :33], x[:3], weight)
    with pytest.raises(ValueError, match="do not fit"):
        linear(out[:3, :16], x[:3], weight, Epilogue.SILU_MUL)
    with pytest.raises(ValueError, match="was not declared"):
        linear(out[:3], x[:3], weight, Epilogue.ADD)
    with pytest.raises(ValueError, match="no tile for more than 64"):
        linear(out, x, weight)


def test_odd_features_cannot_be_halved(loader: Compiled) -> None:
    x, weight = make_operands("bfloat16", 3, 33, 24)
    with pytest.raises(ValueError, match="do not fit"):
        make_linear(loader, "bfloat16", TILES[0])(
            poisoned((3, 16), x.dtype), x, weight, Epilogue.SILU_MUL
        )


def test_a_workspace_too_small_does_without_splitting(loader: Compiled) -> None:
    x, weight = make_operands("bfloat16", 70, 34, 1000)
    mode = MODES["bfloat16"][0]
    results = []
    for size in (8 * 70 * 48, 8 * 70 * 48 - 1):
        workspace = np.full(size, np.nan, np.float32)
        linear = Linear(
            loader,
            dtype="bfloat16",
            tiles={ANY_ROWS: GEMM_TILES[0]},
            modes=MODES["bfloat16"],
            num_sms=4,
            workspace=workspace,
        )
        results.append(run(linear, x, weight, mode).tobytes())
        assert np.isnan(workspace).all() == (size < 8 * 70 * 48)
    assert results[0] == results[1]


def test_pack_rounds_and_pads() -> None:
    weight = np.array([[1.0, 1.00390625, -3.0], [2.0**-3, 1.01171875, 5.0]], np.float32)
    packed = pack(weight, None, dtype="bfloat16", to_device=to_device)
    assert (packed.out_features, packed.in_features) == (2, 3)
    assert packed.weight.shape == (2, 8)
    # Halfway cases go to the even neighbour.
    rounded = np.array([[1.0, 1.0, -3.0], [0.125, 1.015625, 5.0]])
    np.testing.assert_array_equal(packed.weight[:, :3].astype(np.float64), rounded)
    np.testing.assert_array_equal(packed.weight[:, 3:].astype(np.float64), 0)
    np.testing.assert_array_equal(packed.bias, np.zeros(2, np.float32))
    assert packed.nbytes == 2 * 8 * 2 + 2 * 4
    with_bias = pack(weight, np.array([1.5, -2.0]), dtype="float16", to_device=to_device)
    np.testing.assert_array_equal(with_bias.bias, np.array([1.5, -2.0], np.float32))
    assert with_bias.weight.dtype == np.float16


def test_features_between_chunks(loader: Compiled) -> None:
    rng = np.random.default_rng(0)
    packed = pack(rng.standard_normal((33, 13)), None, dtype="bfloat16", to_device=to_device)
    x = to_device(np.zeros((3, 16), ml_dtypes.bfloat16))
    x[:, :13] = rng.standard_normal((3, 13))
    mode = MODES["bfloat16"][0]
    out = run(make_linear(loader, "bfloat16", TILES[0]), x, packed, mode)
    assert_product(out, x, packed, mode)


def test_slices_are_whole_stages_and_at_most_eight() -> None:
    assert [slice_length(k) for k in (8, 64, 512, 513, 576, 4096, 14336)] == [
        *(64, 64, 64, 128, 128, 512, 1792)
    ]
    assert all(-(-k // slice_length(k)) <= 8 for k in range(8, 3000, 8))


@pytest.mark.parametrize("sm", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_tiles_fit_the_device(sm: int) -> None:
    """Shared memory of one block, from the CUDA programming guide's table of capabilities."""
    most = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(sm, 99) * 1024
    tiles = linear_tiles(sm)
    assert max(tiles) == ANY_ROWS
    for rows, tile in tiles.items():
        if isinstance(tile, FewRowsTile):
            assert rows <= tile.rows
            assert tile.shared_bytes(8) <= most
        else:
            assert tile.shared_bytes <= most


def test_tests_cover_every_tile() -> None:
    assert {tile for tiles in LINEAR_TILES.values() for tile in tiles.values()} == set(TILES)


def test_formulas() -> None:
    assert flops(3, 10, 16) == 960
    # Weight 320 and bias 40, x 96, out 60.
    assert bytes_moved(3, 10, 16) == 320 + 40 + 96 + 60
    assert bytes_moved(3, 10, 16, epilogue=Epilogue.SILU_MUL) == 320 + 40 + 96 + 30
    added = bytes_moved(3, 10, 16, epilogue=Epilogue.ADD, out_itemsize=4)
    assert added == 320 + 40 + 96 + 2 * 120
    assert workspace_size(132, {64: GEMM_TILES[0], 8: FEW_ROWS_TILES[0]}) == 8 * 66 * 64 * 64
