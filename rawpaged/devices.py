"""The only module that names a device; imports its backend when it is asked for."""

from __future__ import annotations

from rawpaged.backend import Backend
from rawpaged.errors import ConfigError


def open_backend(
    device: str,
    *,
    dtype: str,
    kv_cache_dtype: str | None = None,
    num_threads: int | None = None,
) -> Backend:
    """The backend of `device` for weights of `dtype`; num_threads is the CPU's.

    kv_cache_dtype is "fp8_e4m3", "int8", or None for that of the weights. The caller owns the
    backend and calls `close()`. Raises BackendError when the device is not there.
    """
    if device == "cpu":
        from rawpaged.cpu.backend import CpuBackend

        return CpuBackend(dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_threads=num_threads)
    if device == "cuda":
        from rawpaged.gpu.device import CudaDevice

        opened = CudaDevice()  # fails where there is no GPU, before kernels are looked at
        from rawpaged.gpu.backend import CudaBackend

        return CudaBackend(opened, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    raise ConfigError(f"device={device!r} is not one of cpu, cuda")
