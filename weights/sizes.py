"""What weights will take in memory, known before any is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from rawpaged.models.config import ModelConfig
from rawpaged.weights.names import expected_shapes
from rawpaged.weights.tensors import TensorSource


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes by type, the largest first; padding, and the zeros of absent biases, are left out."""

    by_type: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_type.values())

    def describe(self) -> str:
        """The types, as in "Q4_1 and Q8_0"; those that are nothing beside the rest left out."""
        *names, last = [name for name, size in self.by_type.items() if 100 * size > self.total]
        return f"{', '.join(names)} and {last}" if names else last


def weight_sizes(
    config: ModelConfig,
    dtype: str,
    tensors: TensorSource | None = None,
    block_bits: Mapping[str, float] | None = None,
) -> WeightSizes:
    """Of a model in `dtype`, but for the tensors of types in `block_bits`, bits of a weight each.

    Without tensors there are none of these.
    """
    item = 4 if dtype == "float32" else 2
    sizes = {dtype: 0}
    for name, shape in expected_shapes(config).items():
        kept = None if tensors is None else kept_type(tensors, name, block_bits or {})
        if kept is None:
            sizes[dtype] += item * prod(shape)
        else:
            assert block_bits is not None
            sizes[kept] = sizes.get(kept, 0) + int(prod(shape) * block_bits[kept] / 8)
    by_type = sorted(sizes.items(), key=lambda size: -size[1])
    return WeightSizes(dict(by_type))


def kept_type(
    tensors: TensorSource, name: str, block_bits: Mapping[str, float]
) -> str | None:
    """The type of blocks that a tensor stays in; None for one that becomes numbers.

    Only matrices stay: norms and biases are vectors.
    """
    if name not in tensors.names or len(tensors.shape(name)) != 2:
        return None
    type_name = tensors.dtype(name)
    return type_name if type_name in block_bits else None
