"""Inputs and float64 results of the row-wise ops, for every backend to be held against.

`rounded` is how the backend stores activations: results are those of the rounded inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawpaged.backend import LogitEdits
from tests import reference

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Rounding = Callable[[Float32], Float32]

NORM_SIZES = (1, 7, 8, 64, 100, 576)


def stored(x: Float32, dtype: str) -> Float32:
    """x as it comes back out of memory of that type."""
    types: dict[str, Any] = {
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
    }
    return x.astype(types[dtype]).astype(np.float32)


def exact(x: Float32) -> Float32:
    """Activations are float32."""
    return x


def normal(rng: np.random.Generator, *shape: int) -> Float32:
    return rng.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True, slots=True)
class NormCase:
    """RMSNorm of x, or of x + residual."""

    x: Float32
    residual: Float32
    weight: Float32
    eps: float
    expected: Float64


def norm_case(size: int) -> NormCase:
    """Rows of the residual stream."""
    rng = np.random.default_rng(size)
    x, weight = normal(rng, 5, size), normal(rng, size)
    return NormCase(x, np.zeros_like(x), weight, 1e-5, reference.rms_norm(x, weight, 1e-5))


def head_norm_case(size: int = 32, rounded: Rounding = exact) -> NormCase:
    """x [3, 6, size], whose heads [1, 4) are normalised and whose others stay."""
    rng = np.random.default_rng(1)
    x, weight = rounded(normal(rng, 3, 6, size)), normal(rng, size)
    expected = x.astype(np.float64)
    expected[:, 1:4] = reference.rms_norm(x[:, 1:4], weight, 1e-6)
    return NormCase(x, np.zeros_like(x), weight, 1e-6, expected)


def add_norm_case(size: int = 576, rows: int = 70, rounded: Rounding = exact) -> NormCase:
    """The residual gets x before it is normalised."""
    rng = np.random.default_rng(2)
    x, residual = rounded(normal(rng, rows, size)), normal(rng, rows, size)
    weight = normal(rng, size)
    expected = reference.rms_norm(x + residual, weight, 1e-5)
    return NormCase(x, residual, weight, 1e-5, expected)


@dataclass(frozen=True, slots=True)
class RopeCase:
    """x [n, heads, head_dim], whose first three heads are rotated."""

    x: Float32
    positions: npt.NDArray[np.int32]
    cos_sin: Float32
    expected: Float64


def rope_case(rounded: Rounding = exact, head_dim: int = 16) -> RopeCase:
    rng = np.random.default_rng(3)
    half = head_dim // 2
    frequencies = 100.0 ** -(np.arange(half) / half)
    angles = np.arange(50)[:, None] * frequencies
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    x = rounded(normal(rng, 4, 5, head_dim))
    positions = np.array([0, 49, 7, 7], np.int32)
    expected = x.astype(np.float64)
    expected[:, :3] = reference.rope(x[:, :3], positions, frequencies)
    return RopeCase(x, positions, cos_sin, expected)


@dataclass(frozen=True, slots=True)
class SiluCase:
    """gate_up [n, 2 * d] and the product [n, d]."""

    gate_up: Float32
    expected: Float64


def silu_case(rounded: Rounding = exact) -> SiluCase:
    gate_up = 10 * normal(np.random.default_rng(4), 9, 224)
    gate_up[0, :4] = [0.0, 1000.0, -1000.0, 88.0]
    gate_up = rounded(gate_up)
    with np.errstate(over="ignore"):
        return SiluCase(gate_up, reference.silu_and_mul(gate_up))


@dataclass(frozen=True, slots=True)
class EmbedCase:
    """Rows of a table by token id."""

    table: Float32
    token_ids: npt.NDArray[np.int32]


def embed_case() -> EmbedCase:
    table = normal(np.random.default_rng(0), 77, 40)
    return EmbedCase(table, np.array([0, 76, 31, 32, 5, 5], np.int32))


@dataclass(frozen=True, slots=True)
class GatherCase:
    """Rows of x by index."""

    x: Float32
    rows: npt.NDArray[np.int32]


def gather_case() -> GatherCase:
    return GatherCase(normal(np.random.default_rng(5), 9, 12), np.array([8, 0, 8], np.int32))


@dataclass(frozen=True, slots=True)
class EditCase:
    """Logits before and after their edits."""

    logits: Float32
    edits: LogitEdits
    expected: Float64


def edit_case() -> EditCase:
    logits = normal(np.random.default_rng(2), 3, 10)
    edits = LogitEdits(
        rows=np.array([0, 0, 1, 1, 2], np.int32),
        token_ids=np.array([3, 9, 3, 0, 5], np.int32),
        bias=np.array([0.5, 0, -2, 0, -np.inf], np.float32),
        seen=np.array([True, True, True, False, False]),
        counts=np.array([0, 2, 1, 3, 0], np.int32),
        repetition_penalty=np.array([1.3, 0.7, 1], np.float32),
        frequency_penalty=np.array([0.5, 0, 1], np.float32),
        presence_penalty=np.array([0.25, -1, 2], np.float32),
    )
    expected = logits.astype(np.float64)
    for i in range(5):
        row, token = edits.rows[i], edits.token_ids[i]
        expected[row, token] = reference.edit_logit(
            expected[row, token],
            bias=edits.bias[i],
            seen=bool(edits.seen[i]),
            count=int(edits.counts[i]),
            repetition=edits.repetition_penalty[row],
            frequency=edits.frequency_penalty[row],
            presence=edits.presence_penalty[row],
        )
    return EditCase(logits, edits, expected)
