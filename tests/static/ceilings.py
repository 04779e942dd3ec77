"""The table ceilings.csv: what each kernel may take at most, and must have at least.

A row is a kernel for an architecture. Registers and shared bytes are ceilings, blocks an SM and
numbers of instructions floors. Registers are rounded up to 8, the unit in which a warp gets them,
so that a row changes only when something comes of it. `python -m tests.static.update` writes it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.static import sass
from tests.static.instances import ARCHS
from tests.static.measure import Kernel

TABLE = Path(__file__).with_name("ceilings.csv")
MOST_REGISTERS = 255
_MADE_WITH = "# NVRTC "
_COLUMNS = ("kernel", "arch", "registers", "shared_bytes", "blocks_per_sm", *sass.COUNTED)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    blocks: int
    instructions: Mapping[str, int]

    @classmethod
    def of(cls, kernel: Kernel) -> Row:
        """The tightest row that a kernel meets."""
        measured = kernel.measured
        registers = min(-(-measured.registers // 8) * 8, MOST_REGISTERS)
        instructions = {kind: measured.instructions[kind] for kind in sass.COUNTED}
        return cls(
            kernel.name, kernel.arch, registers, kernel.shared_bytes, kernel.blocks, instructions
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by kernel and architecture, and the version of NVRTC that they were measured with."""

    nvrtc: str
    rows: Mapping[tuple[str, str], Row]


def read_table(path: Path = TABLE) -> Table:
    """The table as `write_table` wrote it."""
    rows = {}
    with path.open(newline="", encoding="utf-8") as file:
        version = file.readline().removeprefix(_MADE_WITH).strip()
        for line in csv.DictReader(file):
            instructions = {kind: int(line[kind]) for kind in sass.COUNTED}
            registers, shared_bytes, blocks = (int(line[column]) for column in _COLUMNS[2:5])
            names = (line["kernel"], line["arch"])
            row = Row(*names, registers, shared_bytes, blocks, instructions)
            rows[row.kernel, row.arch] = row
    return Table(version, rows)


def write_table(nvrtc: str, rows: Iterable[Row], path: Path = TABLE) -> None:
    """Rows in the order of names, then of architectures."""
    ordered = sorted(rows, key=lambda row: (row.kernel, ARCHS.index(row.arch)))
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"{_MADE_WITH}{nvrtc}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in ordered:
            counts = (row.instructions[kind] for kind in sass.COUNTED)
            numbers = (row.registers, row.shared_bytes, row.blocks)
            writer.writerow((row.kernel, row.arch, *numbers, *counts))


def violations(kernel: Kernel, row: Row | None) -> list[str]:
    """What a kernel breaks: of its row, or of what holds for all. Each names number and limit."""
    measured = kernel.measured
    found = [
        *_above("stack bytes", measured.stack_bytes, 0),
        *_above("spilled bytes", measured.spill_bytes, 0),
        *_above(f"{sass.LOCAL} instructions", measured.instructions[sass.LOCAL], 0),
        *_below("blocks an SM", kernel.blocks, kernel.min_blocks, "launch bounds"),
    ]
    if row is None:
        found.append("no row in ceilings.csv; run python -m tests.static.update")
    else:
        found += _above("registers", measured.registers, row.registers)
        found += _above("shared bytes", kernel.shared_bytes, row.shared_bytes)
        found += _below("blocks an SM", kernel.blocks, row.blocks, "floor")
        for kind, floor in row.instructions.items():
            found += _below(f"{kind} instructions", measured.instructions[kind], floor, "floor")
    return [f"{kernel.name} {kernel.arch}: {text}" for text in found]


def _above(what: str, value: int, ceiling: int) -> list[str]:
    return [f"{value} {what}, ceiling {ceiling}"] if value > ceiling else []


def _below(what: str, value: int, floor: int, name: str) -> list[str]:
    return [f"{value} {what}, {name} {floor}"] if value < floor else []
