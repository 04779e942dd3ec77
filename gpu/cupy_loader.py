"""Compiles kernels with CuPy's NVRTC.

CuPy keeps compiled modules on disk under a key made of source text and options, not of included
files; so the text of the headers goes into an option. `-lineinfo` lets profilers show source lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from rawpaged.gpu.arguments import SCALAR_TYPES
from rawpaged.gpu.arrays import array_info
from rawpaged.gpu.module import KERNEL_PACKAGE, PLAIN_SHARED_BYTES, Function

BASE_OPTIONS = ("-std=c++17", "-lineinfo", "-default-device")


def compile_options(include: Path, headers: str) -> tuple[str, ...]:
    """Options of every kernel; `headers` is the text of all header files."""
    digest = hashlib.blake2b(headers.encode(), digest_size=8).hexdigest()
    return (*BASE_OPTIONS, f"-I{include}", f"-DHEADERS_{digest}")


def header_text(include: Path) -> str:
    """All headers in the folder, in the order of their names."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(include.glob("*.cuh")))


class _StreamFunction:
    """A kernel that is launched on one stream, with arrays of any library on a GPU."""

    def __init__(self, raw: Any, stream: Any, own_type: type[Any]) -> None:
        self._raw = raw
        self._stream = stream
        self._own_type = own_type
        self._types = frozenset((own_type, *SCALAR_TYPES.values()))

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        types = self._types
        own = tuple([arg if type(arg) in types else self._as_own(arg) for arg in args])
        self._raw(grid, block, own, shared_mem=shared_mem, stream=self._stream)

    def _as_own(self, arg: Any) -> Any:
        """CuPy takes no arrays but its own; to a kernel they are addresses.

        Raises TypeError for arrays on the host, whose addresses a GPU must not follow.
        """
        if isinstance(arg, (self._own_type, np.generic)):
            return arg
        if not hasattr(arg, "__cuda_array_interface__"):
            raise TypeError(f"a {type(arg).__name__} has no __cuda_array_interface__")
        return np.uintp(array_info(arg).pointer)


class CupyLoader:
    """A Loader for the current device whose functions run on `stream`.

    None is whatever stream of CuPy's is current at a launch.
    """

    def __init__(self, cupy: Any, stream: Any = None) -> None:
        self._cupy = cupy
        self._stream = stream
        include = resources.files(KERNEL_PACKAGE)
        # RawModule hands the folder to NVRTC, so it has to be one on disk.
        assert isinstance(include, Path), f"{include} is not a folder"
        self._options = compile_options(include, header_text(include))

    def load(
        self, source: str, names: Sequence[str], *, max_shared_mem: Mapping[str, int]
    ) -> dict[str, Function]:
        """The `extern "C"` kernels of `source` by name, compiled or out of CuPy's cache."""
        module = self._cupy.RawModule(code=source, options=self._options, backend="nvrtc")
        functions: dict[str, Function] = {}
        for name in names:
            function = module.get_function(name)
            if max_shared_mem[name] > PLAIN_SHARED_BYTES:
                function.max_dynamic_shared_size_bytes = max_shared_mem[name]
            functions[name] = _StreamFunction(function, self._stream, self._cupy.ndarray)
        return functions
