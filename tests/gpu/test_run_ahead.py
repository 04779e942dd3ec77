"""Sampling that nobody waits for, on a device that is late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawpaged.backend import SamplingRows
from rawpaged.gpu.backend import CudaBackend
from tests.hostsim.cupy_stand_in import CupyStandIn, SimulatedCudaDevice
from tests.hostsim.loader import HostLoader

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("cuda_wheels", "numba_cuda")]

VOCAB_SIZE = 50


@pytest.fixture
def backend() -> CudaBackend:
    return CudaBackend(SimulatedCudaDevice(CupyStandIn(HostLoader("plain"))), dtype="float16")


def logits_of(backend: CudaBackend, num_rows: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return backend.upload(4 * rng.standard_normal((num_rows, VOCAB_SIZE)).astype(np.float32))


def sampling_rows(num_rows: int, seed: int) -> SamplingRows:
    """Half of the rows greedy."""
    return SamplingRows(
        temperature=np.arange(num_rows, dtype=np.float32) % 2,
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.full(num_rows, 0.9, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seeds=np.arange(seed, seed + num_rows, dtype=np.uint64),
        positions=np.arange(num_rows, dtype=np.uint32),
        sample_indices=np.zeros(num_rows, np.uint32),
    )


@pytest.mark.parametrize("k", [None, 0, 3])
def test_what_it_brings_is_what_the_ops_give(backend: CudaBackend, k: int | None) -> None:
    """Whatever is queued behind it, and however many rows came before."""
    ahead = backend.run_ahead(5)
    for num_rows in (2, 5, 1):
        rows, reported = sampling_rows(num_rows, 3), logits_of(backend, num_rows, num_rows)
        edited = logits_of(backend, num_rows, 10 + num_rows)
        wait = ahead.sample(edited, rows, reported=reported, num_logprobs=k)
        overwritten = [np.full(array.shape, np.nan, np.float32) for array in (reported, edited)]
        expected_logits = [backend.upload(np.zeros(array.shape, "f4")) for array in overwritten]
        for to, origin in zip(expected_logits, (reported, edited), strict=True):
            ids = backend.upload(np.arange(num_rows, dtype=np.int32))
            backend.gather_rows(to, origin, ids)
        for array, nan in zip((reported, edited), overwritten, strict=True):
            backend.device.write(array, nan)
        drawn = wait()
        expected = backend.sample(expected_logits[1], rows)
        np.testing.assert_array_equal(drawn.token_ids, expected)
        if k is None:
            assert drawn.logprobs is None
            continue
        table = backend.token_logprobs(expected_logits[0], expected, k)
        assert drawn.logprobs is not None
        for name in ("chosen", "ranks", "top_token_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(drawn.logprobs, name), getattr(table, name))


def test_it_waits_for_nothing_behind_it(backend: CudaBackend) -> None:
    ahead = backend.run_ahead(2)
    stream = backend.device._stream  # type: ignore[attr-defined]
    logits = logits_of(backend, 2, 0)
    started = stream.num_run
    wait = ahead.sample(logits, sampling_rows(2, 0), reported=logits, num_logprobs=2)
    assert stream.num_run == started, "launching has waited"
    place = stream.num_submitted
    ahead.take_token_ids(backend.upload(np.array([-1, -2], np.int32)))
    wait()
    assert started < stream.num_run == place < stream.num_submitted


def test_the_next_step_finds_the_tokens_on_the_device(backend: CudaBackend) -> None:
    """Also those of a captured step, whose place was fixed before anything was drawn."""
    ahead = backend.run_ahead(4)
    token_ids = backend.upload(np.zeros(3, np.int32))
    replay = backend.capture(lambda: ahead.take_token_ids(token_ids))
    for seed, refers in ((0, [-1, 17, -3]), (1, [-3, -2, -1])):
        logits = logits_of(backend, 3, seed)
        wait = ahead.sample(logits, sampling_rows(3, seed), reported=logits, num_logprobs=None)
        backend.device.write(token_ids, np.array(refers, np.int32))
        replay()
        drawn = wait().token_ids
        expected = [drawn[-1 - each] if each < 0 else each for each in refers]
        assert backend.download(token_ids).tolist() == expected


def test_broken_logits_draw_no_token_that_could_not_be_looked_up(backend: CudaBackend) -> None:
    ahead = backend.run_ahead(1)
    logits = backend.upload(np.full((1, VOCAB_SIZE), np.nan, np.float32))
    wait = ahead.sample(logits, sampling_rows(1, 0), reported=logits, num_logprobs=1)
    token_ids = backend.upload(np.array([-1], np.int32))
    ahead.take_token_ids(token_ids)
    assert wait().token_ids.tolist() == [-1]
    assert backend.download(token_ids).tolist() == [0]
