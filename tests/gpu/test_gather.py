"""Gathering rows on the simulator: widths that take each size of word."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawpaged.gpu.gather import GatherRows
from tests.hostsim.loader import HostLoader
from tests.ops.row_cases import gather_case

pytestmark = pytest.mark.gpusim


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_gather_rows(host_loader: HostLoader, dtype: Any) -> None:
    case = gather_case()
    gather = GatherRows(host_loader)
    for width in (12, 8, 6, 5, 1):
        x = case.x[:, :width].astype(dtype)
        out = np.full((3, width), np.nan, dtype)
        gather(out, x, case.rows)
        np.testing.assert_array_equal(out, x[case.rows])


def test_rows_longer_than_a_block(host_loader: HostLoader) -> None:
    x = np.arange(2 * 5000, dtype=np.float32).reshape(2, 5000)
    out = np.full((1, 5000), np.nan, np.float32)
    GatherRows(host_loader)(out, x, np.array([1], np.int32))
    np.testing.assert_array_equal(out[0], x[1])


def test_rows_of_a_wider_array(host_loader: HostLoader) -> None:
    x = np.arange(48, dtype=np.float32).reshape(6, 8)
    out = np.full((2, 12), np.nan, np.float32)
    GatherRows(host_loader)(out[:, :4], x[:, 4:], np.array([5, 0], np.int32))
    np.testing.assert_array_equal(out[:, :4], x[[5, 0], 4:])
    assert np.isnan(out[:, 4:]).all()


def test_arrays_that_do_not_fit_are_refused(host_loader: HostLoader) -> None:
    gather = GatherRows(host_loader)
    x, out = np.zeros((4, 6), np.float32), np.zeros((2, 6), np.float32)
    rows = np.zeros(2, np.int32)
    wrong = (
        (out, x[:, :5], rows),
        (out, x, rows[:1]),
        (out, x.astype(np.float16), rows),
        (out, x, rows.astype(np.int64)),
        (out[:, ::2], x[:, ::2], rows),
        (out.astype(np.float64), x.astype(np.float64), rows),
    )
    for args in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            gather(*args)
