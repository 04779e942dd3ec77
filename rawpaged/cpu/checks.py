"""What an op asks of its arguments before a kernel, which looks at nothing, gets them."""

from __future__ import annotations

from typing import Protocol


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_shapes(condition: bool, **arrays: _Shaped) -> None:
    """Static checks of an op: shapes that do not fit are a fault of the caller's code."""
    if not condition:
        shapes = ", ".join(f"{name}.shape={array.shape}" for name, array in arrays.items())
        raise ValueError(f"shapes do not fit: {shapes}")
