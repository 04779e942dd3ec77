"""A small model as a GGUF file whose matrices are blocks of any types, with weights at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from rawpaged.models.config import ModelConfig
from rawpaged.weights.gguf import gguf_name
from rawpaged.weights.names import expected_shapes
from tests.cpu.blocks import random_rows
from tests.weights.builders import add_key, gguf_metadata, tiny_config

BLOCK_MODEL: ModelConfig = replace(
    tiny_config("llama"),
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    sliding_windows=(None, None),
    tie_word_embeddings=True,
    dtype="float16",
)


def k_m_types(name: str) -> str:
    """As the files named Q4_K_M mix them, and an old type for good measure."""
    if name.endswith(("v_proj.weight", "down_proj.weight")) or "embed_tokens" in name:
        return "Q6_K"
    if name.startswith("model.layers.1.") and "mlp" in name:
        return "Q5_K"
    return "Q5_0" if name.endswith("o_proj.weight") else "Q4_K"


def write_block_model(path: Path, type_of: Callable[[str], str]) -> Path:
    """BLOCK_MODEL with matrices of the types that `type_of` gives for their names."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in gguf_metadata(BLOCK_MODEL).items():
        add_key(writer, f"llama.{key}", value)
    add_key(writer, "tokenizer.ggml.tokens", ["a"])
    rng = np.random.default_rng(0)
    for name, shape in expected_shapes(BLOCK_MODEL).items():
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), np.ones(shape, np.float32))
            continue
        type_name = type_of(name)
        kind = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(gguf_name(name), random_rows(rng, type_name, *shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
