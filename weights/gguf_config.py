"""GGUF metadata -> ModelConfig, with llama.cpp's defaults and meanings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rawpaged.errors import CheckpointError
from rawpaged.models import limits
from rawpaged.models.config import ModelConfig, RopeConfig
from rawpaged.models.fields import Fields

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral's files say llama as well
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_SCALING_TYPES = ("none", "linear", "yarn")
# Tokens that end a turn or a message; llama.cpp stops at each of them.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Keys that change the arithmetic of a layer when they are neither absent nor 0.
REFUSED_KEYS = (
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
)


@dataclass(frozen=True, slots=True)
class GGUFTensors:
    """What the configuration depends on beside the metadata."""

    shapes: Mapping[str, tuple[int, ...]]
    """By the names in the file."""
    dtype: str
    """ModelConfig.dtype of the layers' weights."""
    freq_divisors: tuple[float, ...] | None
    """`rope_freqs.weight`: how llama.cpp stores Llama 3 rope."""


def parse_gguf_config(metadata: Mapping[str, object], tensors: GGUFTensors) -> ModelConfig:
    """Raises CheckpointError, naming the key and its value, for what is not supported."""
    general = Fields(metadata)
    architecture = general.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise general.error(
            "general.architecture", f"is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    prefix = architecture + "."
    fields = Fields(
        {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)},
        prefix,
    )
    _refuse_unsupported(fields)
    hidden_size = fields.integer("embedding_length", 1, limits.MAX_HIDDEN_SIZE)
    num_layers = fields.integer("block_count", 1, limits.MAX_LAYERS)
    num_heads = _uniform(fields, "attention.head_count").integer(
        "attention.head_count", 1, limits.MAX_HEADS
    )
    num_kv_heads = _num_kv_heads(fields, num_heads)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    max_positions = fields.integer("context_length", 1, limits.MAX_POSITIONS)
    vocab_size = _vocab_size(tensors)
    return ModelConfig(
        architecture=ARCHITECTURES[architecture],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_uniform(fields, "feed_forward_length").integer(
            "feed_forward_length", 1, limits.MAX_INTERMEDIATE_SIZE
        ),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0, above_low=True),
        rope=_rope(fields, max_positions, head_dim, tensors.freq_divisors),
        tie_word_embeddings="output.weight" not in tensors.shapes,
        qkv_bias=_has_bias(tensors, "attn_q", "attn_k", "attn_v"),
        o_bias=_has_bias(tensors, "attn_output"),
        mlp_bias=_has_bias(tensors, "ffn_gate", "ffn_up", "ffn_down"),
        qk_norm=architecture == "qwen3",
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        dtype=tensors.dtype,
        bos_token_id=_token_id(general, "bos_token_id", vocab_size),
        eos_token_ids=_eos_token_ids(general, vocab_size),
    )


def _refuse_unsupported(fields: Fields) -> None:
    for key in REFUSED_KEYS:
        if fields.has(key) and fields.values[key] != 0:
            raise fields.error(key, "is not supported")
    if not fields.boolean("attention.causal", True):
        raise fields.error("attention.causal", "is not supported; supported: true")


def _uniform(fields: Fields, key: str) -> Fields:
    """`fields` with a per-layer list of equal numbers under `key` replaced by the number."""
    value = fields.values.get(key)
    if not isinstance(value, list):
        return fields
    if not value or any(item != value[0] for item in value):
        raise fields.error(key, "is not supported: all layers must be alike")
    return Fields({key: value[0]}, fields.prefix)


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    key = "attention.head_count_kv"
    num_kv_heads = _uniform(fields, key).integer(key, 1, limits.MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(key, f"must divide attention.head_count={num_heads}")
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if not fields.has("attention.key_length") and hidden_size % num_heads:
        raise fields.error("embedding_length", f"must be a multiple of {num_heads} heads")
    head_dim = fields.integer(
        "attention.key_length", 2, limits.MAX_HEAD_DIM, hidden_size // num_heads
    )
    if head_dim % 2:
        raise CheckpointError(f"{fields.prefix}attention.key_length={head_dim} is odd")
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, 0, limits.MAX_HEAD_DIM, head_dim) != head_dim:
            raise fields.error(key, f"is not supported; supported: the key length, {head_dim}")
    return head_dim


