"""config.json and generation_config.json of a Hugging Face checkpoint -> ModelConfig.

Defaults are those of the transformers configuration class of each architecture, so that a file
means here what it means there. What this package cannot compute is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rawpaged.errors import CheckpointError
from rawpaged.models import limits
from rawpaged.models.config import ModelConfig
from rawpaged.models.fields import Fields, show
from rawpaged.models.hf_quantization import parse_kv_scale_dtype
from rawpaged.models.hf_rope import parse_hf_rope

DTYPES = ("float32", "bfloat16", "float16")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What transformers assumes where config.json says nothing."""

    model_type: str
    max_position_embeddings: int
    num_kv_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None


ARCHITECTURES: Mapping[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture("llama", 2048, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": _Architecture(
        "mistral", 131072, num_kv_heads=8, bos_token_id=1, eos_token_id=2
    ),
    "Qwen2ForCausalLM": _Architecture("qwen2", 32768),
    "Qwen3ForCausalLM": _Architecture("qwen3", 32768, head_dim=128),
}


def parse_hf_config(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
) -> ModelConfig:
    """The model that the two files describe.

    Raises CheckpointError, naming the field, its value and what is supported, for anything that
    is out of range or that this package does not compute.
    """
    fields = Fields(config)
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    defaults = ARCHITECTURES[architecture]
    hidden_size = fields.integer("hidden_size", 1, limits.MAX_HIDDEN_SIZE)
    num_layers = fields.integer("num_hidden_layers", 1, limits.MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 1, limits.MAX_HEADS)
    max_positions = fields.integer(
        "max_position_embeddings", 1, limits.MAX_POSITIONS, defaults.max_position_embeddings
    )
    vocab_size = fields.integer("vocab_size", 1, limits.MAX_VOCAB_SIZE)
    is_llama = architecture == "LlamaForCausalLM"
    has_bias_option = is_llama or architecture == "Qwen3ForCausalLM"
    attention_bias = has_bias_option and fields.boolean("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, limits.MAX_INTERMEDIATE_SIZE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads, defaults),
        head_dim=_head_dim(fields, hidden_size, num_heads, defaults),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6, above_low=True),
        rope=parse_hf_rope(fields, max_positions),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=is_llama and fields.boolean("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_sliding_windows(fields, architecture, num_layers, max_positions),
        dtype=_dtype(fields),
        kv_scale_dtype=parse_kv_scale_dtype(fields),
        bos_token_id=_bos_token_id(fields, vocab_size, defaults),
        eos_token_ids=_eos_token_ids(fields, generation_config, vocab_size, defaults),
    )


def _architecture(fields: Fields) -> str:
    supported = ", ".join(ARCHITECTURES)
    named = fields.values.get("architectures")
    if named is None:
        model_type = fields.values.get("model_type")
        for name, architecture in ARCHITECTURES.items():
            if architecture.model_type == model_type:
                return name
        raise CheckpointError(
            f"architectures is missing and model_type={show(model_type)} is unknown; "
            f"supported: {supported}"
        )
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise fields.error("architectures", f"must list one name; supported: {supported}")
    if named[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"architecture {show(named[0])} is not supported; supported: {supported}"
        )
    return named[0]


def _refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "is not supported; supported: silu")


def _num_kv_heads(fields: Fields, num_heads: int, defaults: _Architecture) -> int:
    # A null asks for as many as query heads in every architecture; only Mistral's class has
    # another number for a field that is absent.
    absent = "num_key_value_heads" not in fields.values
    default = defaults.num_kv_heads if absent and defaults.num_kv_heads else num_heads
    num_kv_heads = fields.integer("num_key_value_heads", 1, limits.MAX_HEADS, default)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(
    fields: Fields, hidden_size: int, num_heads: int, defaults: _Architecture
) -> int:
    if fields.has("head_dim"):
        head_dim = fields.integer("head_dim", 2, limits.MAX_HEAD_DIM)
    elif defaults.head_dim is not None:
        head_dim = defaults.head_dim
    elif hidden_size % num_heads:
        raise CheckpointError(
            f"head_dim is missing and hidden_size={hidden_size} is not a multiple of "
            f"num_attention_heads={num_heads}"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(f"head_dim={head_dim} is odd; rotary embedding needs pairs")
    if not 2 <= head_dim <= limits.MAX_HEAD_DIM:
        raise CheckpointError(f"head_dim={head_dim} must be from 2 to {limits.MAX_HEAD_DIM}")
    return head_dim


def _sliding_windows(
    fields: Fields, architecture: str, num_layers: int, max_positions: int
) -> tuple[int | None, ...]:
    everything = (None,) * num_layers
    if architecture == "LlamaForCausalLM":
        return everything
    if architecture == "MistralForCausalLM":
        absent = "sliding_window" not in fields.values
        if not absent and not fields.has("sliding_window"):
            return everything
        window = fields.integer("sliding_window", 1, limits.MAX_POSITIONS, 4096)
        slides = _slides(fields, num_layers, first_sliding=0)
        if not all(slides):
            raise fields.error("layer_types", "is not supported for MistralForCausalLM")
        return (window,) * num_layers
    if not fields.boolean("use_sliding_window", False):
        return everything
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        return everything
    window = fields.integer("sliding_window", 1, limits.MAX_POSITIONS, 4096)
    first_sliding = fields.integer("max_window_layers", 0, limits.MAX_POSITIONS, 28)
    slides = _slides(fields, num_layers, first_sliding)
    return tuple(window if slide else None for slide in slides)


def _slides(fields: Fields, num_layers: int, first_sliding: int) -> list[bool]:
    """Which layers have a window; without `layer_types`, all from `first_sliding` on."""
    if not fields.has("layer_types"):
        return [layer >= first_sliding for layer in range(num_layers)]
    layer_types = fields.values["layer_types"]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.error("layer_types", f"must list {num_layers} layers")
    if any(layer_type not in LAYER_TYPES for layer_type in layer_types):
        raise fields.error("layer_types", f"holds others than {', '.join(LAYER_TYPES)}")
    return [layer_type == "sliding_attention" for layer_type in layer_types]


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(key, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.error(key, f"is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _bos_token_id(fields: Fields, vocab_size: int, defaults: _Architecture) -> int | None:
    if "bos_token_id" not in fields.values:
        default = defaults.bos_token_id
        return default if default is not None and default < vocab_size else None
    if not fields.has("bos_token_id"):
        return None
    return fields.integer("bos_token_id", 0, vocab_size - 1)


def _eos_token_ids(
    fields: Fields,
    generation_config: Mapping[str, object] | None,
    vocab_size: int,
    defaults: _Architecture,
) -> frozenset[int]:
    """Those of both files: chat models often put their end of turn only into the second."""
    sources = [fields]
    if generation_config is not None:
        sources.append(Fields(generation_config, "generation_config."))
    ids: set[int] = set()
    for source in sources:
        given = source.values.get("eos_token_id")
        for token_id in given if isinstance(given, list) else [given]:
            if token_id is not None:
                one = Fields({"eos_token_id": token_id}, source.prefix)
                ids.add(one.integer("eos_token_id", 0, vocab_size - 1))
    if not any("eos_token_id" in source.values for source in sources):
        default = defaults.eos_token_id
        return frozenset() if default is None or default >= vocab_size else frozenset({default})
    return frozenset(ids)
