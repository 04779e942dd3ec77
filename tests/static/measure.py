"""Compiles all kernels for an architecture and says what came out; keeps what it has found.

A result is kept in `static` of rawpaged's cache, under a digest of all that it was made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rawpaged.cache_dir import cache_dir
from rawpaged.gpu.cupy_loader import header_text
from rawpaged.gpu.module import source_text
from tests.hostsim.wheels import CudaWheels
from tests.static import nvrtc, sass
from tests.static.instances import Unit, units
from tests.static.occupancy import blocks_per_sm

_CODE = tuple(Path(__file__).with_name(name) for name in ("measure.py", "nvrtc.py", "sass.py"))


@dataclass(frozen=True, slots=True)
class Measured:
    """One kernel for one architecture, before the limits of a GPU are considered."""

    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    instructions: dict[str, int]
    """Of each kind in sass.COUNTED and sass.LOCAL."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the gates look at."""

    name: str
    arch: str
    function: str
    measured: Measured
    shared_bytes: int
    """A block, static and the most dynamic."""
    threads: int
    min_blocks: int
    """Blocks an SM that its launch bounds ask for."""
    blocks: int
    """Blocks an SM as compiled."""


def measure(arch: str, wheels: CudaWheels) -> tuple[list[Kernel], list[str]]:
    """All kernels for `arch`, and what the compilers warn of. Raises nvrtc.CompileError."""
    todo = units(arch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without the GIL
        found = list(pool.map(lambda unit: _measure_unit(unit, wheels), todo))
    kernels = [
        _kernel(unit, index, measured[instance.name])
        for unit, (measured, _) in zip(todo, found, strict=True)
        for index, instance in enumerate(unit.instances)
    ]
    return kernels, [warning for _, warnings in found for warning in warnings]


def _kernel(unit: Unit, index: int, measured: Measured) -> Kernel:
    instance = unit.instances[index]
    bounds = re.search(r"__launch_bounds__\((\d+), (\d+)\)", instance.definition)
    assert bounds is not None, instance.definition
    threads, min_blocks = int(bounds[1]), int(bounds[2])
    shared_bytes = measured.static_shared_bytes + instance.max_shared_mem
    blocks = blocks_per_sm(
        unit.sm, threads=threads, registers=measured.registers, shared_bytes=shared_bytes
    )
    return Kernel(
        instance.name,
        unit.arch,
        instance.declaration.function,
        measured,
        shared_bytes,
        threads,
        min_blocks,
        blocks,
    )


def _measure_unit(unit: Unit, wheels: CudaWheels) -> tuple[dict[str, Measured], list[str]]:
    text = source_text(unit.source, unit.instances)
    kept = cache_dir() / "static" / f"{_key(text, unit.arch)}.json"
    if kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
    else:
        found = _compile(text, unit.arch, wheels)
        kept.parent.mkdir(parents=True, exist_ok=True)
        scratch = kept.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(found), encoding="utf-8")
        os.replace(scratch, kept)
    measured = {name: Measured(**values) for name, values in found["kernels"].items()}
    return measured, found["warnings"]


def _compile(text: str, arch: str, wheels: CudaWheels) -> dict[str, object]:
    compiled = nvrtc.compile_text(text, arch)
    counts = sass.count_instructions(sass.disassemble(compiled.cubin, wheels))
    kernels = {}
    for name, usage in compiled.usage.items():
        instructions = {kind: counts[name][kind] for kind in (*sass.COUNTED, sass.LOCAL)}
        kernels[name] = asdict(
            Measured(
                usage.registers,
                usage.shared_bytes,
                usage.stack_bytes,
                usage.spill_bytes,
                instructions,
            )
        )
    return {"kernels": kernels, "warnings": compiled.warnings}


def _key(text: str, arch: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    parts = (
        text,
        header_text(nvrtc.kernel_folder()),
        nvrtc.nvrtc_version(),
        repr(nvrtc.options(arch)),
        *(path.read_text(encoding="utf-8") for path in _CODE),
    )
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()
