"""Runs CUDA kernels on the host: a Loader whose device memory is NumPy arrays.

A launch takes what a CuPy launch takes, returns when the grid is done, and raises HostSimError at
the first thing that a kernel may not do. docs/simulator.md says what that is.
"""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rawpaged.gpu.module import Function, Parameter
from tests.hostsim.build import Builder, Mode

Order = Literal["forward", "reverse", "random"]
_ORDERS: dict[Order, int] = {"forward": 0, "reverse": 1, "random": 2}
_SCALARS: dict[str, type[np.generic]] = {
    "int": np.int32,
    "unsigned": np.uint32,
    "long long": np.int64,
    "float": np.float32,
}
_MAX_THREADS = 1024
_MAX_BLOCK = (1024, 1024, 64)
_MAX_GRID = (2**31 - 1, 65535, 65535)
_PLAIN_SHARED_BYTES = 48 * 1024
_MAX_SHARED_BYTES = 227 * 1024
"""Of one block, from compute capability 9.0 on."""
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\(([^)]*)\)\s*)?(\w+)\s*\(([^)]*)\)'
)


class HostSimError(RuntimeError):
    """A kernel did what it may not do. `kind` names the fault; `file` and `line` say where."""

    def __init__(self, kernel: str, kind: str, file: str, line: int, message: str) -> None:
        super().__init__(f"{kernel}: {kind} at {file}:{line}: {message}")
        self.kernel = kernel
        self.kind = kind
        self.file = file
        self.line = line


@dataclass(frozen=True, slots=True)
class Signature:
    """What the text of a kernel says about its launches."""

    name: str
    parameters: tuple[Parameter, ...]
    max_threads: int


def parse_signatures(source: str) -> dict[str, Signature]:
    """The `extern "C"` kernels of a source text, by name."""
    signatures = {}
    for bounds, name, parameters in _KERNEL.findall(source):
        first = bounds.split(",")[0].strip()
        signatures[name] = Signature(
            name,
            tuple(_parse_parameter(text) for text in parameters.split(",") if text.strip()),
            int(first) if first.isdecimal() else _MAX_THREADS,
        )
    return signatures


def _parse_parameter(text: str) -> Parameter:
    match = re.fullmatch(r"\s*(.+?)\s*(\w+)\s*", text.replace("__restrict__", " "), re.DOTALL)
    assert match is not None, f"{text!r} is no C parameter"
    return Parameter(re.sub(r"\s*\*", "*", match[1]).strip(), match[2])


class _Dim(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint32) for axis in "xyz"]


class _Region(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
        ("regions", ctypes.POINTER(_Region)),
        ("num_regions", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64),
        ("shared_limit", ctypes.c_uint64),
        ("grid", _Dim),
        ("block", _Dim),
        ("order", ctypes.c_int32),
        ("preempt", ctypes.c_int32),
        ("count_traffic", ctypes.c_int32),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 768),
        ("file", ctypes.c_char * 256),
        ("line", ctypes.c_int32),
        ("thread_known", ctypes.c_int32),
        ("code_offset", ctypes.c_uint64),
        ("block", _Dim),
        ("thread", _Dim),
    ]


