"""Where recorded calls are made: the CPU, a GPU, or kernels under the checker on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numba

from bench import op_cases
from bench.gpu.sizes import FULL
from bench.gpu.target import GpuTarget, SimulatedTarget, Target
from bench.gpu.timing import cold_copies, copy_bandwidth, time_device, time_queued
from bench.machine import usable_cores
from bench.probes import measure_peaks
from bench.timing import Timing, time_calls
from rawpaged.backend import Backend
from rawpaged.devices import open_backend
from rawpaged.errors import BackendError

DeviceName = Literal["cpu", "cuda", "simulator"]
DEVICE_NAMES: tuple[DeviceName, ...] = ("cpu", "cuda", "simulator")

_COPIES_OF_HOST_ARRAYS = ("sample", "token_logprobs", "edit_logits", "copy_blocks")
"""Ops that bring arrays to the device or back, which a captured graph cannot."""


class Place(Protocol):
    """A backend, how to time its ops, and what they are held against."""

    backend: Backend
    parameters: Mapping[str, object]
    """Device, type, threads: what goes into every row."""
    bandwidth_name: str
    """What its bandwidth is of."""
    bytes_per_s: float | None
    flops_per_s: float | None

    def cold_copies(self, num_bytes: int) -> int:
        """Copies of operands that together exceed the caches."""
        ...

    def time(self, op: str, calls: Sequence[Callable[[], object]], seconds: float) -> Timing: ...
    def close(self) -> None: ...


class CpuPlace:
    """The CPU backend; `measures`: with the machine's peaks, which takes a second."""

    bandwidth_name = "read"

    def __init__(
        self,
        *,
        dtype: str,
        kv_cache_dtype: str | None = None,
        threads: int | None,
        measures: bool,
    ) -> None:
        count = threads or usable_cores()
        peaks = measure_peaks(count) if measures else None
        self.bytes_per_s = peaks.read_bytes_per_s if peaks else None
        self.flops_per_s = peaks.flops_per_s[op_cases.product_of(dtype)] if peaks else None
        self.backend: Backend = open_backend(
            "cpu", dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_threads=count
        )
        self.parameters: Mapping[str, object] = {
            "device": "cpu",
            "dtype": dtype,
            "kv_cache_dtype": self.backend.kv_cache_dtype,
            "threads": count,
        }

    def cold_copies(self, num_bytes: int) -> int:
        return op_cases.cold_copies(max(num_bytes, 1))

    def time(self, op: str, calls: Sequence[Callable[[], object]], seconds: float) -> Timing:
        return time_calls(calls, seconds)

    def close(self) -> None:
        self.backend.close()


class DevicePlace:
    """The CUDA backend on a GPU, or on the host device of the tests.

    Times are the device's; ops that copy from and to the host are timed with these copies.
    """

    bandwidth_name = "copy"

    def __init__(
        self, target: Target, *, dtype: str, kv_cache_dtype: str | None = None, measures: bool
    ) -> None:
        # Imported here, for it needs numba-cuda, which the CPU has no use for.
        from rawpaged.gpu.backend import CudaBackend

        self._target = target
        self.backend: Backend = CudaBackend(
            target.device, dtype=dtype, kv_cache_dtype=kv_cache_dtype
        )
        self.bytes_per_s = self.flops_per_s = None
        if measures and not target.is_simulated:
            _, self.bytes_per_s = copy_bandwidth(target, FULL.copy_bytes, FULL.seconds)
            self.flops_per_s = target.flops_per_s
        name = "simulator" if target.is_simulated else "cuda"
        self.parameters: Mapping[str, object] = {
            "device": name,
            "dtype": dtype,
            "kv_cache_dtype": self.backend.kv_cache_dtype,
            **target.describe(),
        }

    def cold_copies(self, num_bytes: int) -> int:
        return cold_copies(self._target, num_bytes)

    def time(self, op: str, calls: Sequence[Callable[[], object]], seconds: float) -> Timing:
        time = time_queued if op in _COPIES_OF_HOST_ARRAYS else time_device
        return time(self._target, calls, seconds)

    def close(self) -> None:
        self.backend.close()


def open_place(
    name: str,
    *,
    dtype: str,
    kv_cache_dtype: str | None = None,
    threads: int | None = None,
    measures: bool,
) -> Place:
    """The place of a name of DEVICE_NAMES; raises BackendError where the device is not there.

    kv_cache_dtype is "fp8_e4m3", "int8", or None for that of the weights.
    """
    if name == "cpu":
        return CpuPlace(
            dtype=dtype, kv_cache_dtype=kv_cache_dtype, threads=threads, measures=measures
        )
    if name == "cuda":
        return DevicePlace(
            GpuTarget(), dtype=dtype, kv_cache_dtype=kv_cache_dtype, measures=measures
        )
    config: Any = numba.config
    if not config.ENABLE_CUDASIM:
        raise BackendError("the simulator needs the environment variable NUMBA_ENABLE_CUDASIM=1")
    return DevicePlace(
        SimulatedTarget("check"), dtype=dtype, kv_cache_dtype=kv_cache_dtype, measures=measures
    )


def shares(place: Place, num_bytes: float, num_flops: float) -> dict[str, Any]:
    """What of a place's peaks a second's bytes and products are; None where it is not known."""
    return {
        "bandwidth_share": num_bytes / place.bytes_per_s if place.bytes_per_s else None,
        "peak_share": num_flops / place.flops_per_s if place.flops_per_s else None,
    }
