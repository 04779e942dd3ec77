"""The examples of docs/gpu-standalone.md run, with NumPy in CuPy's place."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawpaged.gpu import cupy_loader
from tests import reference
from tests.hostsim.loader import HostLoader
from tests.hostsim.wheels import CudaWheels

pytestmark = pytest.mark.gpusim

PAGE = Path(__file__).parents[2] / "docs" / "gpu-standalone.md"


def run_example(section: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that a section's example has defined when it ends."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(cupy_loader, "CupyLoader", lambda cupy: HostLoader())
    names: dict[str, Any] = {}
    exec(compile(found[1], str(PAGE), "exec"), names)
    return names


def test_paged_attention(cuda_wheels: CudaWheels, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_example("Paged attention", monkeypatch)
    for row, first in enumerate(names["query_start_loc"][:-1]):
        end, kv = names["query_start_loc"][row + 1], names["seq_lens"][row]
        tokens = np.arange(kv)
        blocks = names["block_tables"][row, tokens // 16]
        keys, values = (names[part][blocks, :, tokens % 16] for part in ("keys", "values"))
        q = names["q"][first:end]
        expected = reference.attention(q, keys, values, kv - (end - first), 0.125, None)
        np.testing.assert_allclose(names["out"][first:end], expected, rtol=2e-3, atol=1e-4)
        assert np.abs(expected).max() > 1e-3
