"""Fixtures for tests that run CUDA kernels on the host; tests/conftest.py hands them to all."""

from __future__ import annotations

import os

import pytest

from tests.hostsim.loader import HostLoader, Order
from tests.hostsim.wheels import CudaWheels, MissingToolError, find_compiler, find_cuda_wheels

ORDERS: tuple[tuple[Order, int], ...] = (("forward", 0), ("reverse", 0), ("random", 1))


@pytest.fixture(scope="session")
def cuda_wheels() -> CudaWheels:
    """The CUDA wheels. Where they or g++ are missing, tests are skipped, but fail under CI."""
    return wheels_or_skip()


def wheels_or_skip() -> CudaWheels:
    """What the fixture `cuda_wheels` gives or raises."""
    try:
        find_compiler()
        return find_cuda_wheels()
    except MissingToolError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(params=ORDERS, ids=[order for order, _ in ORDERS])
def host_loader(request: pytest.FixtureRequest, cuda_wheels: CudaWheels) -> HostLoader:
    """A checking loader in three orders; parametrize indirectly with (order, seed) for others."""
    order, seed = request.param
    return HostLoader(order=order, seed=seed)
