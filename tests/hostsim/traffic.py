"""What a kernel asked of memory, counted from the addresses that its threads really used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LineTraffic:
    """Accesses of one source line to one array.

    `requests` are a warp's accesses at once. `cost` counts 32-byte sectors of global memory, or
    passes ("wavefronts") over the banks of shared memory; `ideal_cost` is the least that the same
    bytes need, or that lanes of the same access width need.
    """

    file: str
    line: int
    array: str
    """The kernel's parameter; "" for shared memory."""
    write: bool
    requests: int
    requested_bytes: int
    """Global memory: each address counts once in a request."""
    cost: int
    ideal_cost: int

    @property
    def is_shared(self) -> bool:
        return not self.array


@dataclass(frozen=True, slots=True)
class KernelTraffic:
    """All launches of one kernel since the counts were last taken."""

    launches: int
    lines: tuple[LineTraffic, ...]

    @property
    def requested_bytes(self) -> int:
        """Of global memory."""
        return sum(line.requested_bytes for line in self.lines if not line.is_shared)

    @property
    def sectors(self) -> int:
        """Sectors of 32 bytes of global memory."""
        return sum(line.cost for line in self.lines if not line.is_shared)

    @property
    def ideal_sectors(self) -> int:
        return sum(line.ideal_cost for line in self.lines if not line.is_shared)

    @property
    def wavefronts(self) -> int:
        """Passes over the banks of shared memory; above the ideal by what conflicts cost."""
        return sum(line.cost for line in self.lines if line.is_shared)

    @property
    def ideal_wavefronts(self) -> int:
        return sum(line.ideal_cost for line in self.lines if line.is_shared)

    def array_bytes(self, array: str, *, write: bool = False) -> int:
        """Bytes that were read from, or written to, the array of a parameter."""
        return sum(
            line.requested_bytes
            for line in self.lines
            if line.array == array and line.write == write
        )

    def __add__(self, other: KernelTraffic) -> KernelTraffic:
        lines = merge_lines((*self.lines, *other.lines))
        return KernelTraffic(self.launches + other.launches, tuple(lines))

    def __str__(self) -> str:
        rows = [f"{'line':28} {'array':12} {'':5} {'requests':>9} {'cost':>9} {'ideal':>9}"]
        for line in self.lines:
            place, direction = f"{line.file}:{line.line}", "write" if line.write else "read"
            rows.append(
                f"{place:28} {line.array or '(shared)':12} {direction:5} {line.requests:9} "
                f"{line.cost:9} {line.ideal_cost:9} {line.cost / line.ideal_cost:6.2f}"
            )
        return "\n".join(rows)


def merge_lines(lines: Iterable[LineTraffic]) -> list[LineTraffic]:
    """Rows of the same line, array and direction as one, in the order of the source."""
    merged: dict[tuple[str, int, str, bool], LineTraffic] = {}
    for line in lines:
        key = (line.file, line.line, line.array, line.write)
        known = merged.get(key)
        if known is not None:
            line = replace(
                line,
                requests=line.requests + known.requests,
                requested_bytes=line.requested_bytes + known.requested_bytes,
                cost=line.cost + known.cost,
                ideal_cost=line.ideal_cost + known.ideal_cost,
            )
        merged[key] = line
    return [merged[key] for key in sorted(merged)]
