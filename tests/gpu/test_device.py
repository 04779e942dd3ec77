"""What CudaDevice asks of CuPy, by a stand-in with two devices and a stream that runs late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.engine import loading
from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.block_copy import CopyBlocks
from tests.conftest import TINY
from tests.hostsim.cupy_stand_in import CUDARuntimeError, CupyStandIn, SimulatedCudaDevice
from tests.hostsim.loader import HostLoader

MODEL = str(TINY / "llama_tied_hd32")


def on_another_thread(work: Callable[[], Any]) -> Any:
    """The result, or the exception."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture
def second() -> SimulatedCudaDevice:
    """The second of two devices, where this thread works."""
    stand_in = CupyStandIn(num_devices=2)
    stand_in.device_id = 1
    return SimulatedCudaDevice(stand_in)


def test_memory_is_the_devices_whatever_thread_asks(second: SimulatedCudaDevice) -> None:
    def use_it() -> Any:
        array = second.upload(np.arange(5, dtype=np.float32))
        second.write(array[:2], np.zeros(2, np.float32))
        second.record().synchronize()
        return second.download(array).tolist(), second.memory_info()

    values, (available, total) = on_another_thread(use_it)
    assert values == [0, 0, 2, 3, 4]
    assert available < total
    assert second.stand_in.memory[0].num_allocations == 2, "the two pinned buffers"
    second.close()


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.gpusim
def test_launches_need_the_device_in_use(second: SimulatedCudaDevice) -> None:
    pool = second.upload(np.arange(8, dtype=np.float32).reshape(2, 4))
    pairs = second.upload(np.array([[0, 1]]))
    copy = CopyBlocks(second)

    def launch() -> Any:
        copy([pool], [pool], pairs)
        return second.download(pool).tolist()

    assert isinstance(on_another_thread(launch), CUDARuntimeError)

    def bind_and_launch() -> Any:
        second.use()
        return launch()

    assert on_another_thread(bind_and_launch) == [[0, 1, 2, 3]] * 2


@pytest.mark.usefixtures("cuda_wheels", "numba_cuda")
@pytest.mark.gpusim
def test_an_engine_stays_on_the_device_it_was_opened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread begins with device 0, as all do."""
    stand_in = CupyStandIn(HostLoader("plain"), num_devices=2)
    stand_in.device_id = 1

    def open_backend(*_: Any, dtype: str, **__: Any) -> CudaBackend:
        return CudaBackend(SimulatedCudaDevice(stand_in), dtype=dtype)

    monkeypatch.setattr(loading, "open_backend", open_backend)
    flags = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 8}
    with LLM(MODEL, device="cuda", dtype="bfloat16", max_model_len=64, **flags) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True, frequency_penalty=0.5, logprobs=1)
        output = llm.generate([3, 4, 5], params, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) == 3
        llm.sleep()
        llm.wake_up()
        assert stand_in.memory[1].used > 0
    assert [memory.used for memory in stand_in.memory] == [0, 0]


def test_pinned_memory_has_its_exact_size_and_one_address(second: SimulatedCudaDevice) -> None:
    memory = second.stand_in.memory[0]
    array = second.pinned((3, 5), "float32")
    assert memory.pinned == 60
    array[...] = 7
    assert second.download(array).tolist() == [[7] * 5] * 3
    del array
    assert memory.pinned == 0


def test_no_pinned_memory_is_a_memory_error(second: SimulatedCudaDevice) -> None:
    memory = second.stand_in.memory[0]
    for allocate in (lambda: second.pinned((4,), "int8"), lambda: second.pinned_buffer(4)):
        memory.fail_at = memory.num_allocations
        with pytest.raises(MemoryError, match="4 bytes of pinned host memory: cudaErrorMemory"):
            allocate()


def test_a_stream_has_work_only_for_its_device(second: SimulatedCudaDevice) -> None:
    """What the stand-in shares with CUDA, so that these tests can fail."""
    second.stand_in.device_id = 0
    with pytest.raises(CUDARuntimeError, match="InvalidResourceHandle"):
        second._stream.submit(lambda: None)
