"""Safetensors files, mapped: a tensor read is a view of the file, copied by whoever needs a copy.

The `safetensors` library is not used to read. It copies each tensor into a new buffer (measured
with 0.8.0: 200 MB of anonymous memory for a tensor of 200 MB), its errors do not always name the
tensor, and once the header has been checked here a read is one slice of the mapping. The checks
are those of the library and the format's description; the tests compare both on the same files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawpaged.errors import CheckpointError
from rawpaged.models.fields import json_complaint, show
from rawpaged.weights.files import map_file, read_json, unique_keys

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSION = 1 << 62
MAX_DIMENSIONS = 64  # NumPy's limit
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Bits an element takes, for every type the format knows.
TYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
WEIGHT_TYPES: dict[str, npt.DTypeLike] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its bytes are [start, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse_header(path: Path, data: npt.NDArray[np.uint8]) -> dict[str, TensorEntry]:
    """The tensors of a file that is mapped as `data`, after checking all that the header claims.

    Every tensor lies within the file, its span is what shape and type need, and the spans fill
    the file without gap or overlap. Raises CheckpointError naming the file and the tensor.
    """
    header, data_start = _read_header(path, data)
    entries = {}
    for name, value in header.items():
        if name == "__metadata__":
            _check_metadata(path, value)
        else:
            entries[name] = _entry(path, name, value, data_start)
    _check_layout(path, entries, data_start, len(data))
    return entries


def _read_header(path: Path, data: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise CheckpointError(f"{path}: is too short for a safetensors file ({len(data)} bytes)")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise CheckpointError(
            f"{path}: is no safetensors file, or truncated: it claims a header of {length} bytes, "
            f"the file has {len(data)} and the limit is {MAX_HEADER_BYTES}"
        )
    text = data[8 : 8 + length].tobytes()
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: is no safetensors file: its header is no JSON object")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        complaint = json_complaint(error)
        raise CheckpointError(f"{path}: header is not valid JSON: {complaint}") from None
    assert isinstance(header, dict)  # it starts with a brace
    return header, 8 + length


def _check_metadata(path: Path, value: object) -> None:
    is_strings = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if not is_strings:
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {show(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: must have dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TYPE_BITS:
        raise CheckpointError(f"{where}: unknown dtype {show(dtype)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: bad shape {show(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: bad data_offsets {show(offsets)}")
    bits = prod(shape) * TYPE_BITS[dtype]
    span = offsets[1] - offsets[0]
    if bits != 8 * span:
        raise CheckpointError(
            f"{where}: {dtype} of shape {show(shape)} needs {(bits + 7) // 8} bytes, "
            f"data_offsets {offsets} span {span}"
        )
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= MAX_DIMENSION for value in values
    )


def _check_layout(
    path: Path, entries: dict[str, TensorEntry], data_start: int, file_bytes: int
) -> None:
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        where = f"{path}: tensor {show(name)}"
        if entry.end > file_bytes:
            raise CheckpointError(
                f"{where}: ends at byte {entry.end}, the file has {file_bytes}: it is truncated"
            )
        if entry.start != position:
            kind = "overlaps another" if entry.start < position else "follows a gap"
            raise CheckpointError(f"{where}: {kind} (byte {entry.start}, expected {position})")
        position = entry.end
    if position != file_bytes:
        raise CheckpointError(
            f"{path}: {file_bytes - position} bytes at the end belong to no tensor"
        )


class SafetensorsFile:
    """One file, checked and mapped on construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        self.entries = parse_header(path, self._data)

    def read(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of the file; a copy where the file does not align the tensor."""
        entry = self.entries[name]
        if entry.dtype not in WEIGHT_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {show(name)} has type {entry.dtype}; "
                f"supported: {', '.join(WEIGHT_TYPES)}"
            )
        raw = self._data[entry.start : entry.end]
        array = np.asarray(raw).view(WEIGHT_TYPES[entry.dtype]).reshape(entry.shape)
        return array if array.flags.aligned else array.copy()


class SafetensorsSource:
    """TensorSource over the shards of one checkpoint."""

    def __init__(self, files: dict[str, SafetensorsFile]) -> None:
        self._files = files

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def dtype(self, name: str) -> str:
        return self._files[name].entries[name].dtype

    def nbytes(self, name: str) -> int:
        entry = self._files[name].entries[name]
        return entry.end - entry.start

    def file_of(self, name: str) -> Path:
        return self._files[name].path

    def stored_name(self, name: str) -> str:
        return name

    def read_blocks(self, name: str) -> npt.NDArray[np.uint8]:
        raise CheckpointError(f"{self.file_of(name)}: tensor {name!r} has no quantised blocks")

    def is_supported(self, name: str) -> bool:
        return self.dtype(name) in WEIGHT_TYPES

    def read(self, name: str) -> npt.NDArray[Any]:
        return self._files[name].read(name)


def open_safetensors(directory: Path) -> SafetensorsSource:
    """The tensors of `model.safetensors`, or of the shards that its index lists.

    Raises CheckpointError when there are none, or any file is damaged or missing.
    """
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if single.exists():
        file = SafetensorsFile(single)
        return SafetensorsSource(dict.fromkeys(file.entries, file))
    if index.exists():
        return SafetensorsSource(dict(_open_shards(index)))
    raise CheckpointError(f"{directory}: {_why_no_weights(directory)}")


def _open_shards(index: Path) -> Iterator[tuple[str, SafetensorsFile]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map tensor names to files")
    shards: dict[str, SafetensorsFile] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_shard_name(file_name):
            raise CheckpointError(
                f"{index}: tensor {show(name)} is said to be in {show(file_name)}, "
                "which is no name of a safetensors file in the same directory"
            )
        if file_name not in shards:
            path = index.parent / file_name
            if not path.exists():
                raise CheckpointError(f"{path}: is missing; {index.name} lists it")
            shards[file_name] = SafetensorsFile(path)
        if name not in shards[file_name].entries:
            raise CheckpointError(
                f"{index.parent / file_name}: has no tensor {show(name)}; {index.name} lists it"
            )
        yield name, shards[file_name]


def _is_shard_name(name: str) -> bool:
    return name.endswith(".safetensors") and not any(char in name for char in "/\\\0")


def _why_no_weights(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if pickles:
        return (
            f"holds only {', '.join(pickles[:4])}: pickled weights can run code and are never "
            "loaded; convert them to safetensors"
        )
    if others:
        return (
            f"holds neither {SINGLE_NAME} nor {INDEX_NAME} (it holds {', '.join(others[:4])}; "
            "a GGUF file is given by its own path)"
        )
    return f"holds neither {SINGLE_NAME} nor {INDEX_NAME}"
