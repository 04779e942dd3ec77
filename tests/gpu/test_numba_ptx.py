"""Numba kernels compile for every architecture without a GPU, to code that stays in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostsim.wheels import CudaWheels, MissingToolError

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("numba_cuda")]

ROOT = Path(__file__).parents[2]
NAMES = {
    *(f"{op}_bf16" for op in ("embed", "silu_and_mul", "rope_store")),
    *(f"{op}_f16" for op in ("embed", "silu_and_mul", "rope_store")),
    *(f"rope_store_{dtype}_{cache}" for dtype in ("bf16", "f16") for cache in ("fp8", "int8")),
    "edit_logits",
    "mask_logits",
    "copy_blocks",
    "take_token_ids",
}


@pytest.fixture(scope="session")
def nvvm(cuda_wheels: CudaWheels) -> None:
    """NVVM of its wheel, which Numba finds by itself."""
    if not (cuda_wheels.root / "nvvm").exists():
        message = str(MissingToolError(f"nvidia-nvvm is missing below {cuda_wheels.root}"))
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.mark.usefixtures("nvvm")
@pytest.mark.parametrize("cc", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_kernels_compile_to_registers_alone(cc: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.numba_ptx", cc],
        cwd=ROOT,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "0"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {facts["kernel"] for facts in found} == NAMES
    for facts in found:
        assert facts["target"] == [f"sm_{cc.replace('.', '')}"], facts
        (entry,) = facts["entries"]
        assert f"{len(facts['kernel'])}{facts['kernel']}" in entry
        assert not facts["local_memory"], facts
        assert not facts["double"], f"double precision in {facts}"
        assert not facts["calls"], f"a call that was not inlined in {facts}"
