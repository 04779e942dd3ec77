"""Which tensors a model has, under which names and in which shapes."""

from __future__ import annotations

import logging
import re

from rawpaged.errors import CheckpointError
from rawpaged.models.config import ModelConfig
from rawpaged.weights.tensors import TensorSource

logger = logging.getLogger(__name__)

EMBED_TOKENS = "model.embed_tokens.weight"
NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

MAX_LISTED = 8
KV_SCALES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
"""Scales of keys and of values after `model.layers.<i>.self_attn.`: vLLM's names, ModelOpt's, and
two that compressed-tensors has written; `kv_scale` is both."""
# Tables that old versions of transformers saved and that follow from the configuration; scales
# for a quantised KV cache, and of queries beside them.
KNOWN = re.compile(
    r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|model\.layers\.\d+\.self_attn\.(attn\.|[kv]_proj\.)?([qkv]|kv|output)_scale"
)

Shape = tuple[int, ...]


def layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Tensors of one layer, by the part of the name after `model.layers.<i>.`."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    linears: dict[str, tuple[Shape, bool]] = {
        "self_attn.q_proj": ((q_size, hidden), config.qkv_bias),
        "self_attn.k_proj": ((kv_size, hidden), config.qkv_bias),
        "self_attn.v_proj": ((kv_size, hidden), config.qkv_bias),
        "self_attn.o_proj": ((hidden, q_size), config.o_bias),
        "mlp.gate_proj": ((intermediate, hidden), config.mlp_bias),
        "mlp.up_proj": ((intermediate, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, intermediate), config.mlp_bias),
    }
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (shape, has_bias) in linears.items():
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor the model needs, by Hugging Face name."""
    shapes: dict[str, Shape] = {EMBED_TOKENS: (config.vocab_size, config.hidden_size)}
    of_a_layer = layer_shapes(config)
    for layer in range(config.num_layers):
        for name, shape in of_a_layer.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes[NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = shapes[EMBED_TOKENS]
    return shapes


def validate_tensors(config: ModelConfig, tensors: TensorSource, where: str) -> None:
    """Raise CheckpointError unless every tensor is there, in its shape and a readable type.

    `where` names the file or directory. Tensors that the model does not use are logged.
    """
    expected = expected_shapes(config)
    present = set(tensors.names)
    missing = [tensors.stored_name(name) for name in expected if name not in present]
    if missing:
        raise CheckpointError(f"{where}: tensors are missing: {_listed(missing)}")
    faults = []
    for name, shape in expected.items():
        file, stored = tensors.file_of(name), tensors.stored_name(name)
        if tensors.shape(name) != shape:
            faults.append(
                f"{file}: tensor {stored!r} has shape {list(tensors.shape(name))}, "
                f"the configuration asks for {list(shape)}"
            )
        elif not tensors.is_supported(name):
            faults.append(f"{file}: tensor {stored!r} has unsupported type {tensors.dtype(name)}")
    if faults:
        raise CheckpointError(_listed(faults, separator="; "))
    unused = [name for name in present - expected.keys() if not _is_known(name, config)]
    if unused:
        logger.warning(
            "%s: %d tensors are not used: %s", where, len(unused), _listed(sorted(unused))
        )


def _is_known(name: str, config: ModelConfig) -> bool:
    """Whether a tensor that is not a weight may be there: what is derived, and KV scales."""
    is_tied_head = config.tie_word_embeddings and name == LM_HEAD
    return is_tied_head or KNOWN.fullmatch(name) is not None


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return separator.join(names[:MAX_LISTED]) + more
