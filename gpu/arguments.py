"""What a launch's arguments become: arrays as they are, numbers as scalars of the exact C types.

CuPy would pass a Python int as int64 and a float as double without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from rawpaged.gpu.arrays import ARRAY_INTERFACES

SCALAR_TYPES: Mapping[str, type[np.generic]] = {
    "int": np.int32,
    "long long": np.int64,
    "unsigned": np.uint32,
    "float": np.float32,
}
"""Types of parameters that are no pointers, by their names in C."""

_REMEMBERED = 4096


def scalar_converter(c_type: str, what: str) -> Callable[[Any], Any]:
    """Makes NumPy scalars of numbers; raises OverflowError for what is no `c_type`.

    `what` names the parameter in the message. A float is rounded.
    """
    kind = SCALAR_TYPES[c_type]
    if not issubclass(kind, np.integer):
        return _as_float
    limits = np.iinfo(kind)
    # NumPy's scalars cannot be changed, and the same sizes come again with every layer.
    scalar = lru_cache(maxsize=_REMEMBERED)(kind)
    return partial(_as_integer, scalar, int(limits.min), int(limits.max), f"{c_type} {what}")


def as_array(what: str, arg: Any) -> Any:
    """The array itself; raises TypeError for anything else, also of no axes."""
    if not is_array(arg):
        raise TypeError(f"{what} must be an array, not {arg!r}")
    return arg


def is_array(arg: Any) -> bool:
    """Whether arg describes itself as an array of at least one axis; NumPy's scalars have none."""
    # mypy takes type[Any] for unhashable.
    has_axes = _is_array_type(type(arg)) and arg.ndim > 0  # type: ignore[arg-type]
    return has_axes or _describes_an_array(arg)


@lru_cache(maxsize=64)
def _is_array_type(kind: type) -> bool:
    """Whether all objects of a class are arrays, without making one describe itself."""
    return hasattr(kind, "ndim") and any(hasattr(kind, name) for name in ARRAY_INTERFACES)


def _describes_an_array(arg: Any) -> bool:
    found = (getattr(arg, name, None) for name in ARRAY_INTERFACES)
    return any(interface is not None and interface["shape"] for interface in found)


def _as_float(number: Any) -> Any:
    return np.float32(float(number))


def _as_integer(scalar: Callable[[int], Any], low: int, high: int, what: str, number: Any) -> Any:
    whole = number if type(number) is int else int(number)
    if not low <= whole <= high or whole != number:
        raise OverflowError(f"{number} is no {what}")
    return scalar(whole)
