"""Range-checked look-ups in a mapping that came out of a file; nothing in it is trusted."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

from rawpaged.errors import CheckpointError


def show(value: object) -> str:
    """`repr` cut to what fits in a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"<{type(value).__name__}>"


class RepeatedKeyError(ValueError):
    """A key stands twice in a JSON object: readers differ in which one they keep."""


def json_complaint(error: ValueError | RecursionError) -> str:
    """Why `json.loads` refused its text, without the interpreter's advice to its programmer."""
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RepeatedKeyError):
        return str(error)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it holds an integer of too many digits"


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to `values`. A null counts as absent; every failure is a CheckpointError.

    A look-up without a default makes the field mandatory.
    """

    values: Mapping[str, object]
    prefix: str = ""
    """Put before a key in messages, such as "rope_scaling."."""

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; a bool or a float is none."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "must be an integer")
        if not low <= value <= high:
            raise self.error(key, f"must be from {low} to {high}")
        return value

    def number(
        self,
        key: str,
        low: float,
        high: float,
        default: float | None = None,
        *,
        above_low: bool = False,
    ) -> float:
        """A finite number in [low, high], or in (low, high] with `above_low`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "must be a number")
        if not low <= value <= high or (above_low and value == low):  # NaN compares false
            bound = "greater than" if above_low else "at least"
            raise self.error(key, f"must be {bound} {low:g} and at most {high:g}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        return self.number(key, low, high) if self.has(key) else None

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def error(self, key: str, complaint: str) -> CheckpointError:
        """The error for a field that is there."""
        return CheckpointError(f"{self.prefix}{key}={show(self.values.get(key))} {complaint}")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.prefix}{key} is missing")
        return default
