"""The header of a GGUF file, read with every length checked against the file first.

`gguf.GGUFReader` is not used for this: it makes a NumPy view of each string (2.4 s for the
49,152-token vocabulary of SmolLM2, a fraction of a second here), follows any count it finds in
the file, and clips reads beyond the end instead of failing. The library's part is the list of
tensor types and their decoding (`rawpaged.weights.gguf`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rawpaged.errors import CheckpointError
from rawpaged.models.fields import show

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Far above any published file: the largest vocabularies, with merges, scores and types, make
# about 1.5 million array elements and 20 MB.
MAX_HEADER_BYTES = 256_000_000
MAX_ARRAY_ELEMENTS = 4_000_000
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

STRING, ARRAY = 8, 9
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q", 6: "f", 12: "d", 7: "?",
}  # fmt: skip

_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor; `shape` has the fastest dimension last, as NumPy does."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    """From the start of the data."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    metadata: dict[str, object]
    """Keys as in the file; values str, int, float, bool or a list of one of them."""
    tensors: dict[str, GGUFTensor]
    data_start: int


class _Cursor:
    """Reads little-endian values from `data`, never past its end."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.offset = 0
        self._buffer = data.data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._elements_left = MAX_ARRAY_ELEMENTS

    def fail(self, complaint: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {complaint} (at byte {self.offset})")

    def need(self, size: int, what: str) -> None:
        if size > self._end - self.offset:
            raise self.fail(f"is truncated or damaged: {what} needs {size} bytes, too many")

    def scalar(self, code: str, what: str) -> int | float | bool:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self._buffer, self.offset)
        self.offset += size
        assert isinstance(value, int | float)
        return value

    def count(self, code: str, what: str) -> int:
        return int(self.scalar(code, what))

    def text(self, what: str) -> str:
        size = self.count("Q", what)
        self.need(size, what)
        raw = bytes(self._buffer[self.offset : self.offset + size])
        try:
            value = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None
        self.offset += size
        return value

    def _texts(self, length: int, what: str) -> list[str]:
        """As `text` for each, in a tenth of the time, since vocabularies are most of a header."""
        buffer, offset, end = self._buffer, self.offset, self._end
        values: list[str] = []
        for _ in range(length):
            start = offset + _SIZE.size
            if start > end:
                break
            stop = start + _SIZE.unpack_from(buffer, offset)[0]
            if stop > end:
                break
            try:
                values.append(str(buffer[start:stop], "utf-8"))
            except UnicodeDecodeError:
                break
            offset = stop
        self.offset = offset
        while len(values) < length:
            values.append(self.text(what))  # says what is wrong with the one that ended the loop
        return values

    def value(self, what: str) -> object:
        """A metadata value with its type in front."""
        kind = self.count("I", what)
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self._array(what)
        if kind not in SCALARS:
            raise self.fail(f"{what} has unknown value type {kind}")
        return self.scalar(SCALARS[kind], what)

    def _array(self, what: str) -> list[object]:
        kind = self.count("I", what)
        length = self.count("Q", what)
        if kind != STRING and kind not in SCALARS:
            raise self.fail(f"{what} is an array of unsupported value type {kind}")
        if length > self._elements_left:
            raise self.fail(
                f"{what} has {length} elements; at most {MAX_ARRAY_ELEMENTS} are read in all"
            )
        self._elements_left -= length
        if kind == STRING:
            self.need(8 * length, what)
            return list(self._texts(length, what))
        dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
        self.need(dtype.itemsize * length, what)
        values = np.frombuffer(self._buffer, dtype, length, self.offset)
        self.offset += values.nbytes
        return list(values.tolist())


def parse_header(path: Path, data: npt.NDArray[np.uint8]) -> GGUFHeader:
    """The header of a file that is mapped as `data`. Raises CheckpointError naming the file.

    Whether the tensors lie within the file depends on their types: `rawpaged.weights.gguf` checks.
    """
    cursor = _Cursor(path, data)
    _check_version(cursor, data[:4].tobytes())
    tensor_count = cursor.count("Q", "tensor count")
    kv_count = cursor.count("Q", "key count")
    # The smallest pair takes 13 bytes (empty key, one-byte value), the smallest tensor 24.
    cursor.need(13 * kv_count, f"metadata of {kv_count} keys")
    metadata: dict[str, object] = {}
    for _ in range(kv_count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.fail(f"metadata key {show(key)} is given twice")
        metadata[key] = cursor.value(f"metadata key {show(key)}")
    cursor.need(24 * tensor_count, f"table of {tensor_count} tensors")
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(tensor_count):
        tensor = _tensor(cursor)
        if tensor.name in tensors:
            raise cursor.fail(f"tensor {show(tensor.name)} is given twice")
        tensors[tensor.name] = tensor
    alignment = _alignment(cursor, metadata, tensors)
    data_start = -(-cursor.offset // alignment) * alignment
    return GGUFHeader(metadata, tensors, data_start)


def _check_version(cursor: _Cursor, magic: bytes) -> None:
    if magic != MAGIC:
        raise cursor.fail(f"is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    cursor.offset = 4
    version = cursor.count("I", "version")
    if version & 0xFFFF == 0 and version:
        raise cursor.fail("is a big-endian GGUF file; only little-endian ones are supported")
    if version not in VERSIONS:
        raise cursor.fail(f"has GGUF version {version}; supported: 2 and 3")


def _tensor(cursor: _Cursor) -> GGUFTensor:
    name = cursor.text("a tensor name")
    what = f"tensor {show(name)}"
    dimensions = cursor.count("I", what)
    if dimensions > MAX_DIMENSIONS:
        raise cursor.fail(f"{what} has {dimensions} dimensions; at most {MAX_DIMENSIONS}")
    shape = tuple(cursor.count("Q", what) for _ in range(dimensions))[::-1]
    if prod(shape) >= 1 << 63:
        raise cursor.fail(f"{what} has too many elements: shape {list(shape)}")
    type_id = cursor.count("I", what)
    return GGUFTensor(name, type_id, shape, offset=cursor.count("Q", what))


def _alignment(
    cursor: _Cursor, metadata: dict[str, object], tensors: dict[str, GGUFTensor]
) -> int:
    alignment = metadata.get("general.alignment", 32)
    is_power_of_two = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
    if not isinstance(alignment, int) or not is_power_of_two or alignment > MAX_ALIGNMENT:
        raise cursor.fail(f"general.alignment={show(alignment)} is no power of two up to 2**20")
    for tensor in tensors.values():
        if tensor.offset % alignment:
            raise cursor.fail(
                f"tensor {show(tensor.name)} is not aligned: offset {tensor.offset}, "
                f"alignment {alignment}"
            )
    return alignment
