"""Memory, copies, streams and graphs: all that the backend needs of a device beside kernels.

`CudaDevice` is CuPy's current device. The tests have another Device that keeps arrays on the host
and runs kernels in a simulator, so that everything above this module runs without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawpaged.errors import BackendError
from rawpaged.gpu.module import Function, Loader
from rawpaged.gpu.profiler import CudaProfiler
from rawpaged.gpu.staging import Event, Staging
from rawpaged.tracing import RangeSink

_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of an element type's name, bfloat16 and float8_e4m3fn among them."""
    return _DTYPES.get(name) or np.dtype(name)


class Device(Protocol):
    """Where arrays live and kernels run; everything is ordered on one stream."""

    @property
    def loader(self) -> Loader: ...
    @property
    def compute_capability(self) -> int:
        """90 for sm_90."""
        ...

    @property
    def num_multiprocessors(self) -> int: ...
    @property
    def stream(self) -> Any:
        """The stream's address for launches that take one; 0 on the host."""
        ...

    def use(self) -> None:
        """Make it the calling thread's device: launches need that, allocations and copies not."""
        ...

    def jit(self, kernel: Callable[..., None]) -> Function:
        """A kernel of gpu/numba_kernels.py, in order with the loader's."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any: ...
    def pinned(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array in pinned host memory that kernels read and write as if it were the device's."""
        ...

    def pinned_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Pinned memory as the host sees it."""
        ...

    def fetch(self, pinned: npt.NDArray[Any], array: Any) -> None:
        """Queue a copy of a contiguous device array to pinned memory of its type and shape.

        It is there after an event that is recorded afterwards.
        """
        ...

    def record(self) -> Event:
        """An event behind everything queued so far."""
        ...

    def upload(self, array: npt.NDArray[Any], dtype: str | None = None) -> Any:
        """A copy on the device, rounded to `dtype` if that is given.

        The caller may change the original afterwards.
        """
        ...

    def write(self, target: Any, array: npt.NDArray[Any]) -> None:
        """Copy into a contiguous device array, in order with the launches before and after.

        The caller may change the original afterwards.
        """
        ...

    def download(self, array: Any) -> npt.NDArray[Any]:
        """A copy on the host, after everything queued before."""
        ...

    def synchronize(self) -> None: ...
    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        """A callable that repeats the launches over the same arrays; they do not run now."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(available, total) bytes."""
        ...

    def profiler_start(self) -> RangeSink | None:
        """Turn an attached profiler on; takes the ranges it shall show."""
        ...

    def profiler_stop(self) -> None:
        """Turn it off, after everything queued before."""
        ...

    def release_unused(self) -> None:
        """Give memory that no array uses back to the driver."""
        ...

    def close(self) -> None:
        """Wait for the stream, and give back all memory that nothing uses."""
        ...


class CudaDevice:
    """CuPy's current device with a stream of its own. Raises BackendError if there is none.

    Every thread has a current device of its own, which is device 0 at first: other threads than the
    one that made this call `use` before they launch.

    `cupy` may be something that does as CuPy does; None is CuPy itself.
    """

    def __init__(self, cupy: Any = None) -> None:
        self._cupy = _import_cupy() if cupy is None else cupy
        from rawpaged.gpu.cupy_loader import CupyLoader

        self._device = self._cupy.cuda.Device()
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._profiler = CudaProfiler(self._cupy)
        self._staging = Staging(self)
        self.loader: Loader = CupyLoader(self._cupy, self._stream)

    @property
    def compute_capability(self) -> int:
        return int(self._device.compute_capability)

    @property
    def num_multiprocessors(self) -> int:
        return int(self._device.attributes["MultiProcessorCount"])

    @property
    def stream(self) -> Any:
        return self._stream.ptr

    def use(self) -> None:
        self._device.use()

    def jit(self, kernel: Callable[..., None]) -> Function:
        from rawpaged.gpu.numba_launch import NumbaFunction

        return NumbaFunction(kernel, self._stream.ptr)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        with self._device, self._stream:
            return self._cupy.empty(shape, numpy_dtype(dtype))

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Any:
        element = numpy_dtype(dtype)
        nbytes = math.prod(shape) * element.itemsize
        cuda, memory = self._cupy.cuda, self._pinned_memory(nbytes)
        with self._device:
            # It has one address for host and device, as addressing is unified on 64-bit systems.
            unowned = cuda.UnownedMemory(int(memory), nbytes, memory, self._device.id)
            return self._cupy.ndarray(shape, element, cuda.MemoryPointer(unowned, 0))

    def upload(self, array: npt.NDArray[Any], dtype: str | None = None) -> Any:
        target = self.empty(array.shape, dtype or array.dtype.name)
        self._staging.copy(target, array)
        return target

    def pinned_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        pinned = self._cupy.cuda.PinnedMemoryPointer(self._pinned_memory(nbytes), 0)
        return np.frombuffer(pinned, np.uint8, nbytes)

    def _pinned_memory(self, nbytes: int) -> Any:
        """Raises MemoryError as the pools do, where CUDA has an error of its own.

        Not alloc_pinned_memory: its pool rounds up to a power of two and keeps what is freed.
        """
        cuda = self._cupy.cuda
        try:
            with self._device:
                return cuda.PinnedMemory(nbytes)
        except cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{nbytes} bytes of pinned host memory: {error}") from error

    def copy_async(self, target: Any, pinned: npt.NDArray[Any]) -> None:
        """Queue a copy of pinned memory to the device, which fetches it later."""
        target.set(pinned, stream=self._stream)

    def fetch(self, pinned: npt.NDArray[Any], array: Any) -> None:
        with self._device:
            array.get(stream=self._stream, out=pinned, blocking=False)

    def record(self) -> Event:
        with self._device:
            event: Event = self._stream.record()
        return event

    def write(self, target: Any, array: npt.NDArray[Any]) -> None:
        self._staging.copy(target, array)

    def download(self, array: Any) -> npt.NDArray[Any]:
        with self._device:
            host: npt.NDArray[Any] = self._cupy.asnumpy(array, stream=self._stream)
        self._stream.synchronize()
        return host

    def synchronize(self) -> None:
        self._stream.synchronize()

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        with self._device, self._stream:
            self._stream.begin_capture()
            try:
                launches()
            finally:
                graph = self._stream.end_capture()

        def replay() -> None:
            graph.launch(stream=self._stream)

        return replay

    def memory_info(self) -> tuple[int, int]:
        with self._device:
            available, total = self._cupy.cuda.runtime.memGetInfo()
        return int(available), int(total)

    def profiler_start(self) -> RangeSink | None:
        # What was queued before the profile is not part of it.
        self._stream.synchronize()
        with self._device:
            return self._profiler.start()

    def profiler_stop(self) -> None:
        self._stream.synchronize()
        with self._device:
            self._profiler.stop()

    def release_unused(self) -> None:
        self._staging.close()
        self._stream.synchronize()
        with self._device:
            self._cupy.get_default_memory_pool().free_all_blocks()
            self._cupy.get_default_pinned_memory_pool().free_all_blocks()

    def close(self) -> None:
        self.release_unused()


def _import_cupy() -> Any:
    """CuPy with at least one device behind it."""
    try:
        import cupy
    except ImportError as error:
        raise BackendError(
            "device='cuda' needs CuPy: pip install 'rawpaged[cuda13]' or 'rawpaged[cuda12]'"
        ) from error
    if not cupy.cuda.is_available():
        raise BackendError("device='cuda': CuPy finds no CUDA device or no driver")
    return cupy
