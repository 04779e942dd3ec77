"""Beam search on the CUDA backend, its kernels in the simulators, against transformers."""

from __future__ import annotations

import pytest

from tests.engine.beams import CASES, assert_golden, run_searches, search_of
from tests.gpu.test_engine import gpu_engine

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("cuda_wheels", "numba_cuda")]

FAR = 0.015
"""Of scores: nearer ones half precision may put in another order."""


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_golden_searches(model: str, enforce_eager: bool) -> None:
    """Several at once in a pool that makes them wait for each other; blocks are copied on write."""
    cases = [c for c in CASES if c["model"] == model and c["margin"] > FAR and c["width"] <= 4]
    assert cases
    engine = gpu_engine(model, "float16", enforce_eager=enforce_eager, num_blocks=9)
    found = run_searches(engine, [search_of(case, str(i)) for i, case in enumerate(cases)])
    for i, case in enumerate(cases):
        assert_golden(found[f"{i}-0"], case, rel=2e-3)
    assert engine.scheduler.kv_cache_manager.num_block_copies > 0
    engine.close()
