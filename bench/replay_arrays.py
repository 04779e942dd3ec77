"""Arrays, weights and KV caches of random numbers on any backend.

Floats have bfloat16's values, so that they are the same on backends of either type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawpaged.backend import (
    LARGEST_ELEMENT,
    Backend,
    KVCache,
    KVScales,
    LinearWeight,
    QuantizedRows,
)
from rawpaged.engine.op_recording import LinearArg, RowsArg
from rawpaged.errors import RecordingError
from rawpaged.gpu.device import Device, numpy_dtype

Floats = npt.NDArray[np.float32]
Rows = Floats | QuantizedRows
"""Of a weight."""

_DRAWN = 1_500_008
"""Numbers drawn for an array; a larger one has them again. No power of two, so that an index that
has lost its upper bits does not meet the same numbers."""
_FILLED_TOKENS = 2048
_HIGH_BYTE_OF_ONE = 0x3C
"""Of a half."""
_LARGEST_NORMAL = 6.0
"""Keys and values beyond it are clamped in a cache of bytes."""


def normal(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    size = int(np.prod(shape))
    drawn = rng.standard_normal(min(size, _DRAWN), np.float32)
    rounded = drawn.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.resize(rounded, size).reshape(shape)


def rotations(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """cos and sin of random angles, so that rotating again and again changes no lengths."""
    angles = rng.uniform(0, 2 * np.pi, (shape[0], shape[1] // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def new_array(backend: Backend, values: npt.NDArray[np.float32], dtype: str) -> Any:
    """The values in an array of the backend, of its activations' type or of float32."""
    # Of backends only the GPU's keeps activations in another type than the host's.
    device: Device | None = getattr(backend, "device", None)
    if device is not None:
        return device.upload(values.astype(numpy_dtype(dtype)))
    return backend.upload(values)


def random_rows(backend: Backend, arg: LinearArg, rng: np.random.Generator) -> list[Rows]:
    """Parts of a weight, small as a model's are; blocks that the backend has not are floats."""
    made: list[Rows] = []
    for part in arg.row_types or (RowsArg(None, arg.out_features),):
        if part.type is not None and part.type in backend.block_bits:
            made.append(_blocks(part.type, part.rows, arg.in_features, rng))
        else:
            rows = normal((part.rows, arg.in_features), rng)
            made.append(rows * np.float32(arg.in_features**-0.5))
    return made


def pack_rows(backend: Backend, parts: Sequence[Rows]) -> LinearWeight:
    """The rows of all parts as one weight."""
    floats = [part for part in parts if not isinstance(part, QuantizedRows)]
    if len(floats) < len(parts):
        return backend.pack_quantized(parts, None)
    return backend.pack_linear(floats[0] if len(floats) == 1 else np.concatenate(floats), None)


def new_cache(
    backend: Backend, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
) -> KVCache:
    """A pool of the backend's kv_cache_dtype; scales of bytes fit standard normal numbers."""
    scales = None
    if largest := LARGEST_ELEMENT.get(backend.kv_cache_dtype):
        scale = np.full(num_kv_heads, _LARGEST_NORMAL / largest, np.float32)
        scales = KVScales(scale, scale)
    return backend.new_kv_cache(num_blocks, num_kv_heads, head_dim, block_size, scales)


def fill_cache(
    backend: Backend, cache: KVCache, shape: tuple[int, int, int, int], rng: np.random.Generator
) -> None:
    """Standard normal keys and values in all slots of [num_blocks, heads, head_dim, block_size]."""
    num_blocks, num_kv_heads, head_dim, block_size = shape
    cos_sin = np.zeros((1, head_dim), np.float32)
    cos_sin[:, : head_dim // 2] = 1
    num_slots = num_blocks * block_size
    for first in range(0, num_slots, _FILLED_TOKENS):
        slots = np.arange(first, min(first + _FILLED_TOKENS, num_slots), dtype=np.int64)
        heads = (len(slots), num_kv_heads, head_dim)
        keys, values = (
            new_array(backend, normal(heads, rng), backend.activation_dtype) for _ in range(2)
        )
        unused = backend.empty((len(slots), num_kv_heads, head_dim), backend.activation_dtype)
        backend.rope_and_store_kv(
            cache,
            unused,
            keys,
            values,
            backend.upload(np.zeros(len(slots), np.int32)),
            backend.upload(cos_sin),
            backend.upload(slots),
        )


def _blocks(type_name: str, rows: int, columns: int, rng: np.random.Generator) -> QuantizedRows:
    """Random blocks; as halves all their bytes are positive and below 1, so scales are finite."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    if columns % block_size:
        raise RecordingError(f"{columns} columns are no whole blocks of {type_name}")
    shape = (rows, columns // block_size * block_bytes)
    drawn = rng.integers(0, _HIGH_BYTE_OF_ONE, min(rows * shape[1], _DRAWN), np.uint8)
    return QuantizedRows(type_name, np.resize(drawn, shape))
