"""What launchers need to know of an array, whoever made it.

Arrays say it themselves: `__cuda_array_interface__` on a GPU (CuPy, JAX, Numba, PyTorch), and
`__array_interface__` where kernels run on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_BFLOAT16 = "<V2"
"""How ml_dtypes, and CuPy after it, spell bfloat16 in an array interface."""


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Address, shape, strides in elements, and the dtype's name ("bfloat16", "int32")."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def is_contiguous(self) -> bool:
        return has_contiguous_axes(self, len(self.shape))


def interface_of(array: Any) -> dict[str, Any]:
    """The array's own description. Raises TypeError when it has none."""
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(array, name, None)
        if interface is not None:
            return dict(interface)
    raise TypeError(f"a {type(array).__name__} has no __cuda_array_interface__")


def array_info(array: Any) -> ArrayInfo:
    """Facts about an array. Raises TypeError when it describes itself in no known way."""
    interface = interface_of(array)
    shape = tuple(interface["shape"])
    typestr = str(interface["typestr"])
    dtype = np.dtype(typestr)
    strides = interface.get("strides")
    if strides is None:
        return _info(interface, shape, _contiguous_strides(shape), typestr, dtype)
    assert all(stride % dtype.itemsize == 0 for stride in strides), f"{strides=} of {typestr}"
    in_elements = tuple(stride // dtype.itemsize for stride in strides)
    return _info(interface, shape, in_elements, typestr, dtype)


def has_contiguous_axes(info: ArrayInfo, count: int) -> bool:
    """Whether the last `count` axes are laid out without gaps; axes of length 1 do not matter."""
    if 0 in info.shape:
        return True
    first = len(info.shape) - count
    expected = _contiguous_strides(info.shape)
    return all(
        info.shape[axis] == 1 or info.strides[axis] == expected[axis]
        for axis in range(first, len(info.shape))
    )


def check(condition: bool, **arrays: Any) -> None:
    """Raise ValueError with the arrays' shapes and dtypes unless the condition holds."""
    if not condition:
        infos = {name: array_info(array) for name, array in arrays.items()}
        text = ", ".join(
            f"{name}: {info.dtype}{list(info.shape)} strides {list(info.strides)}"
            for name, info in infos.items()
        )
        raise ValueError(f"arrays do not fit: {text}")


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def _info(
    interface: dict[str, Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    typestr: str,
    dtype: np.dtype[Any],
) -> ArrayInfo:
    name = "bfloat16" if typestr == _BFLOAT16 else dtype.name
    return ArrayInfo(int(interface["data"][0]), shape, strides, name, dtype.itemsize)
