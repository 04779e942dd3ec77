"""Fixtures for tests of kernels in Numba-CUDA."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numba
import pytest

from tests.hostsim.wheels import INSTALL_HINT


@pytest.fixture(scope="session")
def numba_cuda() -> None:
    """Numba-CUDA with its simulator. Where it is missing, tests are skipped, but fail under CI."""
    if importlib.util.find_spec("numba_cuda") is None:
        message = f"numba-cuda is missing; {INSTALL_HINT}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    config: Any = numba.config
    assert config.ENABLE_CUDASIM, "tests/conftest.py has to be imported before Numba"
