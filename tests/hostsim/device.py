"""A Device whose memory is the host's and whose kernels run in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.gpu.device import numpy_dtype
from rawpaged.gpu.module import Function, Loader
from rawpaged.gpu.staging import Event
from rawpaged.tracing import RangeSink


class HostDevice:
    """Arrays are NumPy's, and NaN or huge integers where nothing was written.

    `capture` records launches, and replays them: what a CUDA graph does.
    """

    def __init__(self, loader: Loader, *, compute_capability: int = 90) -> None:
        self.compute_capability = compute_capability
        self.num_multiprocessors = 4
        self.stream = 0
        self._recorder = _Recorder(loader)

    @property
    def loader(self) -> Loader:
        return self._recorder

    def use(self) -> None:
        """There is only one."""

    def jit(self, kernel: Callable[..., None]) -> Function:
        """Numba's simulator takes an OS thread for each of CUDA's, so there is only one."""
        from rawpaged.gpu.numba_launch import NumbaFunction

        function = NumbaFunction(kernel, self.stream)

        def alone(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: tuple[Any, ...],
            *,
            shared_mem: int = 0,
        ) -> None:
            function((1,), (1,), args, shared_mem=shared_mem)

        return self._recorder.noted(alone)

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        array = np.empty(shape, numpy_dtype(dtype))
        if array.dtype.kind in "iu":
            array[...] = np.iinfo(array.dtype).max
        else:
            array[...] = np.nan
        return array

    def pinned(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return self.empty(shape, dtype)

    def pinned_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.full(nbytes, 0xFF, np.uint8)

    def fetch(self, pinned: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
        assert pinned.dtype == array.dtype
        np.copyto(pinned, array)

    def record(self) -> Event:
        return _Done()

    def upload(self, array: npt.NDArray[Any], dtype: str | None = None) -> npt.NDArray[Any]:
        return np.array(array, None if dtype is None else numpy_dtype(dtype))

    def write(self, target: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
        target[...] = array

    def download(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.array(array)

    def synchronize(self) -> None:
        """Launches are over when they return."""

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        return self._recorder.record(launches)

    def memory_info(self) -> tuple[int, int]:
        return 2**30, 2**31

    def profiler_start(self) -> RangeSink | None:
        return None

    def profiler_stop(self) -> None:
        """There is no profiler."""

    def release_unused(self) -> None:
        """Memory goes with its arrays."""

    def close(self) -> None:
        """Memory goes with its arrays."""


class _Done:
    """An event of a device whose work is over when it has been queued."""

    def synchronize(self) -> None:
        pass


class _Recorder:
    """A Loader whose functions are noted down instead of run while `record` runs."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._recording: list[Callable[[], None]] | None = None

    def load(
        self, source: str, names: Sequence[str], *, max_shared_mem: Mapping[str, int]
    ) -> dict[str, Function]:
        functions = self._loader.load(source, names, max_shared_mem=max_shared_mem)
        return {name: self.noted(function) for name, function in functions.items()}

    def record(self, launches: Callable[[], None]) -> Callable[[], None]:
        assert self._recording is None, "one capture at a time"
        noted: list[Callable[[], None]] = []
        self._recording = noted
        try:
            launches()
        finally:
            self._recording = None

        def replay() -> None:
            for launch in noted:
                launch()

        return replay

    def noted(self, function: Function) -> Function:
        def call(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: tuple[Any, ...],
            *,
            shared_mem: int = 0,
        ) -> None:
            if self._recording is None:
                function(grid, block, args, shared_mem=shared_mem)
            else:
                self._recording.append(lambda: function(grid, block, args, shared_mem=shared_mem))

        return call
