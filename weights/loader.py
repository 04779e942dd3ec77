"""Packs a checkpoint's tensors, or random ones, into a backend's weights, layer by layer.

At no time does more than one layer (or one embedding table) lie beside the packed copy: tensors
are views of the mapped file until they are concatenated. Values are not inspected: a checkpoint
with NaN in it loads, as it does elsewhere.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.backend import Backend, LinearWeight, QuantizedRows
from rawpaged.errors import CheckpointError
from rawpaged.models.config import ModelConfig
from rawpaged.models.weights import LlamaLayer, LlamaWeights
from rawpaged.progress import ProgressBar
from rawpaged.weights.checkpoint import Checkpoint
from rawpaged.weights.names import EMBED_TOKENS, LM_HEAD, NORM, expected_shapes
from rawpaged.weights.sizes import kept_type

DUMMY_STD = 0.02

Tensor = npt.NDArray[Any] | QuantizedRows
ReadTensor = Callable[[str], Tensor]


def load_weights(
    checkpoint: Checkpoint,
    backend: Backend,
    *,
    keep_quantized: bool = False,
    progress: bool = True,
) -> LlamaWeights:
    """The checkpoint's weights in the backend's type and layout, owned by the caller.

    With `keep_quantized` matrices of the types in the backend's `block_bits` stay in their blocks;
    all others are dequantised. Shows a bar of bytes read on stderr if that is a terminal and
    `progress` is set. Raises CheckpointError for a checkpoint opened without its tensors.
    """
    tensors = checkpoint.tensors
    if tensors is None:
        raise CheckpointError(f"{checkpoint.path}: was opened with load_format='dummy'")
    config = checkpoint.model_config
    total = sum(tensors.nbytes(name) for name in expected_shapes(config))
    block_bits = backend.block_bits if keep_quantized else {}
    hidden = not (progress and sys.stderr.isatty())
    with ProgressBar(total=total, unit="B", unit_scale=True, desc="weights", disable=hidden) as bar:

        def read(name: str) -> Tensor:
            kept = kept_type(tensors, name, block_bits)
            blocks = None if kept is None else QuantizedRows(kept, tensors.read_blocks(name))
            bar.update(tensors.nbytes(name))
            return tensors.read(name) if blocks is None else blocks

        return _assemble(config, backend, read)


def dummy_weights(config: ModelConfig, backend: Backend, *, seed: int) -> LlamaWeights:
    """Random weights that depend on `seed` and the tensor's name alone; norms lie around 1."""
    shapes = expected_shapes(config)

    def read(name: str) -> npt.NDArray[Any]:
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = generator.standard_normal(shapes[name], dtype=np.float32)
        values *= np.float32(DUMMY_STD)
        if name.endswith("norm.weight"):
            values += np.float32(1)
        return values

    return _assemble(config, backend, read)


def _assemble(config: ModelConfig, backend: Backend, read: ReadTensor) -> LlamaWeights:
    embed_tokens = _pack(backend, [read(EMBED_TOKENS)], None)
    layers = tuple(
        _layer(config, backend, read, f"model.layers.{layer}.")
        for layer in range(config.num_layers)
    )
    norm = _norm(backend, read(NORM))
    lm_head = embed_tokens
    if not config.tie_word_embeddings:
        lm_head = _pack(backend, [read(LM_HEAD)], None)
    return LlamaWeights(embed_tokens, layers, norm, lm_head)


def _layer(config: ModelConfig, backend: Backend, read: ReadTensor, prefix: str) -> LlamaLayer:
    def linear(parts: tuple[str, ...], has_bias: bool) -> LinearWeight:
        weights = [read(f"{prefix}{part}.weight") for part in parts]
        bias = None
        if has_bias:
            bias = _concatenate([_numbers(read(f"{prefix}{part}.bias")) for part in parts])
        return _pack(backend, weights, bias)

    def norm(part: str) -> Any:
        return _norm(backend, read(f"{prefix}{part}.weight"))

    return LlamaLayer(
        input_layernorm=norm("input_layernorm"),
        qkv_proj=linear(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias
        ),
        q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        o_proj=linear(("self_attn.o_proj",), config.o_bias),
        post_attention_layernorm=norm("post_attention_layernorm"),
        gate_up_proj=linear(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        down_proj=linear(("mlp.down_proj",), config.mlp_bias),
    )


def _pack(backend: Backend, parts: list[Tensor], bias: npt.NDArray[Any] | None) -> LinearWeight:
    if any(isinstance(part, QuantizedRows) for part in parts):
        return backend.pack_quantized(parts, bias)
    return backend.pack_linear(_concatenate([_numbers(part) for part in parts]), bias)


def _norm(backend: Backend, weight: Tensor) -> Any:
    return backend.upload(_numbers(weight).astype(np.float32))


def _numbers(tensor: Tensor) -> npt.NDArray[Any]:
    assert not isinstance(tensor, QuantizedRows), "only matrices stay in blocks"
    return tensor


def _concatenate(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Rows of all parts; float32 if the parts differ in type, as in mixed quantised files."""
    if len(parts) == 1:
        return parts[0]
    if len({part.dtype for part in parts}) > 1:
        parts = [part.astype(np.float32) for part in parts]
    return np.concatenate(parts)
