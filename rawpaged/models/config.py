"""What a checkpoint says about its model, in one shape whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; field names are those of `rope_parameters` in config.json."""

    rope_type: str = "default"
    """"default", "linear", "llama3" or "yarn"."""
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_divisors: tuple[float, ...] | None = None
    """f32[head_dim / 2]: the inverse frequencies that the fields above give are divided by these
    (GGUF stores Llama 3 rope so)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder-only model of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before RoPE (Qwen3)."""
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer: how many last positions, its own among them, a query sees; None: all."""
    dtype: str = "float32"
    """Type the checkpoint declares: "float32", "bfloat16" or "float16"."""
    kv_scale_dtype: str | None = None
    """Type of cache that the checkpoint's KV scales are for, if it says: "fp8_e4m3" or "int8"."""
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def num_parameters(self) -> int:
        """Weights and biases, a tied embedding counted once."""
        qkv_size = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = (
            self.hidden_size * qkv_size
            + self.num_heads * self.head_dim * self.hidden_size
            + 3 * self.hidden_size * self.intermediate_size
            + 2 * self.hidden_size
            + (qkv_size if self.qkv_bias else 0)
            + (self.hidden_size if self.o_bias else 0)
            + (2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0)
            + (2 * self.head_dim if self.qk_norm else 0)
        )
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size
