"""What launchers need to know of an array, whoever made it.

Arrays say it themselves: `__cuda_array_interface__` on a GPU (CuPy, JAX, Numba, PyTorch), and
`__array_interface__` where kernels run on the host.

An address is read anew at every call, since an array object may come to stand for other memory.
What follows from shape, strides and dtype alone is remembered by these: launches repeat them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

ARRAY_INTERFACES = ("__cuda_array_interface__", "__array_interface__")

_BFLOAT16 = "<V2"
"""How ml_dtypes, and CuPy after it, spell bfloat16 in an array interface."""
_REMEMBERED = 4096
"""Layouts; a model has some dozens for each number of rows."""


class ArrayInfo(NamedTuple):
    """Address, shape, strides in elements, and the dtype's name ("bfloat16", "int32").

    A tuple, for it is made some fifty times a layer and that is the cheapest immutable object.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def is_contiguous(self) -> bool:
        return _has_contiguous_axes(self.shape, self.strides, len(self.shape))


def interface_of(array: Any) -> dict[str, Any]:
    """The array's own description. Raises TypeError when it has none."""
    for name in ARRAY_INTERFACES:
        interface = getattr(array, name, None)
        if interface is not None:
            return dict(interface)
    raise TypeError(f"a {type(array).__name__} has no __cuda_array_interface__")


def array_info(array: Any) -> ArrayInfo:
    """Facts about an array. Raises TypeError when it describes itself in no known way."""
    # mypy takes type[Any] for unhashable.
    return _reader(type(array))(array)  # type: ignore[arg-type]


def has_contiguous_axes(info: ArrayInfo, count: int) -> bool:
    """Whether the last `count` axes are laid out without gaps; axes of length 1 do not matter."""
    return _has_contiguous_axes(info.shape, info.strides, count)


def check(condition: bool, **arrays: Any) -> None:
    """Raise ValueError with the arrays' shapes and dtypes unless the condition holds."""
    if not condition:
        infos = {name: array_info(array) for name, array in arrays.items()}
        text = ", ".join(
            f"{name}: {info.dtype}{list(info.shape)} strides {list(info.strides)}"
            for name, info in infos.items()
        )
        raise ValueError(f"arrays do not fit: {text}")


@lru_cache(maxsize=64)
def _reader(kind: type) -> Callable[[Any], ArrayInfo]:
    """How arrays of a class are read: CuPy's own have faster ways than their interface."""
    is_cupy = kind.__module__.partition(".")[0] == "cupy" and kind.__name__ == "ndarray"
    return _read_cupy if is_cupy else _read_interface


def _read_cupy(array: Any) -> ArrayInfo:
    return ArrayInfo(array.data.ptr, *_layout(array.shape, array.strides, array.dtype.str))


def _read_interface(array: Any) -> ArrayInfo:
    interface = interface_of(array)
    strides = interface.get("strides")
    if strides is not None:
        strides = tuple(strides)
    layout = _layout(tuple(interface["shape"]), strides, str(interface["typestr"]))
    return ArrayInfo(int(interface["data"][0]), *layout)


@lru_cache(maxsize=_REMEMBERED)
def _layout(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, typestr: str
) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """ArrayInfo but for the address, of strides in bytes; None: without gaps."""
    dtype = np.dtype(typestr)
    name = "bfloat16" if typestr == _BFLOAT16 else dtype.name
    if strides is None:
        return shape, _contiguous_strides(shape), name, dtype.itemsize
    assert all(stride % dtype.itemsize == 0 for stride in strides), f"{strides=} of {typestr}"
    in_elements = tuple(stride // dtype.itemsize for stride in strides)
    return shape, in_elements, name, dtype.itemsize


@lru_cache(maxsize=_REMEMBERED)
def _has_contiguous_axes(shape: tuple[int, ...], strides: tuple[int, ...], count: int) -> bool:
    if 0 in shape:
        return True
    expected = _contiguous_strides(shape)
    return all(
        shape[axis] == 1 or strides[axis] == expected[axis]
        for axis in range(len(shape) - count, len(shape))
    )


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)
