"""The ops of a layer of a model's shape, as a recording: what `bench ops` times without one.

One layer runs once over weights of zeros, for each number of rows as a decode step (a request
each) and as a chunk of a prompt, and what it calls is written down as a profile would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.attention_cases import BLOCK_SIZE, MAX_POOL_BYTES, make_batch
from bench.replay_arrays import new_cache
from rawpaged.backend import Backend, LogitEdits, SamplingRows
from rawpaged.engine.op_recorder import OpRecorder
from rawpaged.engine.op_recording import Recording
from rawpaged.models.config import ModelConfig
from rawpaged.models.llama import Llama
from rawpaged.models.weights import LlamaLayer, LlamaWeights
from rawpaged.tracing import Tracer

_TOP_K, _TOP_P, _TEMPERATURE = 50, 0.95, 0.8
_TOP_LOGPROBS = 5


@dataclass(frozen=True, slots=True)
class _Step:
    requests: int
    queries: int
    context: int

    @property
    def name(self) -> str:
        """As steps are called in traces, with the tokens that there are then."""
        if self.queries == 1:
            return f"prefill=0 decode={self.requests} context={self.context}"
        return f"prefill={self.requests}x{self.queries} decode=0 context={self.context}"


def record_model(
    backend: Backend, model: ModelConfig, rows: Sequence[int], contexts: Sequence[int]
) -> Recording:
    """What a layer, the logits and sampling call; one step for each shape that there can be.

    Raises ValueError where there is none, because every context is shorter than all rows or its
    KV is larger than 1 GiB.
    """
    layer = replace(model, num_layers=1, sliding_windows=model.sliding_windows[:1])
    block_bytes = backend.kv_bytes_per_block(model.num_kv_heads, model.head_dim, BLOCK_SIZE)
    steps = [
        step
        for step in _steps(rows, contexts)
        if step.requests * -(-step.context // BLOCK_SIZE) * block_bytes <= MAX_POOL_BYTES
    ]
    if not steps:
        raise ValueError(f"no step has one of {list(rows)} rows over one of {list(contexts)} keys")
    num_blocks = max(step.requests * -(-step.context // BLOCK_SIZE) for step in steps)
    cache = new_cache(backend, max(2, num_blocks), model.num_kv_heads, model.head_dim, BLOCK_SIZE)
    recorder = OpRecorder(backend, lambda: [cache])
    llama = Llama(
        layer,
        _zeros(backend, layer),
        backend,
        max_num_tokens=max(step.requests * step.queries for step in steps),
        max_logits_rows=max(step.requests for step in steps),
        max_model_len=max(step.context for step in steps),
    )
    ops = recorder.ops()
    llama.set_tracer(Tracer(), ops)
    for step in steps:
        recorder.push("step", step.name, {})
        _run_step(ops, llama, step, cache)
        recorder.pop()
    return recorder.recording()


def _steps(rows: Sequence[int], contexts: Sequence[int]) -> Iterator[_Step]:
    for context in contexts:
        for count in rows:
            yield _Step(count, 1, context)
            if 1 < count <= context:
                yield _Step(1, count, context)


def _run_step(ops: Backend, llama: Llama, step: _Step, cache: Any) -> None:
    config, requests = llama.config, step.requests
    width = -(-step.context // BLOCK_SIZE)
    # Blocks of a request lie anywhere, as in a pool that has been in use.
    order = np.random.default_rng(0).permutation(requests * width).astype(np.int32)
    meta = make_batch(order.reshape(requests, width), step.queries, step.context)
    last = np.arange(step.queries - 1, requests * step.queries, step.queries, dtype=np.int32)
    plan = ops.plan(
        replace(meta, logits_rows=last),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
    )
    pairs = np.array([[0, 1]], np.int64)
    ops.copy_blocks([cache], [cache], pairs)
    llama.forward(plan, [cache])
    logits = llama.compute_logits(plan.logits_rows)
    ops.edit_logits(logits, _edits(requests))
    ops.sample(logits, _sampling_rows(requests))
    ops.token_logprobs(logits, np.zeros(requests, np.int32), _TOP_LOGPROBS)


def _edits(requests: int) -> LogitEdits:
    """One a row."""
    return LogitEdits(
        rows=np.arange(requests, dtype=np.int32),
        token_ids=np.zeros(requests, np.int32),
        bias=np.ones(requests, np.float32),
        seen=np.ones(requests, np.bool_),
        counts=np.ones(requests, np.int32),
        repetition_penalty=np.ones(requests, np.float32),
        frequency_penalty=np.full(requests, 0.25, np.float32),
        presence_penalty=np.full(requests, 0.125, np.float32),
    )


def _sampling_rows(requests: int) -> SamplingRows:
    return SamplingRows(
        temperature=np.full(requests, _TEMPERATURE, np.float32),
        top_k=np.full(requests, _TOP_K, np.int32),
        top_p=np.full(requests, _TOP_P, np.float32),
        min_p=np.zeros(requests, np.float32),
        seeds=np.arange(requests, dtype=np.uint64),
        positions=np.arange(requests, dtype=np.uint32),
        sample_indices=np.zeros(requests, np.uint32),
    )


def _zeros(backend: Backend, config: ModelConfig) -> LlamaWeights:
    """One layer of zeros; the table serves as output projection too."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim

    def linear(out_features: int, in_features: int) -> Any:
        return backend.pack_linear(np.zeros((out_features, in_features), np.float32), None)

    def norm(size: int) -> Any:
        return backend.upload(np.ones(size, np.float32))

    layer = LlamaLayer(
        input_layernorm=norm(config.hidden_size),
        qkv_proj=linear(heads + 2 * kv_heads, config.hidden_size),
        q_norm=norm(config.head_dim) if config.qk_norm else None,
        k_norm=norm(config.head_dim) if config.qk_norm else None,
        o_proj=linear(config.hidden_size, heads),
        post_attention_layernorm=norm(config.hidden_size),
        gate_up_proj=linear(2 * config.intermediate_size, config.hidden_size),
        down_proj=linear(config.hidden_size, config.intermediate_size),
    )
    table = linear(config.vocab_size, config.hidden_size)
    return LlamaWeights(table, (layer,), norm(config.hidden_size), table)
