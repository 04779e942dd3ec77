"""Byte counts of the weight dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rawpaged.models.weights import LlamaLayer, LlamaWeights


@dataclass(frozen=True, slots=True)
class FakeLinear:
    in_features: int
    out_features: int
    nbytes: int
    row_types: tuple[tuple[str | None, int], ...] = ()


def layer(norm: np.ndarray | None) -> LlamaLayer:
    vector = np.zeros(8, np.float32)
    linears = [FakeLinear(8, 8, size) for size in (100, 200, 300, 400)]
    return LlamaLayer(vector, linears[0], norm, norm, linears[1], vector, linears[2], linears[3])


def test_layer_bytes() -> None:
    assert layer(None).nbytes == 1000 + 2 * 32
    assert layer(np.zeros(4, np.float32)).nbytes == 1000 + 2 * 32 + 2 * 16


def test_tied_embedding_is_counted_once() -> None:
    embed, head = FakeLinear(8, 10, 1000), FakeLinear(8, 10, 1000)
    norm = np.zeros(8, np.float32)
    assert LlamaWeights(embed, (layer(None),), norm, embed).nbytes == 1000 + 1064 + 32
    assert LlamaWeights(embed, (layer(None),), norm, head).nbytes == 2000 + 1064 + 32
