"""Launches prepared once for a layout of arrays, and repeated with other arrays of that layout.

Working out grid and scalars, and checking that arrays fit, takes Python longer than launching.
All of it follows from layouts (shape, strides, dtype, alignment), which a model repeats in every
layer and many steps. So launchers keep what came of a layout, and only put the arrays in.
Addresses and array objects are never kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rawpaged.gpu.arguments import as_array
from rawpaged.gpu.arrays import ArrayInfo

_MOST_LAUNCHES = 2048
_ALIGNMENT = 16
"""The most that a kernel asks of an address, in bytes."""


class Function(Protocol):
    """A compiled kernel; arguments are device arrays and NumPy scalars of the exact C types."""

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands for an array in a prepared launch: the one at `index` of those it is called with."""

    index: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of which only the arrays are missing; made by `Kernel.prepare`."""

    kernel: str
    function: Function
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]
    """Scalars; None where an array goes."""
    places: tuple[tuple[int, int], ...]
    """(position in args, index of the operand)."""
    shared_mem: int

    def __call__(self, arrays: Sequence[Any]) -> None:
        """Launch over the operands' arrays; raises TypeError for what is no array."""
        args = list(self.args)
        for position, index in self.places:
            args[position] = as_array(self.kernel, arrays[index])
        self.function(self.grid, self.block, tuple(args), shared_mem=self.shared_mem)


class PreparedLaunches:
    """Launches by the layouts of an op's arrays and whatever else decides them.

    Empties itself when full, for requests of ever new lengths must not fill memory.
    """

    def __init__(self, most: int = _MOST_LAUNCHES) -> None:
        self._most = most
        self._launches: dict[Hashable, tuple[Launch, ...]] = {}

    def get(self, key: Hashable) -> tuple[Launch, ...] | None:
        return self._launches.get(key)

    def put(self, key: Hashable, launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
        """Keep them and give them back."""
        if len(self._launches) >= self._most:
            self._launches.clear()
        self._launches[key] = launches
        return launches


def layout_of(info: ArrayInfo) -> Hashable:
    """All that a check of an array may depend on: everything but which aligned address it has."""
    return info[1:], info.pointer % _ALIGNMENT
