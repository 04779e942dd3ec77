"""The weights of a Llama-family model on a device, as the forward pass takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rawpaged.backend import Array, LinearWeight


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One decoder layer; rows of concatenated projections are in the order the names give."""

    input_layernorm: Array  # f32[hidden_size]
    qkv_proj: LinearWeight  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    q_norm: Array | None  # f32[head_dim]
    k_norm: Array | None  # f32[head_dim]
    o_proj: LinearWeight  # [hidden_size, num_heads * head_dim]
    post_attention_layernorm: Array  # f32[hidden_size]
    gate_up_proj: LinearWeight  # [2 * intermediate_size, hidden_size]
    down_proj: LinearWeight  # [hidden_size, intermediate_size]

    @property
    def nbytes(self) -> int:
        norms = (self.q_norm, self.k_norm, self.input_layernorm, self.post_attention_layernorm)
        linears = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        return sum(norm.nbytes for norm in norms if norm is not None) + sum(
            linear.nbytes for linear in linears
        )


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """A whole model; the arrays belong to the backend that packed them."""

    embed_tokens: LinearWeight  # [vocab_size, hidden_size]
    layers: tuple[LlamaLayer, ...]
    norm: Array  # f32[hidden_size]
    lm_head: LinearWeight  # [vocab_size, hidden_size]; tied: the same object as embed_tokens

    @property
    def nbytes(self) -> int:
        """Bytes on the device, a tied embedding counted once."""
        lm_head = 0 if self.lm_head is self.embed_tokens else self.lm_head.nbytes
        layers = sum(layer.nbytes for layer in self.layers)
        return self.embed_tokens.nbytes + layers + self.norm.nbytes + lm_head


def map_weights(
    weights: LlamaWeights,
    linear: Callable[[LinearWeight], LinearWeight],
    array: Callable[[Any], Any],
) -> LlamaWeights:
    """The same model with every matrix passed through `linear` and every vector through `array`.

    A tied embedding is passed once and stays tied.
    """

    def layer(old: LlamaLayer) -> LlamaLayer:
        return LlamaLayer(
            input_layernorm=array(old.input_layernorm),
            qkv_proj=linear(old.qkv_proj),
            q_norm=None if old.q_norm is None else array(old.q_norm),
            k_norm=None if old.k_norm is None else array(old.k_norm),
            o_proj=linear(old.o_proj),
            post_attention_layernorm=array(old.post_attention_layernorm),
            gate_up_proj=linear(old.gate_up_proj),
            down_proj=linear(old.down_proj),
        )

    embed_tokens = linear(weights.embed_tokens)
    is_tied = weights.lm_head is weights.embed_tokens
    return LlamaWeights(
        embed_tokens=embed_tokens,
        layers=tuple(layer(old) for old in weights.layers),
        norm=array(weights.norm),
        lm_head=embed_tokens if is_tied else linear(weights.lm_head),
    )
