"""The only module that names a device; imports its backend when it is asked for."""

from __future__ import annotations

from rawpaged.backend import Backend
from rawpaged.errors import ConfigError


def open_backend(device: str, *, dtype: str, num_threads: int | None = None) -> Backend:
    """The backend of `device` for weights of `dtype` ("bfloat16" or "float32").

    The caller owns it and calls `close()`.
    """
    if device == "cpu":
        from rawpaged.cpu.backend import CpuBackend

        return CpuBackend(dtype=dtype, num_threads=num_threads)
    raise ConfigError(f"device={device!r} is not supported; this version has: cpu")
