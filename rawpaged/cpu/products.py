"""One step of a sum of products, in each kind of arithmetic, as LLVM IR.

    float32        one k: x f32, weights sixteen f32; a multiply-add
    bfloat16       two k: x two f32, weights sixteen words of two bf16, widened in registers;
                   a multiply-add for the lower halves, then one for the upper
    bfloat16_dot   two k: x a word of two bf16, weights like that; two products in one sum, by
                   AVX512-BF16

A sum is one chain in the order of k, whatever is summed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rawpaged.cpu.vector_ir import F32, I32, V16F, V16I, VectorBuilder

Arithmetic = Literal["float32", "bfloat16", "bfloat16_dot"]

_UPPER_HALF = -(1 << 16)


def x_bytes_of_step(arithmetic: Arithmetic) -> int:
    """Bytes of a row of x that a step takes."""
    return 8 if arithmetic == "bfloat16" else 4


class Products:
    """Emits steps for `len(x_places)` rows times `len(weights)` vectors of columns."""

    def __init__(self, build: VectorBuilder, arithmetic: Arithmetic) -> None:
        self._build = build
        self._arithmetic = arithmetic

    def step(
        self, x_places: Sequence[Any], weights: Sequence[Any], sums: Sequence[Any]
    ) -> list[Any]:
        """sums[row * num_vectors + vector] with the next products added.

        x_places are the addresses of what the step takes of each row; weights are the vectors
        that `load` has loaded.
        """
        if self._arithmetic == "bfloat16_dot":
            return self._dots(x_places, weights, sums)
        if self._arithmetic == "float32":
            return self._multiply_add(x_places, 0, weights, sums)
        builder = self._build.builder
        shift, mask = self._build.constant(16), self._build.constant(_UPPER_HALF)
        lower = [builder.bitcast(builder.shl(pairs, shift), V16F) for pairs in weights]
        upper = [builder.bitcast(builder.and_(pairs, mask), V16F) for pairs in weights]
        sums = self._multiply_add(x_places, 0, lower, sums)
        return self._multiply_add(x_places, 4, upper, sums)

    def load(self, address: Any, vector: int = 0) -> Any:
        """The weights of a step for columns 16 * vector and on from an address."""
        if self._arithmetic == "float32":
            return self._build.load(address, V16F, 64 * vector, align=4)
        return self._build.load(address, V16I, 64 * vector, align=2)

    def _dots(
        self, x_places: Sequence[Any], weights: Sequence[Any], sums: Sequence[Any]
    ) -> list[Any]:
        build = self._build
        result = []
        for row, place in enumerate(x_places):
            x = build.broadcast(build.load(place, I32, align=2))
            for j, pairs in enumerate(weights):
                result.append(build.bfloat16_dot(sums[row * len(weights) + j], x, pairs))
        return result

    def _multiply_add(
        self, x_places: Sequence[Any], offset: int, weights: Sequence[Any], sums: Sequence[Any]
    ) -> list[Any]:
        build = self._build
        result = []
        for row, place in enumerate(x_places):
            x = build.broadcast(build.load(place, F32, offset, align=4))
            for j, weight in enumerate(weights):
                result.append(build.multiply_add(x, weight, sums[row * len(weights) + j]))
        return result
