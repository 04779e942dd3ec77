"""Where the CUDA headers and tools that come as pip wheels lie, or how to install them."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

INSTALL_HINT = 'install them with: pip install "rawpaged[gpusim]" (in a checkout: ".[gpusim]")'
COMPILER_HINT = "install g++ 10 or newer (Debian: apt-get install g++), or name one in $CXX"
_OLDEST_COMPILER = 10
_HEADERS = {
    "cuda_bf16.h": "nvidia-cuda-runtime",
    "crt/host_defines.h": "nvidia-cuda-crt",
    "cccl/cuda/std/version": "nvidia-cuda-cccl",
}


class MissingToolError(RuntimeError):
    """Something that the simulator needs is not installed; the text says how to get it."""


@dataclass(frozen=True, slots=True)
class CudaWheels:
    """Folders of the CUDA packages of one major version."""

    root: Path

    @property
    def include(self) -> tuple[Path, ...]:
        """Include folders, in order."""
        return (self.root / "include", self.root / "include" / "cccl")

    def tool(self, name: str) -> Path:
        """A program of the wheels (cuobjdump, nvdisasm); raises MissingToolError."""
        path = self.root / "bin" / name
        if not path.exists():
            raise MissingToolError(f"{path} is missing (nvidia-cuda-{name}); {INSTALL_HINT}")
        return path


def find_cuda_wheels() -> CudaWheels:
    """The newest CUDA wheels of this environment; raises MissingToolError with what to install."""
    roots = [root for folder in _nvidia_folders() for root in folder.glob("cu[1-9]*")]
    roots.sort(key=lambda root: int(root.name[2:]))
    if not roots:
        raise MissingToolError(f"no CUDA wheels in this environment; {INSTALL_HINT}")
    wheels = CudaWheels(roots[-1])
    missing = [
        package for header, package in _HEADERS.items() if not (wheels.include[0] / header).exists()
    ]
    if missing:
        raise MissingToolError(f"{', '.join(missing)}: not installed; {INSTALL_HINT}")
    return wheels


def _nvidia_folders() -> list[Path]:
    """Where packages of NVIDIA's namespace are installed."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def find_compiler() -> str:
    """$CXX or g++, of version 10 or newer, on a machine that the runtime is written for.

    Raises MissingToolError.
    """
    if platform.machine() != "x86_64":
        raise MissingToolError(f"the simulator runs on x86_64, not on {platform.machine()}")
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise MissingToolError(f"{compiler} is not installed; {COMPILER_HINT}")
    version = compiler_version(compiler)
    major = version.split(".")[0]
    if not major.isdecimal() or int(major) < _OLDEST_COMPILER:
        raise MissingToolError(f"{compiler} is of version {version}; {COMPILER_HINT}")
    return compiler


def compiler_version(compiler: str) -> str:
    """What `-dumpfullversion` says."""
    done = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
