"""Opening what a user named: regular files only, failures as CheckpointError."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.errors import CheckpointError
from rawpaged.models.fields import RepeatedKeyError, json_complaint, show

MAX_JSON_BYTES = 100_000_000


@contextmanager
def os_errors_as_checkpoint_errors(name: str) -> Iterator[None]:
    """Denied permissions, failing disks and the like, below the file or directory `name`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read: {error}") from error


def file_size(path: Path) -> int:
    """Bytes of a regular file; anything else (a pipe would block for ever) is refused."""
    with os_errors_as_checkpoint_errors(str(path)):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file")
    return status.st_size


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The whole file as a read-only mapping u8[size]; an empty file is refused."""
    if file_size(path) == 0:
        raise CheckpointError(f"{path}: is empty")
    with os_errors_as_checkpoint_errors(str(path)):
        return np.memmap(path, dtype=np.uint8, mode="r")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` that refuses a key given twice: readers differ in which one they keep."""
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RepeatedKeyError(f"key {show(key)} is given twice")
            seen.add(key)
    return values


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises CheckpointError naming the file."""
    if file_size(path) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: is larger than {MAX_JSON_BYTES} bytes")
    with os_errors_as_checkpoint_errors(str(path)):
        raw = path.read_bytes()
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {json_complaint(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return value
