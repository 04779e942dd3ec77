"""RMSNorm kernels on the simulator against the cases of all backends."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.gpu.norm import RmsNorm, pack_size, threads_of_row
from tests import reference
from tests.hostsim.loader import HostLoader
from tests.ops.row_cases import add_norm_case, head_norm_case, norm_case, normal, stored

pytestmark = pytest.mark.gpusim

DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SIZES = (7, 80, 576, 4104)
"""One element a thread with idle lanes; two; packs that leave threads idle; several a thread."""


def nan(dtype: str, *shape: int) -> npt.NDArray[Any]:
    return np.full(shape, np.nan, DTYPES[dtype])


def assert_rounded(out: npt.NDArray[Any], expected: npt.NDArray[np.float64], dtype: str) -> None:
    """Whether out is expected with one rounding to dtype, after a float32 computation."""
    rtol = 1.01 * UNIT_ROUNDOFF[dtype]
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_of_the_residual(host_loader: HostLoader, size: int) -> None:
    case = norm_case(size)
    out = nan("bfloat16", 5, size)
    RmsNorm(host_loader, dtype="bfloat16", size=size).rms_norm(
        out, case.x, case.weight, case.eps
    )
    assert_rounded(out, case.expected, "bfloat16")


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_after_the_sum(host_loader: HostLoader, size: int) -> None:
    case = add_norm_case(size, 5, lambda x: stored(x, "bfloat16"))
    out, total = nan("bfloat16", 5, size), case.residual.copy()
    x = case.x.astype(ml_dtypes.bfloat16)
    op = RmsNorm(host_loader, dtype="bfloat16", size=size)
    op.add_rms_norm(out, x, total, case.weight, case.eps)
    np.testing.assert_array_equal(total, case.x + case.residual)
    assert_rounded(out, case.expected, "bfloat16")


@pytest.mark.parametrize("size", SIZES)
def test_heads_are_normalised_in_place_and_others_stay(host_loader: HostLoader, size: int) -> None:
    case = head_norm_case(size, lambda x: stored(x, "bfloat16"))
    x = case.x.astype(ml_dtypes.bfloat16)
    op = RmsNorm(host_loader, dtype="bfloat16", size=size)
    op.rms_norm(x[:, 1:4], x[:, 1:4], case.weight, case.eps)
    assert_rounded(x, case.expected, "bfloat16")
    np.testing.assert_array_equal(x[:, [0, 4, 5]], case.x[:, [0, 4, 5]])


def test_heads_to_another_view(host_loader: HostLoader) -> None:
    case = head_norm_case(80, lambda x: stored(x, "bfloat16"))
    x = case.x.astype(ml_dtypes.bfloat16)
    out = nan("bfloat16", 3, 4, 80)
    op = RmsNorm(host_loader, dtype="bfloat16", size=80)
    op.rms_norm(out[:, 1:], x[:, 1:4], case.weight, case.eps)
    assert_rounded(out[:, 1:], case.expected[:, 1:4], "bfloat16")
    assert np.isnan(out[:, 0].astype(np.float32)).all()


def test_float16(host_loader: HostLoader) -> None:
    op = RmsNorm(host_loader, dtype="float16", size=576)
    case = norm_case(576)
    out = nan("float16", 5, 576)
    op.rms_norm(out, case.x, case.weight, case.eps)
    assert_rounded(out, case.expected, "float16")
    summed = add_norm_case(576, 5, lambda x: stored(x, "float16"))
    total = summed.residual.copy()
    op.add_rms_norm(out, summed.x.astype(np.float16), total, summed.weight, summed.eps)
    assert_rounded(out, summed.expected, "float16")


def test_weights_stored_less_one(host_loader: HostLoader) -> None:
    case = norm_case(80)
    out = nan("bfloat16", 5, 80)
    op = RmsNorm(host_loader, dtype="bfloat16", size=80, one_plus=True)
    op.rms_norm(out, case.x, case.weight, case.eps)
    assert_rounded(out, reference.rms_norm(case.x, 1.0 + case.weight, case.eps), "bfloat16")


@pytest.mark.parametrize("size", [80, 576])
def test_a_row_is_the_same_in_any_batch(host_loader: HostLoader, size: int) -> None:
    rng = np.random.default_rng(9)
    x, weight = normal(rng, 9, size), normal(rng, size)
    op = RmsNorm(host_loader, dtype="bfloat16", size=size)
    together, alone = nan("bfloat16", 9, size), nan("bfloat16", 1, size)
    op.rms_norm(together, x, weight, 1e-5)
    for row in (0, 4, 8):
        op.rms_norm(alone, x[row : row + 1], weight, 1e-5)
        assert alone.tobytes() == together[row].tobytes()


def test_no_rows_launch_nothing(host_loader: HostLoader) -> None:
    op = RmsNorm(host_loader, dtype="bfloat16", size=80)
    weight = np.ones(80, np.float32)
    op.rms_norm(nan("bfloat16", 0, 80), np.zeros((0, 80), np.float32), weight, 1e-5)


def test_arrays_that_do_not_fit_are_refused(host_loader: HostLoader) -> None:
    op = RmsNorm(host_loader, dtype="bfloat16", size=80)
    weight = np.ones(80, np.float32)
    x, residual = np.zeros((4, 80), ml_dtypes.bfloat16), np.zeros((4, 80), np.float32)
    shifted = np.zeros(321, ml_dtypes.bfloat16)[1:].reshape(4, 80)
    wrong = (
        (x, residual[:3], weight),
        (residual, residual, weight),
        (x, residual.astype(np.float64), weight),
        (x, residual, weight[:79]),
        (x, residual, weight.astype(ml_dtypes.bfloat16)),
        (x, shifted, weight),
        (x[:, ::2], residual[:, ::2], weight[::2]),
    )
    for out, source, w in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            op.rms_norm(out, source, w, 1e-5)
    for out, delta, total in ((x, x, residual), (x.copy(), x, residual[:3])):
        with pytest.raises(ValueError, match="do not fit"):
            op.add_rms_norm(out, delta, total, weight, 1e-5)


@pytest.mark.parametrize("size", [1, 7, 32, 64, 80, 100, 128, 576, 896, 4096, 5120, 8192, 16384])
def test_threads_cover_a_row(size: int) -> None:
    pack, threads = pack_size(size), threads_of_row(size)
    assert size % pack == 0
    assert threads % 32 == 0
    assert threads <= 512
    chunks = -(-size // (pack * threads))
    assert (chunks - 1) * pack * threads < size, "a chunk without elements"
