"""Rows of blocks of every type with bits at random, and what they stand for."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

TYPE_NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Upper bytes of numbers of half precision, by their place in a block.
_HALVES = {"Q4_1": (1, 3), "Q5_1": (1, 3), "Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)}


def block_size(type_name: str) -> int:
    """Weights in a stored block."""
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0])


def random_rows(
    rng: np.random.Generator, type_name: str, out_features: int, in_features: int
) -> npt.NDArray[np.uint8]:
    """u8[out_features, row_bytes]: all bits at random but those that make scales huge."""
    size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    shape = (out_features, in_features // size, block_bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    for place in _HALVES.get(type_name, (1,)):
        blocks[..., place] = (blocks[..., place] & 0x83) | 0x24  # 2**-6 to 2**-4, either sign
    return blocks.reshape(out_features, -1)


def dequantized(rows: npt.NDArray[np.uint8], type_name: str) -> npt.NDArray[np.float32]:
    """As the `gguf` library reads them."""
    return np.asarray(
        gguf.dequantize(rows, gguf.GGMLQuantizationType[type_name]), dtype=np.float32
    )
