"""Compiles kernels for GPUs that are not here: NVRTC from its wheel, the options CupyLoader gives.

CuPy adds `CUPY_OPTIONS` and the device's architecture, without the "a" of sm_90a and sm_100a: those
take all that the plain ones take. ptxas, inside NVRTC, says what a kernel uses in the log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from rawpaged.gpu.cupy_loader import compile_options, header_text
from rawpaged.gpu.module import KERNEL_PACKAGE
from tests.hostsim.wheels import INSTALL_HINT, MissingToolError, find_cuda_wheels

CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy's RawModule appends to the options it is given (14.2: cupy/cuda/compiler.py)."""

_REPORT = ("--ptxas-options=-v", "--ptxas-options=--warn-on-spills")


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the text is its log."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes, as ptxas reports it."""

    registers: int
    """A thread."""
    shared_bytes: int
    """Static, a block."""
    stack_bytes: int
    spill_bytes: int
    """Stores and loads."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One translation unit for one architecture."""

    cubin: bytes
    usage: dict[str, Usage]
    """By kernel."""
    warnings: tuple[str, ...]
    """Lines of the log that warn, of the compiler's front end and of ptxas."""


def nvrtc_version() -> str:
    """Such as "13.5"."""
    major, minor = _checked(_bindings().nvrtcVersion())
    return f"{major}.{minor}"


def options(arch: str) -> tuple[str, ...]:
    """All options of a compilation. `arch` is such as "sm_90a"."""
    kernels = kernel_folder()
    headers = (f"-I{folder}" for folder in find_cuda_wheels().include)
    base = compile_options(kernels, header_text(kernels))
    return (*base, *headers, *CUPY_OPTIONS, f"-arch={arch}", *_REPORT)


def kernel_folder() -> Path:
    """Where the .cu and .cuh files lie."""
    folder = resources.files(KERNEL_PACKAGE)
    assert isinstance(folder, Path), f"{folder} is not a folder"
    return folder


def compile_text(text: str, arch: str) -> Compiled:
    """Compile one translation unit; several threads may at once. Raises CompileError."""
    nvrtc = _bindings()
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, None, None))
    try:
        given = [option.encode() for option in options(arch)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode().rstrip("\0")
        if status:
            raise CompileError(f"{status.name} for {arch}:\n{said}")
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return Compiled(bytes(cubin), parse_usage(said), parse_warnings(said))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def parse_usage(log: str) -> dict[str, Usage]:
    """What `ptxas -v` says of each kernel."""
    usage = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", part)
        memory = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        )
        registers = re.search(r"Used (\d+) registers(.*)", part)
        assert name is not None, part
        assert memory is not None, part
        assert registers is not None, part
        shared = re.search(r"(\d+) bytes smem", registers[2])
        usage[name[1]] = Usage(
            registers=int(registers[1]),
            shared_bytes=int(shared[1]) if shared else 0,
            stack_bytes=int(memory[1]),
            spill_bytes=int(memory[2]) + int(memory[3]),
        )
    return usage


def parse_warnings(log: str) -> tuple[str, ...]:
    """Lines in which a compiler warns."""
    return tuple(line.strip() for line in log.splitlines() if "warning" in line.lower())


def _bindings() -> Any:
    """cuda.bindings.nvrtc; raises MissingToolError where it is not installed."""
    try:
        return import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise MissingToolError(f"cuda-bindings is not installed; {INSTALL_HINT}") from error


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a call gives beside its status: nothing, one value or several."""
    status, *values = answer
    if status:
        raise CompileError(status.name)
    return values[0] if len(values) == 1 else tuple(values)
