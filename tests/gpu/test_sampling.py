"""The sampler's kernels on the simulator: the suite of all backends, and the CPU's ids exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from rawpaged.backend import SamplingRows, TokenLogprobRows
from rawpaged.cpu.backend import CpuBackend
from rawpaged.errors import BackendError
from rawpaged.gpu.sampling import (
    MAX_VOCAB_SIZE,
    DeviceLogprobRows,
    DeviceSamplingRows,
    Sampling,
    threads_of_row,
)
from tests.hostsim.loader import HostLoader
from tests.hostsim.wheels import CudaWheels
from tests.ops.sampling_suite import SamplingOps, SamplingSuite, sampling_rows

pytestmark = pytest.mark.gpusim

Float32 = npt.NDArray[np.float32]

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693145752)
_LN2_LOW = np.float32(1.42860677e-6)
_LOWEST = np.float32(-87.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
# Minimax polynomial for (exp(r) - 1 - r) / r^2 on [-ln2/2, ln2/2] (Cephes expf).
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)


@njit(nogil=True, inline="always")
def exp(x):  # type: ignore[no-untyped-def]
    """The formula of weights in the samplers, on a CPU and in CUDA, for x <= 80."""
    x = max(x, _LOWEST)
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    p = p * (r * r) + r + _ONE
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return p * power.view(np.float32)


def on_device(rows: SamplingRows) -> DeviceSamplingRows:
    return DeviceSamplingRows(*(getattr(rows, name) for name in SamplingRows.__slots__))


class SimulatedSampler:
    """SamplingOps over kernels on the host; makes a Sampling for the vocabulary it meets."""

    def __init__(self, loader: HostLoader) -> None:
        self._loader = loader

    def sample(self, logits: Float32, rows: SamplingRows) -> npt.NDArray[np.int32]:
        out = np.full(len(logits), -7, np.int32)
        Sampling(self._loader, vocab_size=logits.shape[1]).sample(out, logits, on_device(rows))
        return out

    def token_logprobs(
        self, logits: Float32, token_ids: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobRows:
        n = len(logits)
        out = DeviceLogprobRows(
            chosen=np.full(n, np.nan, np.float32),
            ranks=np.full(n, -7, np.int32),
            top_token_ids=np.full((n, k), -7, np.int32),
            top_logprobs=np.full((n, k), np.nan, np.float32),
        )
        op = Sampling(self._loader, vocab_size=logits.shape[1])
        op.token_logprobs(out, logits, token_ids)
        return TokenLogprobRows(out.chosen, out.ranks, out.top_token_ids, out.top_logprobs)


@pytest.fixture
def ops(host_loader: HostLoader) -> SimulatedSampler:
    return SimulatedSampler(host_loader)


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = CpuBackend(dtype="float32", num_threads=1)
    yield backend
    backend.close()


class TestSampling(SamplingSuite):
    draws = 300

    @pytest.fixture
    def ops(self, cuda_wheels: CudaWheels) -> SimulatedSampler:
        return SimulatedSampler(HostLoader(order="random", seed=3))


def varied_logits(rng: np.random.Generator, n: int, vocab: int) -> Float32:
    """Flat and peaked rows, some with ties at the top, with NaN, with equal or forbidden logits."""
    logits = rng.choice([0.5, 2, 6], (n, 1)) * rng.standard_normal((n, vocab))
    logits[0, : vocab // 2] = logits[0].max() + 1
    logits[1, vocab // 3 :] = -np.inf
    logits[2, vocab // 2] = np.nan
    logits[3] = 1.5
    logits[4] = np.round(logits[4])
    logits[5] = -np.inf
    return logits.astype(np.float32)


def varied_rows(rng: np.random.Generator, n: int) -> SamplingRows:
    return SamplingRows(
        temperature=rng.choice([0, 0.3, 1, 1, 5], n).astype(np.float32),
        top_k=rng.choice([0, 1, 7, 50, 1 << 19], n).astype(np.int32),
        top_p=rng.choice([1, 0.9, 0.1, 0.5, 1e-6, 1 - 2.0**-23], n).astype(np.float32),
        min_p=rng.choice([0, 0, 0.1, 1], n).astype(np.float32),
        seeds=rng.integers(0, 2**64, n, dtype=np.uint64),
        positions=rng.integers(0, 2**32, n, dtype=np.uint32),
        sample_indices=rng.integers(0, 9, n, dtype=np.uint32),
    )


@pytest.mark.parametrize(
    ("vocab", "n"),
    [(1, 20), (2, 20), (31, 60), (33, 60), (257, 40), (1031, 30), (9001, 8), (262_147, 7)],
)
def test_ids_are_those_of_the_cpu(
    ops: SamplingOps, cpu: CpuBackend, vocab: int, n: int
) -> None:
    rng = np.random.default_rng(vocab)
    # One element between rows, so that rows begin at any multiple of four bytes.
    logits = np.full((n, vocab + 1), np.nan, np.float32)[:, :vocab]
    logits[...] = varied_logits(rng, n, vocab)
    rows = varied_rows(rng, n)
    np.testing.assert_array_equal(ops.sample(logits, rows), cpu.sample(logits.copy(), rows))


def test_weights_are_bit_for_bit_those_of_the_cpu(ops: SamplingOps) -> None:
    """min_p is the very weight of all tokens but one; a unit less, and none could be drawn."""
    below = np.linspace(-2, -0.001, 200, dtype=np.float32)
    weights = np.array([exp(x) for x in below], np.float32)
    logits = np.repeat(below[:, None], 32, axis=1)
    logits[:, 0] = 0.0
    for min_p, kept in ((weights, True), (np.nextafter(weights, np.float32(2)), False)):
        sampled = ops.sample(logits, replace(sampling_rows(200), min_p=min_p))
        assert (sampled > 0).sum() > 150 if kept else not sampled.any()


@pytest.mark.parametrize(("vocab", "n", "k"), [(1, 8, 1), (33, 8, 20), (9001, 8, 300)])
def test_logprobs_are_those_of_the_cpu(
    ops: SamplingOps, cpu: CpuBackend, vocab: int, n: int, k: int
) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.nan_to_num(varied_logits(rng, n, vocab), nan=0.0, neginf=-np.inf)
    logits[5, 0] = 2.0
    logits[6] = np.where(np.arange(vocab) % 2, 0.0, -0.0)
    token_ids = rng.integers(0, vocab, n).astype(np.int32)
    mine, theirs = (sampler.token_logprobs(logits, token_ids, k) for sampler in (ops, cpu))
    np.testing.assert_array_equal(mine.ranks, theirs.ranks)
    np.testing.assert_array_equal(mine.top_token_ids, theirs.top_token_ids)
    np.testing.assert_allclose(mine.chosen, theirs.chosen, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(mine.top_logprobs, theirs.top_logprobs, rtol=1e-6, atol=1e-7)


def test_a_token_outside_the_vocabulary_has_no_logprob(ops: SamplingOps) -> None:
    logits = np.zeros((3, 33), np.float32)
    table = ops.token_logprobs(logits, np.array([-1, 33, 32], np.int32), 1)
    assert np.isnan(table.chosen).tolist() == [True, True, False]
    assert table.ranks.tolist() == [0, 0, 1]
    assert table.top_token_ids.tolist() == [[0], [0], [0]]


def test_nan_comes_last_in_the_top(ops: SamplingOps) -> None:
    logits = np.array([[np.nan, 1, -np.inf, 3, np.nan]], np.float32)
    table = ops.token_logprobs(logits, np.array([3], np.int32), 5)
    assert table.top_token_ids.tolist() == [[3, 1, 2, 0, 4]]
    np.testing.assert_allclose(table.chosen, [-np.log1p(np.exp(-2))], rtol=1e-6)


def test_what_the_kernels_cannot_take_is_refused(host_loader: HostLoader) -> None:
    for vocab_size in (0, MAX_VOCAB_SIZE + 1):
        with pytest.raises(BackendError, match=f"vocab_size={vocab_size} "):
            Sampling(host_loader, vocab_size=vocab_size)
    op = Sampling(host_loader, vocab_size=33)
    logits, out = np.zeros((2, 33), np.float32), np.zeros(2, np.int32)
    rows = on_device(sampling_rows(2))
    with pytest.raises(ValueError, match="do not fit"):
        op.sample(out, np.zeros((2, 34), np.float32), rows)
    with pytest.raises(ValueError, match="do not fit"):
        op.sample(out.astype(np.int64), logits, rows)
    with pytest.raises(ValueError, match="do not fit"):
        op.sample(out, logits, on_device(sampling_rows(3)))
    table = DeviceLogprobRows(
        chosen=np.zeros(2, np.float32),
        ranks=np.zeros(2, np.int32),
        top_token_ids=np.zeros((2, 34), np.int32),
        top_logprobs=np.zeros((2, 34), np.float32),
    )
    with pytest.raises(ValueError, match="do not fit"):
        op.token_logprobs(table, logits, out)


def test_no_rows_launch_nothing(host_loader: HostLoader) -> None:
    op = Sampling(host_loader, vocab_size=33)
    op.sample(np.zeros(0, np.int32), np.zeros((0, 33), np.float32), on_device(sampling_rows(0)))


def test_threads_grow_with_the_vocabulary() -> None:
    assert [threads_of_row(n) for n in (1, 256, 257, 8192, 8193, 262_144)] == [
        32,
        32,
        64,
        1024,
        1024,
        1024,
    ]
