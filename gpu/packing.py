"""Several small arrays in one buffer, so that one copy brings them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.gpu.device import Device

_ALIGNMENT = 16


def upload_together(device: Device, arrays: Sequence[npt.NDArray[Any]]) -> list[Any]:
    """The arrays on the device, brought there by one copy."""
    layout = Layout()
    for i, array in enumerate(arrays):
        layout.add(str(i), array.dtype.name, array.shape)
    host = np.zeros(layout.nbytes, np.uint8)
    for view, array in zip(layout.views(host).values(), arrays, strict=True):
        view[...] = array
    return list(layout.views(device.upload(host)).values())


class Layout:
    """Places of named arrays in one buffer of bytes."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        self.nbytes = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        element = np.dtype(dtype)
        self._places[name] = (self.nbytes, element, shape)
        size = int(np.prod(shape)) * element.itemsize
        self.nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, buffer: Any) -> dict[str, npt.NDArray[Any]]:
        """The arrays over a buffer of NumPy or CuPy."""
        views = {}
        for name, (start, dtype, shape) in self._places.items():
            size = int(np.prod(shape)) * dtype.itemsize
            views[name] = buffer[start : start + size].view(dtype).reshape(shape)
        return views