def _vocab_size(tensors: GGUFTensors) -> int:
    shape = tensors.shapes.get("token_embd.weight")
    if shape is None:
        raise CheckpointError("tensor 'token_embd.weight' is missing")
    if len(shape) != 2 or not 1 <= shape[0] <= limits.MAX_VOCAB_SIZE:
        raise CheckpointError(f"tensor 'token_embd.weight' has bad shape {list(shape)}")
    return shape[0]


def _has_bias(tensors: GGUFTensors, *parts: str) -> bool:
    return any(f"blk.0.{part}.bias" in tensors.shapes for part in parts)


def _sliding_windows(
    fields: Fields, architecture: str, num_layers: int
) -> tuple[int | None, ...]:
    # Qwen's converters may copy a window that the model has switched off; llama.cpp ignores it.
    window = 0
    if architecture == "llama":
        window = fields.integer("attention.sliding_window", 0, limits.MAX_POSITIONS, 0)
    return (window or None,) * num_layers


def _token_id(general: Fields, key: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{key}"
    return general.integer(key, 0, vocab_size - 1) if general.has(key) else None


def _eos_token_ids(general: Fields, vocab_size: int) -> frozenset[int]:
    ids = (_token_id(general, key, vocab_size) for key in EOS_KEYS)
    return frozenset(token_id for token_id in ids if token_id is not None)


def _rope(
    fields: Fields, max_positions: int, head_dim: int, freq_divisors: tuple[float, ...] | None
) -> RopeConfig:
    if freq_divisors is not None and len(freq_divisors) != head_dim // 2:
        raise CheckpointError(
            f"tensor 'rope_freqs.weight' has {len(freq_divisors)} elements, "
            f"half the key length is {head_dim // 2}"
        )
    theta = fields.number("rope.freq_base", 1.0, limits.MAX_ROPE_THETA, 10000.0, above_low=True)
    # llama.cpp takes a factor without a type for linear, and a factor of 0 for none.
    factor_key = "rope.scaling.factor"
    if not fields.has(factor_key) and fields.has("rope.scale_linear"):
        factor_key = "rope.scale_linear"
    factor = fields.number(factor_key, 0.0, limits.MAX_ROPE_FACTOR, 1.0) or 1.0
    scaling = fields.text("rope.scaling.type", "linear")
    if scaling not in ROPE_SCALING_TYPES:
        raise fields.error(
            "rope.scaling.type", f"is not supported; supported: {', '.join(ROPE_SCALING_TYPES)}"
        )
    if scaling == "yarn":
        return _yarn(fields, theta, factor, max_positions, freq_divisors)
    if scaling == "none" or factor == 1.0:
        return RopeConfig(rope_theta=theta, freq_divisors=freq_divisors)
    return RopeConfig(
        rope_type="linear", rope_theta=theta, factor=factor, freq_divisors=freq_divisors
    )


def _yarn(
    fields: Fields,
    theta: float,
    factor: float,
    max_positions: int,
    freq_divisors: tuple[float, ...] | None,
) -> RopeConfig:
    key = "rope.scaling.yarn_ext_factor"
    if fields.number(key, -1.0, 1e6, 1.0) not in (1.0, -1.0):  # -1: the default, which is 1
        raise fields.error(key, "is not supported; supported: 1")
    log_multiplier = fields.number("rope.scaling.yarn_log_multiplier", 0.0, 1e3, 0.0)
    return RopeConfig(
        rope_type="yarn",
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", 1, limits.MAX_POSITIONS, max_positions
        ),
        attention_factor=_attention_factor(fields, factor, log_multiplier),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 0.0, 1e6, 32.0, above_low=True),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 0.0, 1e6, 1.0, above_low=True),
        mscale=1.0 if log_multiplier else None,
        mscale_all_dim=log_multiplier or None,
        freq_divisors=freq_divisors,
    )


def _attention_factor(fields: Fields, factor: float, log_multiplier: float) -> float | None:
    """None where the file leaves YaRN's own factor as it is; else the product with it."""
    extra = 1.0
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        extra *= fields.number(key, 0.0, 1e3, 1.0)
    if extra == 1.0:
        return None
    log_factor = 0.1 * math.log(max(factor, 1.0))
    own = (1.0 + log_factor) / (1.0 + log_multiplier * log_factor if log_multiplier else 1.0)
    return extra * own