class _Library:
    """A compiled translation unit; one launch at a time, for its state is global."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self._library = ctypes.CDLL(str(path))
        self.launch = self._library.hostsim_launch
        self.launch.argtypes = [ctypes.POINTER(_Launch)]
        self.launch.restype = ctypes.POINTER(_Fault)

    def entry(self, kernel: str) -> int:
        address = ctypes.cast(self._library[f"hostsim_invoke_{kernel}"], ctypes.c_void_p).value
        assert address is not None
        return address

    def line_of(self, code_offset: int) -> tuple[str, int]:
        """File and line of the kernel's own text that a call returns to."""
        command = ["addr2line", "-i", "-e", str(self.path), hex(code_offset - 1)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = [text.split(" (")[0].rsplit(":", 1) for text in done.stdout.splitlines()]
        frames = [(Path(file).name, int(line)) for file, line in lines if line.isdecimal()]
        return next((frame for frame in frames if frame[0].endswith(".cu")), ("?", 0))


class HostFunction:
    """A kernel that runs on the host when called; arguments are NumPy arrays and scalars.

    Raises HostSimError for what the kernel does; TypeError and ValueError for what the call asks.
    """

    def __init__(
        self, library: _Library, signature: Signature, max_shared_mem: int, options: _Options
    ) -> None:
        self._library = library
        self._signature = signature
        self._options = options
        self._entry = library.entry(signature.name)
        self._shared_limit = (
            _MAX_SHARED_BYTES if max_shared_mem > _PLAIN_SHARED_BYTES else _PLAIN_SHARED_BYTES
        )
        self._max_dynamic = max(max_shared_mem, _PLAIN_SHARED_BYTES)

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        self._check_size(grid, block, shared_mem)
        values = self._scalars_and_pointers(args)
        regions = self._regions(args)
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        launch = _Launch(
            kernel=self._entry,
            args=pointers,
            regions=(_Region * len(regions))(*regions),
            num_regions=len(regions),
            seed=self._options.seed,
            shared_bytes=shared_mem,
            shared_limit=self._shared_limit,
            grid=_Dim(*grid, *(1,) * (3 - len(grid))),
            block=_Dim(*block, *(1,) * (3 - len(block))),
            order=_ORDERS[self._options.order],
            preempt=self._options.preempt,
        )
        with self._library.lock:
            fault = self._library.launch(ctypes.byref(launch))
            if fault:
                raise self._error(fault.contents)

    def _check_size(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int
    ) -> None:
        name = self._signature.name
        for what, dims, limits in (("grid", grid, _MAX_GRID), ("block", block, _MAX_BLOCK)):
            fits = all(0 < dim <= limit for dim, limit in zip(dims, limits, strict=False))
            if not 1 <= len(dims) <= 3 or not fits:
                raise ValueError(f"{name}: {what}={dims} must lie within {limits}, and be above 0")
        if math.prod(block) > self._signature.max_threads:
            raise ValueError(
                f"{name}: {block=} has more threads than the {self._signature.max_threads} "
                "it is compiled for"
            )
        if not 0 <= shared_mem <= min(self._max_dynamic, self._shared_limit):
            raise ValueError(f"{name}: {shared_mem=} is more than {self._max_dynamic} bytes")

    def _scalars_and_pointers(self, args: tuple[Any, ...]) -> list[np.ndarray[Any, Any]]:
        """Each argument's bytes, as a C call would take them."""
        name, parameters = self._signature.name, self._signature.parameters
        if len(args) != len(parameters):
            raise TypeError(f"{name} takes {len(parameters)} arguments, not {len(args)}")
        values = []
        for parameter, arg in zip(parameters, args, strict=True):
            if parameter.is_pointer:
                if not isinstance(arg, np.ndarray):
                    raise TypeError(f"{name}: {parameter.name} must be an array, not {arg!r}")
                values.append(np.array([arg.ctypes.data], np.uint64))
                continue
            scalar = _SCALARS[parameter.c_type]
            if not isinstance(arg, scalar):
                raise TypeError(
                    f"{name}: {parameter.name} must be a NumPy {scalar.__name__}, not {arg!r} "
                    f"of {type(arg).__name__}"
                )
            values.append(np.array([arg]))
        return values

    def _regions(self, args: tuple[Any, ...]) -> list[_Region]:
        """The bytes that may be accessed: of each array, from its first to its last."""
        regions = []
        for parameter, arg in zip(self._signature.parameters, args, strict=True):
            if not parameter.is_pointer or arg.size == 0:
                continue
            if parameter.is_written and not arg.flags.writeable:
                raise ValueError(
                    f"{self._signature.name}: {parameter.name} is written, but its array is "
                    "read-only"
                )
            spans = [
                stride * (length - 1)
                for stride, length in zip(arg.strides, arg.shape, strict=True)
            ]
            start = arg.ctypes.data + sum(span for span in spans if span < 0)
            size = sum(abs(span) for span in spans) + arg.itemsize
            regions.append(_Region(start, size, parameter.name.encode(), parameter.is_written))
        return regions

    def _error(self, fault: _Fault) -> HostSimError:
        file, line = Path(fault.file.decode()).name, fault.line
        if not file:
            file, line = self._library.line_of(fault.code_offset)
        where = f"block ({fault.block.x}, {fault.block.y}, {fault.block.z})"
        if fault.thread_known:
            where += f" thread ({fault.thread.x}, {fault.thread.y}, {fault.thread.z})"
        message = f"{fault.message.decode()} [{where}]"
        return HostSimError(self._signature.name, fault.kind.decode(), file, line, message)


@dataclass(frozen=True, slots=True)
class _Options:
    order: Order
    seed: int
    preempt: bool


class HostLoader:
    """A Loader for the host.

    Mode "check" reports what a kernel may not do; "plain" only runs it, about twice as fast.
    Threads and blocks take turns in `order`; "random" draws from `seed`, and `preempt` also lets
    others run between two accesses. Compiled kernels are kept in `cache`, by default a folder of
    rawpaged's cache. Raises MissingToolError where g++ or the CUDA headers are missing.
    """

    def __init__(
        self,
        mode: Mode = "check",
        *,
        order: Order = "forward",
        seed: int = 0,
        preempt: bool = False,
        cache: Path | None = None,
    ) -> None:
        if order not in _ORDERS:
            raise ValueError(f"{order=} must be one of {', '.join(_ORDERS)}")
        if mode not in ("check", "plain"):
            raise ValueError(f"{mode=} must be check or plain")
        self._options = _Options(order, seed, preempt)
        self._builder = Builder(mode, cache)

    def load(
        self, source: str, names: Sequence[str], *, max_shared_mem: Mapping[str, int]
    ) -> dict[str, Function]:
        """The `extern "C"` kernels of `source` by name, compiled or out of the cache."""
        signatures = parse_signatures(source)
        for name in names:
            if name not in signatures:
                raise ValueError(f'no extern "C" kernel {name} in the source')
        library = _Library(self._builder.build(source, names))
        return {
            name: HostFunction(library, signatures[name], max_shared_mem[name], self._options)
            for name in names
        }
