"""Compiles a kernel's source text with g++ into a library of the simulator, or finds it again."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

from rawpaged.cache_dir import cache_dir
from rawpaged.gpu.module import KERNEL_PACKAGE
from tests.hostsim.wheels import CudaWheels, compiler_version, find_compiler, find_cuda_wheels

Mode = Literal["check", "plain"]

_HERE = Path(__file__).parent
_RUNTIME = tuple(sorted(_HERE.glob("*.cc")))
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-omit-frame-pointer",
)
# Kernels have line tables, round as written, and read memory by whatever type they like.
_KERNEL_FLAGS = (*_FLAGS, "-w", "-g1", "-gdwarf-4", "-ffp-contract=off", "-fno-strict-aliasing")
_CHECKED_KERNEL_FLAGS = (
    # Calls our sanitizer_hooks.cc, for libtsan and libubsan are not linked.
    "-fsanitize=thread",
    "-fsanitize=bounds,alignment,signed-integer-overflow,shift,integer-divide-by-zero",
    "-fsanitize=float-cast-overflow",
    # Each access stays one of the kernel's own width.
    "-fno-tree-vectorize",
    "-fno-store-merging",
    "-fno-tree-sra",
)
# Locals that a kernel does not set are huge numbers, not whatever lay on the stack. From GCC 12 on.
_UNSET_LOCALS_FLAG = "-ftrivial-auto-var-init=pattern"


class CompileError(RuntimeError):
    """g++ refused a kernel; the text is what it said."""


class Builder:
    """Compiles sources for one mode; libraries are kept in `folder` under a digest of all inputs.

    Raises MissingToolError where g++ or the CUDA headers are missing.
    """

    def __init__(self, mode: Mode, folder: Path | None = None) -> None:
        self._mode = mode
        self._folder = folder or cache_dir() / "hostsim"
        self._compiler = find_compiler()
        wheels = find_cuda_wheels()
        kernels = resources.files(KERNEL_PACKAGE)
        assert isinstance(kernels, Path), f"{kernels} is not a folder"
        self._include = (_HERE, kernels, *wheels.include)
        version = compiler_version(self._compiler)
        self._kernel_flags = _kernel_flags(mode, version)
        toolchain = (self._compiler, version, _headers_version(wheels))
        self._toolchain_key = repr((mode, toolchain, self._kernel_flags))
        self._runtime_key = self._digest(
            *(path.read_text() for path in sorted([*_RUNTIME, *_HERE.glob("*.h")]))
        )
        self._headers = "".join(path.read_text() for path in sorted(kernels.glob("*.cuh")))

    def build(self, source: str, names: Sequence[str]) -> Path:
        """The library in which `hostsim_invoke_NAME` calls kernel NAME; raises CompileError."""
        exports = "".join(f"HOSTSIM_EXPORT({name})\n" for name in names)
        text = f'#include "gpu.cuh"\n#line 1 "source.cu"\n{source}\n#line 1 "exports"\n{exports}'
        key = self._digest(self._runtime_key, self._headers, text)
        library = self._folder / f"kernel-{key}.so"
        if not library.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._compile(text, library)
        return library

    def _digest(self, *texts: str) -> str:
        digest = hashlib.blake2b(digest_size=12)
        for text in (self._toolchain_key, *texts):
            digest.update(f"{len(text)}:{text}".encode())
        return digest.hexdigest()

    def _compile(self, text: str, library: Path) -> None:
        runtime = self._runtime_object()
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            path = Path(scratch, "kernel.cc")
            path.write_text(text, encoding="utf-8")
            object_file = path.with_suffix(".o")
            self._run([*self._kernel_flags, "-c", str(path), "-o", str(object_file)])
            linked = path.with_suffix(".so")
            objects = [str(object_file), str(runtime)]
            self._run(["-shared", "-Wl,-Bsymbolic", "-o", str(linked), *objects])
            os.replace(linked, library)

    def _runtime_object(self) -> Path:
        """The runtime, compiled once for each mode."""
        target = self._folder / f"runtime-{self._runtime_key}.o"
        if target.exists():
            return target
        define = ["-DHOSTSIM_CHECK"] if self._mode == "check" else []
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            objects = []
            for source in _RUNTIME:
                objects.append(str(Path(scratch, source.stem + ".o")))
                self._run([*_FLAGS, "-Wall", *define, "-c", str(source), "-o", objects[-1]])
            merged = Path(scratch, "runtime.o")
            self._run(["-r", "-nostdlib", *objects, "-o", str(merged)])
            os.replace(merged, target)
        return target

    def _run(self, arguments: Sequence[str]) -> None:
        include = [f"-I{folder}" for folder in self._include]
        done = subprocess.run(
            [self._compiler, *include, *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise CompileError(done.stderr)


def _kernel_flags(mode: Mode, version: str) -> tuple[str, ...]:
    if mode == "plain":
        return _KERNEL_FLAGS
    unset_locals = (_UNSET_LOCALS_FLAG,) if int(version.split(".")[0]) >= 12 else ()
    return (*_KERNEL_FLAGS, *_CHECKED_KERNEL_FLAGS, *unset_locals)


def _headers_version(wheels: CudaWheels) -> str:
    header = wheels.include[0] / "cuda.h"
    return f"{header}:{header.stat().st_mtime_ns}"
