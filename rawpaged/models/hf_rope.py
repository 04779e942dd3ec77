"""The rotary embedding of a config.json, in either of the shapes that are about.

transformers 5 writes `rope_parameters` with everything in it; older versions write `rope_theta`
beside `rope_scaling`, whose kind is under `rope_type` or, older still, `type`.
"""

from __future__ import annotations

from collections.abc import Mapping

from rawpaged.errors import CheckpointError
from rawpaged.models import limits
from rawpaged.models.config import RopeConfig
from rawpaged.models.fields import Fields, show

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0
MAX_ATTENTION_FACTOR = 1e3
MAX_BETA = 1e6


def parse_hf_rope(config: Fields, max_positions: int) -> RopeConfig:
    """Raises CheckpointError for kinds other than ROPE_TYPES and for numbers out of range."""
    rope = _rope_fields(config)
    kind = "rope_type" if rope.has("rope_type") else "type"
    rope_type = rope.text(kind, "default")
    if rope_type not in ROPE_TYPES:
        raise rope.error(kind, f"is not supported; supported: {', '.join(ROPE_TYPES)}")
    for source in (config, rope):
        if source.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise source.error("partial_rotary_factor", "is not supported; supported: 1.0")
    theta_source = rope if rope.has("rope_theta") else config
    # A base of 1 or less has no growing wavelengths, and YaRN divides by its logarithm.
    theta = theta_source.number(
        "rope_theta", 1.0, limits.MAX_ROPE_THETA, DEFAULT_THETA, above_low=True
    )
    if rope_type == "default":
        return RopeConfig(rope_theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", rope_theta=theta, factor=_factor(rope))
    original = _original_positions(config, rope, max_positions)
    if rope_type == "llama3":
        return _llama3(rope, theta, original)
    return _yarn(rope, theta, original, max_positions)


def _rope_fields(config: Fields) -> Fields:
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    values = config.values.get(key) or {}
    if not isinstance(values, Mapping):
        raise config.error(key, "must be an object")
    for name, value in values.items():
        if isinstance(value, Mapping):
            raise CheckpointError(
                f"{key}.{name}={show(value)} is not supported: one rotary embedding for all "
                "layers is"
            )
    return Fields(values, f"{key}.")


def _factor(rope: Fields) -> float:
    return rope.number("factor", 0.0, limits.MAX_ROPE_FACTOR, above_low=True)


def _original_positions(config: Fields, rope: Fields, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    # Beside the rope object it wins over one within: transformers does the same.
    source = config if config.has(key) else rope
    return source.integer(key, 1, limits.MAX_POSITIONS, max_positions)


def _llama3(rope: Fields, theta: float, original: int) -> RopeConfig:
    low = rope.number("low_freq_factor", 0.0, limits.MAX_ROPE_FACTOR, above_low=True)
    high = rope.number("high_freq_factor", 0.0, limits.MAX_ROPE_FACTOR, above_low=True)
    if high <= low:
        raise rope.error("high_freq_factor", f"must be greater than low_freq_factor={low:g}")
    return RopeConfig(
        rope_type="llama3",
        rope_theta=theta,
        factor=_factor(rope),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    beta_fast = rope.number("beta_fast", 0.0, MAX_BETA, 32.0) or 32.0
    beta_slow = rope.number("beta_slow", 0.0, MAX_BETA, 1.0) or 1.0
    if beta_fast < beta_slow:
        raise rope.error("beta_fast", f"must not be less than beta_slow={beta_slow:g}")
    return RopeConfig(
        rope_type="yarn",
        rope_theta=theta,
        factor=_factor(rope) if rope.has("factor") else max(1.0, max_positions / original),
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor", 0.0, MAX_ATTENTION_FACTOR),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=rope.optional_number("mscale", 0.0, MAX_ATTENTION_FACTOR),
        mscale_all_dim=rope.optional_number("mscale_all_dim", 0.0, MAX_ATTENTION_FACTOR),
        truncate=rope.boolean("truncate", True),
    )
