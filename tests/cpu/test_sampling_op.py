"""A call that is repeated samples from what its arrays hold now."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rawpaged.cpu.backend import CpuBackend
from tests.ops.sampling_suite import sampling_rows


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    backend = CpuBackend(dtype="float32", num_threads=2)
    yield backend
    backend.close()


def test_arrays_that_change_between_calls(backend: CpuBackend) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 500)).astype(np.float32)
    rows = sampling_rows(3, temperature=1.0)
    results = []
    for step in range(20):
        if step % 3 == 0:
            logits[:] = rng.standard_normal(logits.shape)
        rows.positions[:] = step + np.arange(3)
        sampled = backend.sample(logits, rows)
        other = CpuBackend(dtype="float32", num_threads=1)
        assert sampled.tolist() == other.sample(logits.copy(), rows).tolist()
        other.close()
        results.append(sampled)
    # Those given out stay what they were.
    assert len({tuple(sampled.tolist()) for sampled in results}) == 20


def test_other_arrays(backend: CpuBackend) -> None:
    first = np.zeros((1, 50), np.float32)
    first[0, 7] = 1
    second = np.zeros((2, 50), np.float32)
    second[:, 9] = 1
    rows = {n: sampling_rows(n, temperature=0.0) for n in (1, 2)}
    for _ in range(2):
        assert backend.sample(first, rows[1]).tolist() == [7]
        assert backend.sample(second, rows[2]).tolist() == [9, 9]
        assert backend.sample(second[:1], rows[1]).tolist() == [9]
        backend.release_unused()
    assert backend.sample(second[:0], sampling_rows(0)).tolist() == []
