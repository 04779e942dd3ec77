"""Copies of KV blocks through the CUDA backend in Numba's simulator, with the shared cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from rawpaged.gpu.backend import CudaBackend
from tests.hostsim.device import HostDevice
from tests.hostsim.loader import HostLoader
from tests.ops.copy_suite import COPY_CASES, CopyCase, check_copy_blocks, copy_cases

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("cuda_wheels", "numba_cuda")]

MOST_PAIRS = 8
"""The simulator copies about a hundred thousand words a second."""


def smaller(case: CopyCase) -> CopyCase:
    """The case with one head of the smallest size and few pairs, which is the same to a kernel."""
    return replace(case, pairs=case.pairs[:MOST_PAIRS], num_kv_heads=1, head_dim=64)


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    opened = CudaBackend(HostDevice(HostLoader(mode="plain")), dtype="bfloat16")
    yield opened
    opened.close()


@pytest.mark.parametrize("case", COPY_CASES, ids=lambda case: case.name)
def test_cases(backend: CudaBackend, case: CopyCase) -> None:
    check_copy_blocks(backend, smaller(case))


def test_blocks_of_bytes() -> None:
    opened = CudaBackend(
        HostDevice(HostLoader(mode="plain")), dtype="bfloat16", kv_cache_dtype="fp8_e4m3"
    )
    for case in COPY_CASES:
        check_copy_blocks(opened, smaller(case))
    opened.close()


@given(case=copy_cases())
@settings(max_examples=20, deadline=None)
def test_any_pairs(backend: CudaBackend, case: CopyCase) -> None:
    check_copy_blocks(backend, smaller(case))


def test_pairs_that_would_write_elsewhere_are_refused(backend: CudaBackend) -> None:
    pool, host = backend.new_kv_cache(4, 1, 64, 16), backend.new_host_kv_cache(2, 1, 64, 16)
    with pytest.raises(ValueError, match=r"target blocks \[2\] are not all in \[0, 2\)"):
        backend.copy_blocks([host], [pool], np.array([[3, 2]]))
