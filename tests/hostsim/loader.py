"""Runs CUDA kernels on the host: a Loader whose device memory is NumPy arrays.

A launch takes what a CuPy launch takes, returns when the grid is done, and raises HostSimError at
the first thing that a kernel may not do. docs/simulator.md says what that is.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rawpaged.gpu.module import Function, Parameter
from tests.hostsim.build import Builder, CompileError, Mode
from tests.hostsim.library import Dim, HostSimError, Launch, Library, Region, open_library
from tests.hostsim.traffic import KernelTraffic

__all__ = ["CompileError", "HostFunction", "HostLoader", "HostSimError", "Mode", "Order"]

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


@dataclass(frozen=True, slots=True)
class Signature:
    """What the text of a kernel says about its launches."""

    name: str
    parameters: tuple[Parameter, ...]
    max_threads: int


def parse_signatures(source: str) -> dict[str, Signature]:
    """The `extern "C"` kernels of a source text, by name. Raises TypeError for other parameters.

    Parameters are pointers, int, unsigned, long long and float.
    """
    signatures = {}
    for bounds, name, text in _KERNEL.findall(source):
        parameters = tuple(_parse_parameter(part) for part in text.split(",") if part.strip())
        for parameter in parameters:
            if not parameter.is_pointer and parameter.c_type not in _SCALARS:
                raise TypeError(f"{name}: {parameter.c_type} {parameter.name} is not supported")
        first = bounds.split(",")[0].strip()
        max_threads = int(first) if first.isdecimal() else _MAX_THREADS
        signatures[name] = Signature(name, parameters, max_threads)
    return signatures


def _parse_parameter(text: str) -> Parameter:
    match = re.fullmatch(r"\s*(.+?)\s*(\w+)\s*", text.replace("__restrict__", " "), re.DOTALL)
    assert match is not None, f"{text!r} is no C parameter"
    return Parameter(re.sub(r"\s*\*", "*", match[1]).strip(), match[2])


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order threads and blocks run, and how long a block may take."""

    order: Order
    seed: int
    preempt: bool
    max_accesses: int


class HostFunction:
    """A kernel that runs on the host when called; arguments are NumPy arrays and scalars.

    Raises HostSimError for what the kernel does; TypeError and ValueError for what the call asks.
    """

    def __init__(
        self,
        library: Library,
        signature: Signature,
        max_shared_mem: int,
        schedule: Schedule,
        counts: dict[str, KernelTraffic] | None,
    ) -> None:
        self._library = library
        self._signature = signature
        self._schedule = schedule
        self._counts = counts
        self._entry = library.entry(signature.name)
        # More than 48 KB have to be asked for, and include the static arrays.
        asked = max_shared_mem > _PLAIN_SHARED_BYTES
        self._max_dynamic = max_shared_mem if asked else _PLAIN_SHARED_BYTES
        self._shared_limit = _MAX_SHARED_BYTES if asked else _PLAIN_SHARED_BYTES

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        name = self._signature.name
        self._check_size(grid, block, shared_mem)
        if len(args) != len(self._signature.parameters):
            raise TypeError(
                f"{name} takes {len(self._signature.parameters)} arguments, not {len(args)}"
            )
        pairs = list(zip(self._signature.parameters, args, strict=True))
        values = [self._value(parameter, arg) for parameter, arg in pairs]
        regions = [
            _region(parameter, arg) for parameter, arg in pairs if parameter.is_pointer and arg.size
        ]
        launch = Launch(
            kernel=self._entry,
            args=(ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values)),
            regions=(Region * len(regions))(*regions),
            num_regions=len(regions),
            seed=self._schedule.seed,
            shared_bytes=shared_mem,
            shared_limit=self._shared_limit,
            max_accesses=self._schedule.max_accesses,
            grid=Dim(*grid, *(1,) * (3 - len(grid))),
            block=Dim(*block, *(1,) * (3 - len(block))),
            order=_ORDERS[self._schedule.order],
            preempt=self._schedule.preempt,
            count_traffic=self._counts is not None,
        )
        lines = self._library.launch(name, launch)
        if self._counts is not None:
            known = self._counts.get(name, KernelTraffic(0, ()))
            self._counts[name] = known + KernelTraffic(1, tuple(lines))

    def _check_size(self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int) -> None:
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
        limit = min(self._max_dynamic, self._shared_limit)
        if not 0 <= shared_mem <= limit:
            raise ValueError(f"{name}: {shared_mem=} must be at most {limit} bytes")

    def _value(self, parameter: Parameter, arg: Any) -> np.ndarray[Any, Any]:
        """The bytes of an argument: of a scalar, or of an array's address."""
        what = f"{self._signature.name}: {parameter.name}"
        if parameter.is_pointer:
            if not isinstance(arg, np.ndarray):
                raise TypeError(f"{what} must be an array, not {arg!r}")
            if parameter.is_written and not arg.flags.writeable:
                raise ValueError(f"{what} is written, but its array is read-only")
            return np.array([arg.ctypes.data], np.uint64)
        scalar = _SCALARS[parameter.c_type]
        if not isinstance(arg, scalar):
            raise TypeError(
                f"{what} must be a NumPy {scalar.__name__}, not {arg!r} ({type(arg).__name__})"
            )
        return np.array([arg])


