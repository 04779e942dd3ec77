"""What the GPU suite runs on: CuPy's device, or the tests' host device in its place.

The host device runs the same code on machines without a GPU, so that the suite is known to reach
its end; its times mean nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from rawpaged.gpu.device import CudaDevice, Device

_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "numba-cuda", "nvidia-cuda-nvrtc", "torch")
_QUERY = ("name", "driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
_FLOPS_A_CYCLE = {80: 2048, 86: 512, 89: 512, 90: 4096, 100: 8192, 120: 512}
"""Of an SM: what data sheets say of A100, RTX 3090, RTX 4090, H100, B200 and RTX 5090, with float32
sums and without sparsity, by SMs and clock. Professional cards of 86 and 89 have twice that."""
_CHUNK_ELEMENTS = 1_500_008
"""No power of two: an index that has lost its upper bits must not meet the same values."""


class Target(Protocol):
    """A device, and what timing it takes beside the Device that the backend uses."""

    device: Device
    is_simulated: bool

    @property
    def cache_bytes(self) -> int:
        """Of the last-level cache, which operands have to exceed to come from memory."""
        ...

    @property
    def block_shared_bytes(self) -> int:
        """The most shared memory that a block may ask for."""
        ...

    @property
    def flops_per_s(self) -> float | None:
        """Of the tensor cores, 16-bit with float32 sums, at the highest clock; None: not known."""
        ...

    def describe(self) -> dict[str, object]:
        """The device and the versions, as they go into every row."""
        ...

    def copy(self, to: Any, source: Any) -> None:
        """Copy an array to one of the same size, in order with the launches."""
        ...

    def seconds(self, work: Callable[[], None]) -> float:
        """Between the start and the end of queued work, on the device's own clock."""
        ...


class GpuTarget:
    """CuPy's current device. Raises BackendError where there is none.

    Without `memory_pool` every array is an allocation of its own, so that compute-sanitizer sees
    accesses that leave it.
    """

    is_simulated = False

    def __init__(self, *, memory_pool: bool = True) -> None:
        self.device: Device = CudaDevice()
        # Imported by CudaDevice, which says how to install it.
        import cupy

        if not memory_pool:
            cupy.cuda.set_allocator(None)
        self._cupy: Any = cupy
        self._runtime: Any = cupy.cuda.runtime

    @property
    def cache_bytes(self) -> int:
        return int(self._cupy.cuda.Device().attributes["L2CacheSize"])

    @property
    def block_shared_bytes(self) -> int:
        return int(self._cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])

    @property
    def flops_per_s(self) -> float | None:
        kilohertz = int(self._cupy.cuda.Device().attributes["ClockRate"])
        return tensor_flops_per_s(
            self.device.compute_capability, self.device.num_multiprocessors, 1e3 * kilohertz
        )

    def describe(self) -> dict[str, object]:
        properties = self._runtime.getDeviceProperties(self._cupy.cuda.Device().id)
        return {
            "name": properties["name"].decode(),
            "sm": self.device.compute_capability,
            "multiprocessors": self.device.num_multiprocessors,
            "memory_bytes": int(properties["totalGlobalMem"]),
            "cache_bytes": self.cache_bytes,
            "cuda_driver": self._runtime.driverGetVersion(),
            "cuda_runtime": self._runtime.runtimeGetVersion(),
            "nvidia_smi": _nvidia_smi(),
            **{name: _version(name) for name in _PACKAGES},
        }

    def copy(self, to: Any, source: Any) -> None:
        assert to.nbytes == source.nbytes, f"{to.nbytes=} {source.nbytes=}"
        kind = self._runtime.memcpyDefault  # either may be pinned memory of the host's
        stream = self.device.stream
        self._runtime.memcpyAsync(to.data.ptr, source.data.ptr, to.nbytes, kind, stream)

    def seconds(self, work: Callable[[], None]) -> float:
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        stream = self.device.stream
        self._runtime.eventRecord(begin.ptr, stream)
        work()
        self._runtime.eventRecord(end.ptr, stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3


class SimulatedTarget:
    """The host device of the tests. Raises MissingToolError without g++ and the CUDA headers."""

    is_simulated = True
    cache_bytes = 1 << 12
    flops_per_s: float | None = None
    block_shared_bytes = 227 * 1024

    def __init__(self, mode: Literal["check", "plain"] = "plain") -> None:
        from tests.hostsim.device import HostDevice
        from tests.hostsim.loader import HostLoader

        self.device: Device = HostDevice(HostLoader(mode=mode))

    def describe(self) -> dict[str, object]:
        return {
            "name": "simulator",
            "sm": self.device.compute_capability,
            "multiprocessors": self.device.num_multiprocessors,
            **{name: _version(name) for name in _PACKAGES},
        }

    def copy(self, to: Any, source: Any) -> None:
        to[...] = source

    def seconds(self, work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started


def tensor_flops_per_s(sm: int, num_sms: int, hertz: float) -> float | None:
    """Dense 16-bit products with float32 sums of all tensor cores; None for an unknown sm."""
    a_cycle = _FLOPS_A_CYCLE.get(sm)
    return None if a_cycle is None else a_cycle * num_sms * hertz


def has_gpu() -> bool:
    """Whether CuPy is installed and finds a device."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


def fill(target: Target, array: Any, values: npt.NDArray[Any]) -> None:
    """Write `values`, of the array's dtype, over and over into a contiguous array on the device."""
    flat = array.reshape((-1,))
    size = flat.shape[0]
    host = np.resize(values.reshape(-1), min(size, _CHUNK_ELEMENTS))
    chunk = target.device.upload(host)
    for start in range(0, size, len(host)):
        part = flat[start : start + len(host)]
        target.copy(part, chunk[: part.shape[0]])
    # The chunk is given back when this returns.
    target.device.synchronize()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> str | None:
    """Clocks and limits as the driver's own tool prints them; None where it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
