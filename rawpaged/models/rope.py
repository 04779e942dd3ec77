"""Tables of rotary embedding angles, as transformers' `modeling_rope_utils` defines them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rawpaged.models.config import RopeConfig

Float64 = npt.NDArray[np.float64]


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> npt.NDArray[np.float32]:
    """f32[num_positions, head_dim]: cosines of the head_dim / 2 angles, then their sines.

    Computed in float64. The attention factor of YaRN scales both halves, and so q and k.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * attention_factor(rope)
    return table.astype(np.float32)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float64:
    """Radians a position turns each of the head_dim / 2 planes by."""
    frequencies: Float64 = rope.rope_theta ** (
        -np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    )
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    elif rope.rope_type == "yarn":
        frequencies = _yarn_frequencies(rope, frequencies, head_dim)
    else:
        assert rope.rope_type == "default", rope
    if rope.freq_divisors is not None:
        frequencies = frequencies / np.asarray(rope.freq_divisors)
    return frequencies


def attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature on attention (arXiv 2309.00071, section 3.4); 1 for other types."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3_frequencies(rope: RopeConfig, base: Float64) -> Float64:
    """Low frequencies divided by the factor, high ones kept, a linear blend between."""
    assert rope.original_max_position_embeddings is not None
    turns = rope.original_max_position_embeddings * base / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn_frequencies(rope: RopeConfig, base: Float64, head_dim: int) -> Float64:
    """Interpolated where a plane turns seldom in the original context, kept where often."""
    assert rope.original_max_position_embeddings is not None
    length = rope.original_max_position_embeddings

    def plane_with_turns(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = plane_with_turns(rope.beta_fast), plane_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    frequencies: Float64 = base / rope.factor * ramp + base * (1 - ramp)
    return frequencies
