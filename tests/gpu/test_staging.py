"""Uploads through pinned buffers, over a device that fetches them as late as it may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.device import CudaDevice
from rawpaged.gpu.staging import Event, Staging
from rawpaged.weights.checkpoint import open_checkpoint
from rawpaged.weights.loader import load_weights
from tests.conftest import TINY
from tests.hostsim.cupy_stand_in import CupyStandIn, SimulatedCudaDevice
from tests.hostsim.loader import HostLoader

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class NoWaiting:
    """What an event is to somebody who does not wait for it."""

    def synchronize(self) -> None:
        pass


class NotWaiting:
    """A copy engine that lets buffers be filled again at once."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.pinned_buffer = device.pinned_buffer
        self.copy_async = device.copy_async

    def record(self) -> Event:
        return NoWaiting()


@pytest.fixture
def device() -> Iterator[SimulatedCudaDevice]:
    opened = SimulatedCudaDevice(CupyStandIn())
    yield opened
    opened.close()


def staged(
    device: CudaDevice, staging: Staging, sources: list[npt.NDArray[Any]], dtypes: list[Any]
) -> list[npt.NDArray[Any]]:
    """What arrives of arrays that are changed as soon as they have been given away."""
    targets = []
    for source, dtype in zip(sources, dtypes, strict=True):
        target = device.empty(source.shape, np.dtype(dtype).name)
        given = source.copy()
        staging.copy(target, given)
        given[...] = 0
        targets.append(target)
    return [device.download(target) for target in targets]


def random_arrays(count: int, rng: np.random.Generator) -> tuple[list[npt.NDArray[Any]], list[Any]]:
    shapes = [(), (0, 3), (1,), (7,), (5, 3), (40, 9), (2, 3, 4)]
    sources = [
        rng.standard_normal(shapes[rng.integers(len(shapes))]).astype(np.float32)
        for _ in range(count)
    ]
    return sources, [list(DTYPES.values())[rng.integers(3)] for _ in range(count)]


@given(seed=st.integers(0, 2**32), count=st.integers(1, 30), buffer_bytes=st.integers(4, 300))
def test_all_arrays_arrive_whole_and_rounded(seed: int, count: int, buffer_bytes: int) -> None:
    device = SimulatedCudaDevice(CupyStandIn())
    staging = Staging(device, buffer_bytes=buffer_bytes)
    sources, dtypes = random_arrays(count, np.random.default_rng(seed))
    arrived = staged(device, staging, sources, dtypes)
    for got, source, dtype in zip(arrived, sources, dtypes, strict=True):
        np.testing.assert_array_equal(got, source.astype(dtype), strict=True)


def test_a_buffer_filled_too_early_shows(device: SimulatedCudaDevice) -> None:
    """The device really is late: without waiting, what comes later overwrites what came first."""
    sources = [np.full(64, i, np.float32) for i in range(5)]
    for engine, is_right in ((device, True), (NotWaiting(device), False)):
        staging = Staging(engine, buffer_bytes=256)
        arrived = staged(device, staging, sources, [np.float32] * 5)
        assert all((a == b).all() for a, b in zip(arrived, sources, strict=True)) == is_right


def test_only_full_buffers_are_waited_for(
    device: SimulatedCudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, events = device.record, []

    def counted() -> Event:
        events.append(record())
        return events[-1]

    monkeypatch.setattr(device, "record", counted)
    staging = Staging(device, buffer_bytes=1024)
    target = device.empty((16,), "float32")
    for _ in range(16):
        staging.copy(target, np.zeros(16, np.float32))
    assert not events
    staging.copy(target, np.zeros(16, np.float32))
    assert len(events) == 1


def test_buffers_are_given_back(device: SimulatedCudaDevice) -> None:
    memory = device.stand_in.memory[0]
    staging = Staging(device, buffer_bytes=1000)
    assert memory.pinned == 0
    target = device.empty((8,), "float32")
    staging.copy(target, np.arange(8, dtype=np.float32))
    assert memory.pinned == 2000
    staging.close()
    assert memory.pinned == 0
    np.testing.assert_array_equal(device.download(target), np.arange(8))


def test_strided_sources(device: SimulatedCudaDevice) -> None:
    source = np.arange(60, dtype=np.float32).reshape(6, 10)
    for view in (source.T, source[::2, 1:], source[::-1]):
        np.testing.assert_array_equal(device.download(device.upload(view)), view)


@pytest.mark.gpusim
@pytest.mark.usefixtures("cuda_wheels", "numba_cuda")
@pytest.mark.parametrize("name", ["llama_mha_bias", "qwen3"])
@pytest.mark.parametrize("is_late", [False, True])
def test_weights_of_a_checkpoint(
    name: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In buffers much smaller than a tensor; wrong if they are filled too early."""
    device = SimulatedCudaDevice(CupyStandIn(HostLoader("plain")))
    engine: Any = NotWaiting(device) if is_late else device
    monkeypatch.setattr(device, "_staging", Staging(engine, buffer_bytes=1000))
    backend = CudaBackend(device, dtype="bfloat16")
    checkpoint = open_checkpoint(str(TINY / name))
    weights: Any = load_weights(checkpoint, backend)
    tensors = checkpoint.tensors
    assert tensors is not None
    layer = weights.layers[2]
    expected = {
        "model.embed_tokens.weight": weights.embed_tokens.weight,
        "model.norm.weight": weights.norm,
        "model.layers.2.self_attn.o_proj.weight": layer.o_proj.weight,
        "model.layers.2.mlp.down_proj.weight": layer.down_proj.weight,
        "model.layers.2.input_layernorm.weight": layer.input_layernorm,
    }
    arrived = {key: device.download(array) for key, array in expected.items()}
    equal = [
        bool((array == tensors.read(key).astype(array.dtype)).all())
        for key, array in arrived.items()
    ]
    assert all(equal) != is_late
    backend.close()
