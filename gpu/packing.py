"""Several small arrays in one buffer, so that one copy brings them over; buffers used again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.gpu.device import Device

_ALIGNMENT = 16
_LEAST_BYTES = 4096


class ReusedMemory:
    """Device memory for one purpose, given anew by each call; it grows to the largest call's.

    Work queued before has read what it was given, since what overwrites it is queued later on the
    same stream. So steps of a size that has been there allocate nothing.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer: Any = None

    def take(self, nbytes: int) -> Any:
        """u8[nbytes], of any content; what was taken before is not to be used any more."""
        if self._buffer is None or self._buffer.shape[0] < nbytes:
            self._buffer = None
            size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
            self._buffer = self._device.empty((size,), "uint8")
        return self._buffer[:nbytes]


def upload_together(
    device: Device, arrays: Sequence[npt.NDArray[Any]], memory: ReusedMemory | None = None
) -> list[Any]:
    """The arrays on the device, brought there by one copy; in `memory` if that is given."""
    layout = Layout()
    for i, array in enumerate(arrays):
        layout.add(str(i), array.dtype.name, array.shape)
    host = np.zeros(layout.nbytes, np.uint8)
    for view, array in zip(layout.views(host).values(), arrays, strict=True):
        view[...] = array
    if memory is None:
        return list(layout.views(device.upload(host)).values())
    buffer = memory.take(layout.nbytes)
    device.write(buffer, host)
    return list(layout.views(buffer).values())


class Layout:
    """Places of named arrays in one buffer of bytes."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[slice, np.dtype[Any], tuple[int, ...]]] = {}
        self.nbytes = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        element = np.dtype(dtype)
        size = math.prod(shape) * element.itemsize
        self._places[name] = (slice(self.nbytes, self.nbytes + size), element, shape)
        self.nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, buffer: Any) -> dict[str, npt.NDArray[Any]]:
        """The arrays over a buffer of NumPy or CuPy."""
        return {
            name: buffer[place].view(dtype).reshape(shape)
            for name, (place, dtype, shape) in self._places.items()
        }