def _region(parameter: Parameter, array: np.ndarray[Any, Any]) -> Region:
    """The array's bytes from the first to the last, gaps between strided elements included."""
    spans = [
        stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)
    ]
    start = array.ctypes.data + sum(span for span in spans if span < 0)
    size = sum(abs(span) for span in spans) + array.itemsize
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return Region(start, owner.ctypes.data, size, parameter.name.encode(), parameter.is_written)


class HostLoader:
    """A Loader for the host.

    Mode "check" reports what a kernel may not do; "plain" only runs it, at twice the speed or more.
    Threads and blocks take turns in `order`; "random" draws from `seed`, and `preempt` lets others
    run between two accesses too. A block that makes `max_accesses` is taken to hang. `profile`
    counts the traffic of checked launches. Compiled kernels are kept in `cache`, by default a
    folder of rawpaged's cache.

    Raises MissingToolError where g++ or the CUDA headers are missing.
    """

    def __init__(
        self,
        mode: Mode = "check",
        *,
        order: Order = "forward",
        seed: int = 0,
        preempt: bool = False,
        profile: bool = False,
        max_accesses: int = 10**9,
        cache: Path | None = None,
    ) -> None:
        if mode not in ("check", "plain"):
            raise ValueError(f"{mode=} must be check or plain")
        if order not in _ORDERS:
            raise ValueError(f"{order=} must be one of {', '.join(_ORDERS)}")
        if mode == "plain" and (profile or preempt):
            raise ValueError("plain launches see no accesses: no profile, no preempt")
        self._schedule = Schedule(order, seed, preempt, max_accesses)
        self._counts: dict[str, KernelTraffic] | None = {} if profile else None
        self._builder = Builder(mode, cache)

    def load(
        self, source: str, names: Sequence[str], *, max_shared_mem: Mapping[str, int]
    ) -> dict[str, Function]:
        """The `extern "C"` kernels of `source` by name, compiled or out of the cache.

        Raises CompileError with what g++ says, and ValueError for a name that is not there.
        """
        signatures = parse_signatures(source)
        for name in names:
            if name not in signatures:
                raise ValueError(f'no extern "C" kernel {name} in the source')
        library = open_library(self._builder.build(source, names))
        return {
            name: HostFunction(
                library, signatures[name], max_shared_mem[name], self._schedule, self._counts
            )
            for name in names
        }

    def take_traffic(self) -> dict[str, KernelTraffic]:
        """What the launches since the last call asked of memory, by kernel."""
        assert self._counts is not None, "the loader was made without profile=True"
        taken = dict(self._counts)
        self._counts.clear()
        return taken
