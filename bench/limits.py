"""What a case of `bench.compare` takes at least on this machine: a model, not a measurement.

Prompts are computed at the peak of the processors' products, then decode steps of as many requests
as run at once read all weights and their KV at the memory's peak, or compute at that of products,
whichever takes longer. Everything else is free. A server that computes prompts in the same steps in
which others decode can come a little below: reading and computing then go on at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.attention_cases import attention_flops
from bench.op_cases import product_of
from bench.presets import ServeCase
from bench.probes import Peaks
from rawpaged.config import EngineConfig
from rawpaged.cpu.block_types import BLOCK_TYPES
from rawpaged.engine.loading import plan_only


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What a model moves and computes."""

    weight_bytes: int
    """Read in each step."""
    kv_bytes_per_token: int
    layer_flops: int
    """Products of a token in all layers, attention left out."""
    head_flops: int
    """Products of a token's logits."""
    num_heads: int
    head_dim: int
    num_layers: int
    weights_type: str
    """Of most of the weights."""
    kv_type: str

    def attention_flops(self, queries: int, context: int) -> int:
        """Of the last `queries` of so many tokens, in all layers."""
        return self.num_layers * attention_flops(self.num_heads, self.head_dim, queries, context)


def work_of_model(model: str, dtype: str) -> ModelWork:
    """As this engine would hold the model; raises RawpagedError."""
    config, plan = plan_only(EngineConfig(model=model, dtype=dtype))
    hidden, kv_heads, size = config.hidden_size, config.num_kv_heads, config.head_dim
    attention = 2 * hidden * size * (config.num_heads + kv_heads)
    layers = config.num_layers * (attention + 3 * hidden * config.intermediate_size)
    head = hidden * config.vocab_size
    # Of a table that is not the head too, a step reads a few rows.
    unread = 0 if config.tie_word_embeddings else head
    largest = plan.weights_types.replace(",", "").split()[0]
    return ModelWork(
        weight_bytes=plan.weights_bytes * (layers + head) // (layers + head + unread),
        kv_bytes_per_token=plan.bytes_per_token,
        layer_flops=2 * layers,
        head_flops=2 * head,
        num_heads=config.num_heads,
        head_dim=size,
        num_layers=config.num_layers,
        weights_type=largest if largest in BLOCK_TYPES else plan.dtype,
        kv_type=plan.kv_cache_dtype,
    )


def least_seconds(work: ModelWork, case: ServeCase, peaks: Peaks) -> float:
    """All requests of a case; raises ValueError for one whose requests arrive by the clock."""
    if case.concurrency is None:
        raise ValueError(f"case {case.name} has no concurrency, and so no least time")
    weights_rate = peaks.flops_per_s[product_of(work.weights_type)]
    attention_rate = peaks.flops_per_s[product_of(work.kv_type)]
    own_len = case.prompt_len - case.shared_prefix_len
    num_tokens = case.shared_prefix_len + case.num_requests * own_len
    products = num_tokens * work.layer_flops + case.num_requests * work.head_flops
    attention = case.num_requests * work.attention_flops(own_len, case.prompt_len)
    if case.shared_prefix_len:
        attention += work.attention_flops(case.shared_prefix_len, case.shared_prefix_len)
    prompts = products / weights_rate + attention / attention_rate
    at_once = min(case.concurrency, case.num_requests)
    num_steps = case.num_requests * (case.output_len - 1) / at_once
    context = case.prompt_len + case.output_len // 2
    moved = work.weight_bytes + at_once * context * work.kv_bytes_per_token
    computed = at_once * (
        (work.layer_flops + work.head_flops) / weights_rate
        + work.attention_flops(1, context) / attention_rate
    )
    return prompts + num_steps * max(moved / peaks.read_bytes_per_s, computed)
