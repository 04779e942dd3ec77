"""CuPy as far as `gpu/device.py` asks for it: arrays on the host, and a stream that runs late.

Nothing that is queued on a stream happens before somebody waits for it, as on a device that is
busy; so whoever reuses memory too early sees wrong numbers. Copies from memory that is not pinned
wait for the stream, as the driver does. Memory is counted, and there is only so much of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.gpu.device import CudaDevice
from rawpaged.gpu.module import Function, Loader

_ALIGNMENT = 512
"""Of allocations, and what their sizes are rounded up to."""
_MAX_SHARED_BYTES = 227 * 1024
_INVALID_HANDLE = "cudaErrorInvalidResourceHandle: the stream is of another device"
_CAPTURING = "cudaErrorStreamCaptureUnsupported"

Work = Callable[[], object]


class OutOfMemoryError(MemoryError):
    """What CuPy's pool raises."""


class CUDARuntimeError(RuntimeError):
    """What CUDA's calls raise."""


class Memory:
    """Counts of one device's memory and of pinned memory, in bytes."""

    def __init__(self, total_bytes: int) -> None:
        self.total = total_bytes
        self.used = 0
        """In arrays that are alive."""
        self.cached = 0
        """Freed, but held by the pool."""
        self.pinned = 0
        self.num_allocations = 0
        self.fail_at: int | None = None
        """The allocation, counted by num_allocations, that finds no memory; None: none does."""

    def take(self, nbytes: int) -> None:
        """Of what the pool holds, or of the device's. Raises OutOfMemoryError."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self.is_refused() or self.used + size > self.total:
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes")
        self.cached = min(max(self.cached - size, 0), self.total - self.used - size)
        self.used += size

    def is_refused(self) -> bool:
        """Count an allocation; whether it is the one to fail."""
        self.num_allocations += 1
        return self.num_allocations - 1 == self.fail_at

    def give(self, nbytes: int) -> None:
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.used -= size
        self.cached += size


class Array(np.ndarray[Any, Any]):
    """An array on the device."""

    stand_in: CupyStandIn

    def __new__(cls, shape: Any, dtype: Any, memory: npt.NDArray[np.uint8]) -> Array:
        return super().__new__(cls, shape, dtype, memory)

    def set(self, source: npt.NDArray[Any], stream: Stream) -> None:
        """As CuPy's: of the same shape and type; later if the source is pinned."""
        assert type(source) is np.ndarray, f"{type(source)} is not on the host"
        if source.dtype != self.dtype or source.shape != self.shape:
            raise TypeError(f"{source.dtype}{source.shape} is set to {self.dtype}{self.shape}")
        assert source.flags.c_contiguous
        assert self.flags.c_contiguous
        if self.stand_in.is_pinned(source):
            # CuPy makes the array's device current meanwhile.
            with stream.device:
                stream.submit(lambda: np.copyto(self, source))
        else:
            stream.synchronize()
            np.copyto(self, source)

    def get(self, *, stream: Stream, out: npt.NDArray[Any], blocking: bool) -> npt.NDArray[Any]:
        """As CuPy's, to memory that is pinned; later unless it shall block."""
        if out.dtype != self.dtype or out.shape != self.shape:
            raise TypeError(f"{self.dtype}{self.shape} does not go to {out.dtype}{out.shape}")
        assert out.flags.c_contiguous
        assert self.flags.c_contiguous
        assert self.stand_in.is_pinned(out)
        with stream.device:
            stream.submit(lambda: np.copyto(out, np.array(self, subok=False)))
        if blocking:
            stream.synchronize()
        return out


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._place = stream.num_submitted

    def synchronize(self) -> None:
        self._stream.run_until(self._place)


class Graph:
    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def launch(self, stream: Stream) -> None:
        for work in self._works:
            stream.submit(work)


class Stream:
    """Work in order, none of it before it is waited for."""

    ptr = 0

    def __init__(self, stand_in: CupyStandIn) -> None:
        self._stand_in = stand_in
        self.device = Device(stand_in, None)
        self._queue: list[Work] = []
        self._captured: list[Work] | None = None
        self.num_submitted = 0
        self.num_run = 0

    def submit(self, work: Work) -> None:
        if self._stand_in.device_id != self.device.id:
            raise CUDARuntimeError(_INVALID_HANDLE)
        if self._captured is not None:
            self._captured.append(work)
            return
        self._queue.append(work)
        self.num_submitted += 1

    def run_until(self, place: int) -> None:
        if self._captured is not None:
            raise CUDARuntimeError(_CAPTURING)
        while self.num_run < place:
            self.num_run += 1
            self._queue.pop(0)()

    def synchronize(self) -> None:
        self.run_until(self.num_submitted)

    def record(self) -> Event:
        if self._stand_in.device_id != self.device.id:
            raise CUDARuntimeError(_INVALID_HANDLE)
        return Event(self)

    def begin_capture(self) -> None:
        assert self._captured is None
        self._captured = []

    def end_capture(self) -> Graph:
        assert self._captured is not None
        graph = Graph(self._captured)
        self._captured = None
        return graph

    def __enter__(self) -> None:
        if self._stand_in.device_id != self.device.id:
            raise CUDARuntimeError(_INVALID_HANDLE)

    def __exit__(self, *_: object) -> None:
        pass


class Device:
    def __init__(self, stand_in: CupyStandIn, device_id: int | None) -> None:
        self._stand_in = stand_in
        self.id = stand_in.device_id if device_id is None else device_id
        self.compute_capability = "90"
        self.attributes = {"MultiProcessorCount": 4}
        self._before: list[int] = []

    def use(self) -> None:
        self._stand_in.device_id = self.id

    def __enter__(self) -> None:
        self._before.append(self._stand_in.device_id)
        self._stand_in.device_id = self.id

    def __exit__(self, *_: object) -> None:
        self._stand_in.device_id = self._before.pop()


