"""Which instructions the kernels may use, known before anything is compiled.

LLVM ends the process when a kernel asks for instructions that the target has not. So the choice is
made here, once, from what Numba compiles for: this machine, or what NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES say. RAWPAGED_CPU_FEATURES leaves features out:

    RAWPAGED_CPU_FEATURES=fma,avx512f       no dot products
    RAWPAGED_CPU_FEATURES=none              plain multiplications and additions
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, fields
from typing import Any

import llvmlite.binding
import numba.core.config

from rawpaged.errors import ConfigError

VARIABLE = "RAWPAGED_CPU_FEATURES"


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Named as in /proc/cpuinfo."""

    fma: bool
    """Fused multiply-add on vectors; every 64-bit ARM has it."""
    avx512f: bool
    """32 registers of 16 floats."""
    avx512_bf16: bool
    """Dot products of bfloat16 pairs."""
    avx512_vnni: bool
    """Dot products of bytes."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self) if getattr(self, field.name))


def detect_features() -> CpuFeatures:
    """What the target has and RAWPAGED_CPU_FEATURES allows.

    Raises ConfigError for a name that is none, or one that the target has not.
    """
    here = _target_features()
    wanted = os.environ.get(VARIABLE)
    if not wanted:  # set to nothing is as good as not set
        return here
    names = {name.strip() for name in wanted.split(",")} - {"", "none"}
    known = {field.name for field in fields(CpuFeatures)}
    for name in sorted(names):
        if name not in known:
            raise ConfigError(f"{VARIABLE}={wanted!r}: {name!r} is not one of {sorted(known)}")
        if name not in here.names:
            raise ConfigError(f"{VARIABLE}={wanted!r}: this machine has only {list(here.names)}")
    return CpuFeatures(**{name: name in names for name in known})


def _target_features() -> CpuFeatures:
    """Those of the target that Numba compiles for."""
    config: Any = numba.core.config
    name, given = config.CPU_NAME, config.CPU_FEATURES
    if given is not None:
        has = {part[1:]: part.startswith("+") for part in given.split(",") if part}
    elif name not in (None, "host"):
        has = {}  # what a model of processor has is LLVM's secret
    else:
        has = dict(llvmlite.binding.get_host_cpu_features())
    is_arm = platform.machine() in ("aarch64", "arm64")
    wide = has.get("avx512f", False)
    return CpuFeatures(
        fma=is_arm or has.get("fma", False),
        avx512f=wide,
        avx512_bf16=wide and has.get("avx512bf16", False),
        avx512_vnni=wide and has.get("avx512vnni", False),
    )


FEATURES = detect_features()
