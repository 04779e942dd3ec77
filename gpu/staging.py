"""Copies from the host to the device through two pinned buffers: neither side waits for the other.

Memory that the system may move has to be copied to pinned memory before a GPU can fetch it. Here
that copy is the one that converts to the type wanted, and it fills one buffer while the device
fetches the other.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

BUFFER_BYTES = 16 << 20
"""Fetched in well below a millisecond, and long enough that calls cost nothing beside it."""
_ALIGNMENT = 64


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait until everything queued before it is done."""
        ...


class CopyEngine(Protocol):
    """What staging needs of a device; all of it is in order on one stream."""

    def pinned_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Pinned memory as the host sees it."""
        ...

    def copy_async(self, target: Any, pinned: npt.NDArray[Any]) -> None:
        """Queue a copy; `pinned` may not change before an event that is recorded afterwards."""
        ...

    def record(self) -> Event: ...


class Staging:
    """Two pinned buffers, filled by turns from their beginning to their end.

    A buffer is filled again only after the device has fetched what lay in it; until it is full, no
    copy waits for anything. They are allocated by the first copy.
    """

    def __init__(self, engine: CopyEngine, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._engine = engine
        self._buffer_bytes = buffer_bytes
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._fetched: list[Event | None] = [None, None]
        self._current = 0
        self._used = 0

    def copy(self, target: Any, source: npt.NDArray[Any]) -> None:
        """Queue target = source, rounded to nearest even to target's dtype, in order on the stream.

        target is contiguous, on the device, and as large as source, which may change as soon as
        this returns.
        """
        if source.size == 0:
            return
        flat, to = source.reshape(-1), target.reshape((-1,))
        start = 0
        while start < flat.size:
            free = self._free(to.dtype.itemsize)
            count = min(flat.size - start, len(free) // to.dtype.itemsize)
            nbytes = count * to.dtype.itemsize
            pinned = free[:nbytes].view(to.dtype)
            np.copyto(pinned, flat[start : start + count], casting="unsafe")
            self._engine.copy_async(to[start : start + count], pinned)
            self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            start += count

    def close(self) -> None:
        """Give the buffers back, once the device has fetched what lies in them."""
        if self._buffers:
            self._engine.record().synchronize()
        self._buffers = []
        self._fetched = [None, None]
        self._used = 0

    def _free(self, itemsize: int) -> npt.NDArray[np.uint8]:
        """What is left of the buffer in use; the whole of the other one if that is no element."""
        if not self._buffers:
            self._buffers = [self._engine.pinned_buffer(self._buffer_bytes) for _ in range(2)]
        if self._buffer_bytes - self._used < itemsize:
            self._fetched[self._current] = self._engine.record()
            self._current = 1 - self._current
            self._used = 0
            fetched = self._fetched[self._current]
            if fetched is not None:
                fetched.synchronize()
        return self._buffers[self._current][self._used :]