class _PinnedMemory:
    """Pinned memory of exactly that size."""

    def __init__(self, stand_in: CupyStandIn, nbytes: int) -> None:
        self.buffer = stand_in.new_pinned(nbytes)

    def __int__(self) -> int:
        return int(self.buffer.ctypes.data)


class _RawKernel:
    """A kernel that is compiled for the host when it is first launched."""

    def __init__(self, loader: Loader, source: str, name: str) -> None:
        self._loader = loader
        self._source = source
        self._name = name
        self._function: Function | None = None
        self.max_dynamic_shared_size_bytes = 0

    def __call__(
        self, grid: Any, block: Any, args: Any, *, shared_mem: int, stream: Stream
    ) -> None:
        if self._function is None:
            sizes = {self._name: self.max_dynamic_shared_size_bytes}
            self._function = self._loader.load(self._source, [self._name], max_shared_mem=sizes)[
                self._name
            ]
        function = self._function
        stream.submit(lambda: function(grid, block, args, shared_mem=shared_mem))


class CupyStandIn:
    """In place of the module `cupy`; without a loader it has no kernels."""

    def __init__(
        self, loader: Loader | None = None, *, total_bytes: int = 1 << 30, num_devices: int = 1
    ) -> None:
        self._loader = loader
        self._thread = threading.local()
        self._pinned: dict[int, int] = {}
        self.memory = [Memory(total_bytes) for _ in range(num_devices)]
        self.cuda = SimpleNamespace(
            Device=lambda device_id=None: Device(self, device_id),
            Stream=lambda non_blocking: Stream(self),
            PinnedMemory=lambda nbytes: _PinnedMemory(self, nbytes),
            PinnedMemoryPointer=lambda memory, offset: memory.buffer,
            UnownedMemory=lambda address, nbytes, owner, device_id: owner.buffer,
            MemoryPointer=lambda memory, offset: memory,
            runtime=SimpleNamespace(
                memGetInfo=self._mem_get_info, CUDARuntimeError=CUDARuntimeError
            ),
        )
        self.ndarray: type[Array] = type("ndarray", (Array,), {"stand_in": self})

    @property
    def device_id(self) -> int:
        """Of the calling thread's current device; threads begin with 0."""
        return getattr(self._thread, "device_id", 0)

    @device_id.setter
    def device_id(self, device_id: int) -> None:
        self._thread.device_id = device_id

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Poisoned: NaN, or the largest integer."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = self.memory[self.device_id]
        memory.take(nbytes)
        buffer = _aligned(nbytes, lambda: memory.give(nbytes))
        array = self.ndarray(shape, dtype, buffer)
        array[...] = np.iinfo(dtype).max if dtype.kind in "iu" else np.nan
        return array

    def asnumpy(self, array: Array, stream: Stream) -> npt.NDArray[Any]:
        stream.synchronize()
        return np.array(array, subok=False)

    def RawModule(self, *, code: str, options: tuple[str, ...], backend: str) -> Any:
        loader = self._loader
        assert loader is not None, "there is nobody to compile for"
        return SimpleNamespace(get_function=lambda name: _RawKernel(loader, code, name))

    def get_default_memory_pool(self) -> Any:
        memory = self.memory[self.device_id]

        def free_all_blocks() -> None:
            memory.cached = 0

        return SimpleNamespace(free_all_blocks=free_all_blocks)

    def get_default_pinned_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: None)

    def new_pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        memory = self.memory[0]
        if memory.is_refused():
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        memory.pinned += nbytes

        def free() -> None:
            memory.pinned -= nbytes
            del self._pinned[address]

        buffer = _aligned(nbytes, free)
        buffer[...] = 0xFF
        address = int(buffer.ctypes.data)
        self._pinned[address] = nbytes
        return buffer

    def is_pinned(self, array: npt.NDArray[Any]) -> bool:
        address = int(array.ctypes.data)
        return any(
            start <= address and address + array.nbytes <= start + nbytes
            for start, nbytes in self._pinned.items()
        )

    def _mem_get_info(self) -> tuple[int, int]:
        memory = self.memory[self.device_id]
        return memory.total - memory.used - memory.cached, memory.total


class SimulatedCudaDevice(CudaDevice):
    """gpu/device.py's device over a stand-in; kernels in Numba-CUDA run in Numba's simulator."""

    def __init__(self, stand_in: CupyStandIn) -> None:
        super().__init__(stand_in)
        self.stand_in = stand_in

    def in_order(self, work: Work) -> None:
        """Do something on the host when everything queued before is done."""
        self._stream.submit(work)

    def jit(self, kernel: Callable[..., None]) -> Function:
        """Numba's simulator takes an OS thread for each of CUDA's, so there is only one."""
        function = super().jit(kernel)

        def alone(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: tuple[Any, ...],
            *,
            shared_mem: int = 0,
        ) -> None:
            self._stream.submit(lambda: function((1,), (1,), args, shared_mem=shared_mem))

        return alone


def _aligned(nbytes: int, free: Callable[[], None]) -> npt.NDArray[np.uint8]:
    """Bytes; `free` is called when the last view of them has gone."""
    whole = np.empty(nbytes + _ALIGNMENT, np.uint8)
    weakref.finalize(whole, free)
    start = -int(whole.ctypes.data) % _ALIGNMENT
    return whole[start : start + nbytes]
