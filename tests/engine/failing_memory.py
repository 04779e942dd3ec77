"""Lets one of NumPy's allocations find no memory: a memory handler in the sense of NEP 49."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_MALLOC = ctypes.CFUNCTYPE(_POINTER, _POINTER, _SIZE)
_CALLOC = ctypes.CFUNCTYPE(_POINTER, _POINTER, _SIZE, _SIZE)
_REALLOC = ctypes.CFUNCTYPE(_POINTER, _POINTER, _POINTER, _SIZE)
_SET_HANDLER, _GET_HANDLER = 304, 305
"""Places in NumPy's table of C functions, from 1.22 on."""
_CAPSULE = b"mem_handler"


class _Handler(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", _POINTER),
        ("malloc", _MALLOC),
        ("calloc", _CALLOC),
        ("realloc", _REALLOC),
        # Stays NumPy's own: it is called while an exception is on its way, which Python code
        # would not survive.
        ("free", _POINTER),
    )


class FailingMemory:
    """NumPy's own handler, which counts allocations and fails one of them; for one thread."""

    def __init__(self) -> None:
        self.count = 0
        self._after: int | None = None
        self._api = _NumpyApi()
        own = self._api.current()
        malloc, calloc, realloc = (
            _with_gil(function) for function in (own.malloc, own.calloc, own.realloc)
        )
        self._handler = _Handler(
            b"failing",
            own.version,
            own.context,
            _MALLOC(lambda c, size: malloc(c, size) if self._has_memory() else None),
            _CALLOC(lambda c, n, size: calloc(c, n, size) if self._has_memory() else None),
            _REALLOC(lambda c, old, size: realloc(c, old, size) if self._has_memory() else None),
            own.free,
        )
        self._capsule = self._api.capsule(self._handler)

    @contextmanager
    def failing(self, after: int | None) -> Iterator[None]:
        """Fail the allocation that comes after `after` others; None: only count."""
        self.count, self._after = 0, after
        before = self._api.set(self._capsule)
        try:
            yield
        finally:
            self._api.set(before)

    def _has_memory(self) -> bool:
        self.count += 1
        return self.count - 1 != self._after


def _with_gil(function: Any) -> Any:
    """The C function, called with the GIL: NumPy's allocators let go of it themselves."""
    address: Any = ctypes.cast(function, _POINTER).value
    return ctypes.PYFUNCTYPE(function.restype, *function.argtypes)(address)


@cache
def failing_memory() -> FailingMemory:
    """One for the process: arrays made meanwhile hold on to it."""
    return FailingMemory()


class _NumpyApi:
    """The functions that get and set the handler."""

    def __init__(self) -> None:
        self._pointer = ctypes.pythonapi.PyCapsule_GetPointer
        self._pointer.restype = _POINTER
        self._pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        core: Any = getattr(np, "_core", None) or np.core
        address = self._pointer(core.multiarray._ARRAY_API, None)
        table = ctypes.cast(address, ctypes.POINTER(_POINTER))
        self.set = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[_SET_HANDLER])
        """Returns the capsule of before."""
        self._get = ctypes.PYFUNCTYPE(ctypes.py_object)(table[_GET_HANDLER])

    def current(self) -> _Handler:
        return _Handler.from_address(self._pointer(self._get(), _CAPSULE))

    def capsule(self, handler: _Handler) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [_POINTER, ctypes.c_char_p, _POINTER]
        return new(ctypes.addressof(handler), _CAPSULE, None)
