"""The Llama family's forward pass over a paged KV cache: Llama, Mistral, Qwen2, Qwen3.

Written once for all backends: arrays are sliced and reshaped here, arithmetic is in the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rawpaged.backend import AttentionPlan, Backend, KVCache
from rawpaged.models.config import ModelConfig
from rawpaged.models.rope import rope_table
from rawpaged.models.weights import LlamaLayer, LlamaWeights
from rawpaged.tracing import Tracer


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Arrays of one step, allocated once for the largest; of the activation type unless marked."""

    residual: Any  # f32[max_num_tokens, hidden_size]
    normed: Any  # [max_num_tokens, hidden_size], an input of linear layers
    delta: Any  # [max_num_tokens, hidden_size], what a sub-layer adds to the residual
    qkv: Any  # [max_num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    attention: Any  # [max_num_tokens, num_heads * head_dim], of backend.linear_input
    gate_up: Any  # [max_num_tokens, 2 * intermediate_size]
    activated: Any  # [max_num_tokens, intermediate_size], an input of linear layers
    selected: Any  # [max_logits_rows, hidden_size], like normed
    logits: Any  # f32[max_logits_rows, vocab_size]


class Llama:
    """Weights, rotary table and activation buffers of one model on one backend."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        backend: Backend,
        *,
        max_num_tokens: int,
        max_logits_rows: int,
        max_model_len: int,
    ) -> None:
        self.config = config
        self.max_logits_rows = max_logits_rows
        self.weights = weights
        self._ops = backend
        self._tracer = Tracer()
        self._scale = config.head_dim**-0.5
        self._cos_sin = backend.upload(rope_table(config.rope, config.head_dim, max_model_len))
        self._buffers = _allocate(config, weights, backend, max_num_tokens, max_logits_rows)

    def set_tracer(self, tracer: Tracer, ops: Backend) -> None:
        """Tell of layers to `tracer` and call these ops, over the same arrays, from now on."""
        self._tracer = tracer
        self._ops = ops

    def forward(self, plan: AttentionPlan, kv_caches: Sequence[KVCache]) -> None:
        """Compute the final hidden states of the batch and write its keys and values.

        `compute_logits` reads the hidden states until the next call.
        """
        ops, config, n = self._ops, self.config, plan.num_tokens
        residual, normed = self._buffers.residual[:n], self._buffers.normed[:n]
        delta = self._buffers.delta[:n]
        ops.embed(residual, plan.token_ids, self.weights.embed_tokens)
        for index in range(config.num_layers):
            with self._tracer.layer(index):
                self._run_layer(index, plan, kv_caches[index])
        ops.add_rms_norm(normed, delta, residual, self.weights.norm, config.rms_norm_eps)

    def _run_layer(self, index: int, plan: AttentionPlan, cache: KVCache) -> None:
        """Add to the residual what came before and attention; delta = the feed-forward's output."""
        ops, config, n = self._ops, self.config, plan.num_tokens
        residual, normed = self._buffers.residual[:n], self._buffers.normed[:n]
        delta, layer = self._buffers.delta[:n], self.weights.layers[index]
        if index == 0:
            ops.rms_norm(normed, residual, layer.input_layernorm, config.rms_norm_eps)
        else:
            ops.add_rms_norm(normed, delta, residual, layer.input_layernorm, config.rms_norm_eps)
        window = config.sliding_windows[index] if config.sliding_windows else None
        self._attend(layer, plan, cache, window)
        ops.add_rms_norm(
            normed, delta, residual, layer.post_attention_layernorm, config.rms_norm_eps
        )
        self._feed_forward(layer, n)

    def compute_logits(self, rows: Any) -> Any:
        """f32[len(rows), vocab_size] of token rows of the last `forward`; valid until the next."""
        count = rows.shape[0]
        assert count <= self.max_logits_rows, f"{count=} {self.max_logits_rows=}"
        selected, logits = self._buffers.selected[:count], self._buffers.logits[:count]
        self._ops.gather_rows(selected, self._buffers.normed, rows)
        self._ops.linear(logits, selected, self.weights.lm_head)
        return logits

    def _attend(
        self, layer: LlamaLayer, plan: AttentionPlan, cache: KVCache, window: int | None
    ) -> None:
        """delta = output projection of attention over `normed`."""
        ops, config, n = self._ops, self.config, plan.num_tokens
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv, attention = self._buffers.qkv[:n], self._buffers.attention[:n]
        ops.linear(qkv, self._buffers.normed[:n], layer.qkv_proj)
        heads = qkv.reshape((n, num_heads + 2 * num_kv_heads, head_dim))
        q = heads[:, :num_heads]
        k = heads[:, num_heads : num_heads + num_kv_heads]
        v = heads[:, num_heads + num_kv_heads :]
        if layer.q_norm is not None:
            ops.rms_norm(q, q, layer.q_norm, config.rms_norm_eps)
        if layer.k_norm is not None:
            ops.rms_norm(k, k, layer.k_norm, config.rms_norm_eps)
        ops.rope_and_store_kv(cache, q, k, v, plan.positions, self._cos_sin, plan.slot_mapping)
        ops.paged_attention(
            attention.reshape((n, num_heads, head_dim)),
            q,
            cache,
            plan,
            scale=self._scale,
            sliding_window=window,
        )
        ops.linear(self._buffers.delta[:n], attention, layer.o_proj)

    def _feed_forward(self, layer: LlamaLayer, n: int) -> None:
        """delta = down(silu(gate(normed)) * up(normed))."""
        ops, buffers = self._ops, self._buffers
        ops.linear(buffers.gate_up[:n], buffers.normed[:n], layer.gate_up_proj)
        ops.silu_and_mul(buffers.activated[:n], buffers.gate_up[:n])
        ops.linear(buffers.delta[:n], buffers.activated[:n], layer.down_proj)


def workspace_bytes(
    config: ModelConfig, backend: Backend, max_num_tokens: int, max_logits_rows: int
) -> int:
    """Bytes of the activation buffers."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    per_token = 2 * config.hidden_size + heads * config.head_dim + 3 * config.intermediate_size
    act = 4 if backend.activation_dtype == "float32" else 2
    return max_num_tokens * (act * per_token + 4 * config.hidden_size) + max_logits_rows * (
        act * config.hidden_size + 4 * config.vocab_size
    )


def _allocate(
    config: ModelConfig,
    weights: LlamaWeights,
    backend: Backend,
    max_num_tokens: int,
    max_logits_rows: int,
) -> _Buffers:
    def buffer(rows: int, columns: int, dtype: str = backend.activation_dtype) -> Any:
        return backend.empty((rows, columns), dtype)

    n = max_num_tokens
    take_normed = [weights.lm_head]
    for layer in weights.layers:
        take_normed += (layer.qkv_proj, layer.gate_up_proj)
    return _Buffers(
        residual=buffer(n, config.hidden_size, "float32"),
        normed=backend.linear_input(n, take_normed),
        delta=buffer(n, config.hidden_size),
        qkv=buffer(n, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
        attention=backend.linear_input(
            n, [layer.o_proj for layer in weights.layers], piece=config.head_dim
        ),
        gate_up=buffer(n, 2 * config.intermediate_size),
        activated=backend.linear_input(n, [layer.down_proj for layer in weights.layers]),
        selected=backend.linear_input(max_logits_rows, take_normed),
        logits=buffer(max_logits_rows, config.vocab_size, "float32"),
    )
