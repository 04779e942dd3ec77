"""Counts the machine instructions of kernels that matter, out of what nvdisasm prints."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tests.hostsim.wheels import CudaWheels

TENSOR = "HMMA"
LOAD_16 = "LDG.128"
STORE_16 = "STG.128"
COPY_16 = "LDGSTS.128"
LOAD_MATRIX = "LDSM"
COUNTED = (TENSOR, LOAD_16, STORE_16, COPY_16, LOAD_MATRIX)
"""Products on tensor cores; loads, stores and copies to shared memory of 16 bytes; ldmatrix."""
LOCAL = "LDL, STL"
"""Accesses of local memory, where spilled registers and arrays with computed indices lie."""

_SECTION = re.compile(r"^\.text\.(\w+):$")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


def disassemble(cubin: bytes, wheels: CudaWheels) -> str:
    """Text of all functions of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.cubin")
        path.write_bytes(cubin)
        # The analysis of data flow would take longer than the rest, and add nothing.
        command = [str(wheels.tool("nvdisasm")), "--print-code", "--no-dataflow", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count_instructions(text: str) -> dict[str, Counter[str]]:
    """By function, how many instructions there are of each of COUNTED and LOCAL."""
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] | None = None
    for line in text.splitlines():
        if section := _SECTION.match(line):
            current = counts.setdefault(section[1], Counter())
        elif current is not None and (instruction := _INSTRUCTION.match(line)):
            kind = _kind(instruction[1])
            if kind:
                current[kind] += 1
    return counts


def _kind(opcode: str) -> str:
    """The counted kind of an opcode such as LDG.E.128.CONSTANT, or ""."""
    name, *modifiers = opcode.split(".")
    if name in ("LDL", "STL"):
        return LOCAL
    if name in ("LDG", "STG", "LDGSTS"):
        return f"{name}.128" if "128" in modifiers else ""
    return name if name in (TENSOR, LOAD_MATRIX) else ""


