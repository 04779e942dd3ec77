"""Copies of KV blocks on the CPU, with the shared cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from rawpaged.backend import Backend
from rawpaged.devices import open_backend
from tests.ops.copy_suite import COPY_CASES, CopyCase, check_copy_blocks, copy_cases


@pytest.mark.parametrize("case", COPY_CASES, ids=lambda case: case.name)
def test_cases(backend: Backend, case: CopyCase) -> None:
    check_copy_blocks(backend, case)


@pytest.mark.parametrize("case", COPY_CASES, ids=lambda case: case.name)
def test_cases_of_bytes(case: CopyCase) -> None:
    backend = open_backend("cpu", dtype="bfloat16", kv_cache_dtype="int8", num_threads=2)
    check_copy_blocks(backend, case)
    backend.close()


@given(case=copy_cases())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_pairs(backend: Backend, case: CopyCase) -> None:
    check_copy_blocks(backend, case)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 4]], r"target blocks \[4\] are not all in \[0, 4\)"),
        ([[-1, 1]], r"source blocks \[-1\]"),
        ([[4, 1]], r"source blocks \[4\]"),
        ([[0, 2], [1, 2]], "written twice"),
        ([[0, 1], [1, 2]], "both read and written"),
        ([[0, 0]], "both read and written"),
        (np.zeros((1, 2), np.int32), r"not int32\[1, 2\]"),
        (np.zeros((2, 3), np.int64), r"not int64\[2, 3\]"),
        (np.zeros(2, np.int64), r"not int64\[2\]"),
    ],
)
def test_pairs_that_would_write_elsewhere_are_refused(
    backend: Backend, pairs: Any, message: str
) -> None:
    pool = backend.new_kv_cache(4, 1, 64, 16)
    with pytest.raises(ValueError, match=message):
        backend.copy_blocks([pool], [pool], np.asarray(pairs))


def test_pools_that_do_not_fit_are_refused(backend: Backend) -> None:
    pools = [backend.new_kv_cache(4, heads, 64, 16) for heads in (1, 2)]
    pair = np.array([[0, 1]])
    with pytest.raises(ValueError, match="do not fit"):
        backend.copy_blocks(pools[:1], pools[1:], pair)
    with pytest.raises(ValueError, match="2 target layers and 1 source layers"):
        backend.copy_blocks(pools, pools[:1], pair)
