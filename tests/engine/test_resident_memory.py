"""A server that is ready takes little besides weights and KV pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST_BYTES = 250_000_000


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="only Linux tells")
def test_besides_weights_and_pool() -> None:
    command = [sys.executable, "-m", "tests.engine.resident_child", "model=smollm2-135m"]
    # A start that compiles keeps some of what LLVM took; the next one finds the kernels.
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
        assert done.returncode == 0, done.stderr
    found = {name: int(size) for name, size in (row.split() for row in done.stdout.splitlines())}
    assert found["weights"] > 90_000_000
    assert found["kv_pool"] > 0
    assert 100_000_000 < found["rest"] < MOST_BYTES, found
